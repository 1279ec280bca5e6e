"""How many proposals of a block are worth verifying, and when drafting is not worth it.

The speed of a round with k proposals is `(1 + S(1) + ... + S(k)) / (T_draft + T_verify(k + 1))`, S(j) being the chance
that the first j of them are all accepted. S comes from what was accepted so far in the call and from how sure the
drafter is of this block; the costs come from a table (`round_costs`). Neither the clock nor the value of a drafted
token has a say: the first would make outputs depend on the machine's load, the second would bias samples.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from .round_costs import RoundCosts

# How much older rounds count against a new one.
_FADING = 0.985
# Acceptance to expect before anything was seen, and how many observations that is worth.
_FIRST_RATE = 0.7
_FIRST_WEIGHT = 4.0
# Edges of the classes of a proposal's probability under the drafter.
_CONFIDENCES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.96, 0.99)
# What drafting is thought to gain over plain decoding at first, and for how many rounds' cost.
_FIRST_GAIN = 1.35
_FIRST_COST = 8.0
_FADING_OF_SPEED = 0.97
# Plain rounds before drafting is tried again: twice as many after each try that does not pay.
_FIRST_BREAK, _LONGEST_BREAK = 16, 256
# Verifying a whole block costs less than this many plain rounds: then the drafter need not be asked how sure it is.
_FLAT = 1.1


def best_length(*, survival: Sequence[float], costs: Sequence[float]) -> tuple[int, float]:
    """The number of proposals with the most tokens per cost.

    Args:
        survival: S(1) .. S(n).
        costs: of a round with 0 .. n proposals.

    Returns:
        k from 0 to n, the smallest of equal ones, and its tokens per cost.
    """
    best, speed, tokens = 0, 1.0 / costs[0], 1.0
    for count, chance in enumerate(survival, 1):
        tokens += chance
        if tokens / costs[count] > speed:
            best, speed = count, tokens / costs[count]
    return best, speed


def best_length_in_order(*, survival: Sequence[float], expected: Sequence[float], costs: Sequence[float]) -> int:
    """The same where a proposal's distribution depends on the values of those before it.

    Whether proposal j stays is decided by S(1) .. S(j) alone, with averages for what follows: a look at S(j + 1), which
    knows the value of token j, would bias samples.

    Args:
        survival: S(1) .. S(n).
        expected: average chance of each proposal, given that the ones before it were accepted, n of them.
        costs: of a round with 0 .. n proposals.
    """
    tokens = 1.0
    for count, chance in enumerate(survival):
        ahead = [chance]
        for rate in expected[count + 1 :]:
            ahead.append(ahead[-1] * rate)
        speed, total = tokens / costs[count], tokens
        if all((total := total + each) / cost <= speed for each, cost in zip(ahead, costs[count + 1 :])):
            return count
        tokens += chance
    return len(survival)


def chances(rates: Sequence[float]) -> list[float]:
    """S(1) .. S(n) from the chance of each proposal given those before it."""
    survival, chance = [], 1.0
    for rate in rates:
        chance *= rate
        survival.append(chance)
    return survival


class SmoothedRates:
    """Acceptance rates of several kinds of proposals, in which older observations fade.

    Args:
        kinds: how many.
    """

    def __init__(self, kinds: int):
        self.hits, self.trials = [0.0] * kinds, [0.0] * kinds

    def rate(self, kind: int, *, prior: float, weight: float = _FIRST_WEIGHT) -> float:
        """Accepted share, `prior` counting as `weight` observations."""
        return (self.hits[kind] + weight * prior) / (self.trials[kind] + weight)

    def overall(self, *, prior: float) -> float:
        """The same of all kinds together."""
        return (sum(self.hits) + _FIRST_WEIGHT * prior) / (sum(self.trials) + _FIRST_WEIGHT)

    def add(self, kind: int, accepted: bool) -> None:
        """One proposal whose fate is known: the ones before it were accepted."""
        self.hits[kind] += accepted
        self.trials[kind] += 1.0

    def fade(self, factor: float = _FADING) -> None:
        """Called once a round."""
        self.hits = [factor * value for value in self.hits]
        self.trials = [factor * value for value in self.trials]


class BlockAcceptance:
    """Chances that a drafter's proposals are accepted.

    Proposals after a rejected one, and those that were not sent, are not observed.

    Args:
        most: proposals of a whole block.
    """

    def __init__(self, most: int):
        self.slots = SmoothedRates(most)
        self.confidences = SmoothedRates(len(_CONFIDENCES) + 1)

    def average(self, count: int) -> list[float]:
        """Chance of each of the first `count` proposals given those before it."""
        overall = self.slots.overall(prior=_FIRST_RATE)
        return [self.slots.rate(slot, prior=overall) for slot in range(count)]

    def of_block(self, confidences: Sequence[float]) -> list[float]:
        """The same for one block, from the probability that the drafter gives to its likeliest token in each slot.

        Drafters are as a rule less sure than right when the target samples, and a kind of proposal that is never sent
        is never seen, so that the first guess is a generous one.
        """
        return [
            self.confidences.rate(bisect(_CONFIDENCES, sure), prior=0.3 + 0.7 * sure, weight=2.0)
            for sure in confidences
        ]

    def observe(self, confidences: Sequence[float] | None, *, accepted: int, proposed: int) -> None:
        """What became of a block."""
        for slot in range(min(accepted + 1, proposed)):
            self.slots.add(slot, slot < accepted)
            if confidences is not None:
                self.confidences.add(bisect(_CONFIDENCES, confidences[slot]), slot < accepted)

    def fade(self) -> None:
        """Called once a round with a draft."""
        self.slots.fade()
        self.confidences.fade()


class DraftingPays:
    """Whether drafting is faster than plain decoding, from tokens and costs of the rounds that drafted so far.

    When it is not, drafting stops for a while and is tried again.
    """

    def __init__(self):
        self._tokens, self._cost = _FIRST_GAIN * _FIRST_COST, _FIRST_COST
        self._break = _FIRST_BREAK
        self.rounds_left = 0

    @property
    def gain(self) -> float:
        """Tokens per cost of a plain round."""
        return self._tokens / self._cost

    def rest(self) -> bool:
        """Whether this round is a plain one; counts it."""
        if self.rounds_left:
            self.rounds_left -= 1
            return True
        return False

    def observe(self, *, tokens: float, cost: float) -> None:
        """A round with a draft.

        Args:
            tokens: produced by a sequence.
            cost: of the round, in plain rounds.
        """
        self._tokens = _FADING_OF_SPEED * self._tokens + tokens
        self._cost = _FADING_OF_SPEED * self._cost + cost
        if self.gain >= 1.0:
            self._break = _FIRST_BREAK
        elif tokens < cost:
            self.rounds_left = self._break
            self._break = min(2 * self._break, _LONGEST_BREAK)


class BlockLength:
    """The decisions of one call: whether to draft, how many slots to put through the head, how many to verify.

    Rows of a batch share them: chances are means over rows.

    Args:
        costs: of a round.
        most: proposals of a whole block.

    Attributes:
        needs_confidence: whether the length is worth a look at the block's probabilities. Not where verifying costs the
            same for any number of tokens: there the transfer to the host would cost more than it saves.
    """

    def __init__(self, costs: RoundCosts, *, most: int):
        self.acceptance = BlockAcceptance(most)
        self.drafting = DraftingPays()
        self.use(costs)
        self.needs_confidence = costs.of_verify(most + 1) > _FLAT * costs.of_verify(1)

    def use(self, costs: RoundCosts) -> None:
        """Go on with other costs: rows have left the batch."""
        self.costs = costs

    def width(self, limit: int, *, pending: int = 0) -> int:
        """How many proposals to draft, 0 to `limit`; 0 for a plain round.

        Args:
            limit: the most that there is room for.
            pending: tokens that the target runs again in this round.
        """
        if self.drafting.rest():
            return 0
        costs = [self.costs.of_draft(count) + cost for count, cost in enumerate(self.verifying(limit, pending))]
        count, _ = best_length(survival=chances(self.acceptance.average(limit)), costs=costs)
        # Some more, for a block that the drafter is sure of; at least one, to learn something.
        return min(limit, count + count // 2 + 1)

    def verifying(self, limit: int, pending: int = 0) -> list[float]:
        """Costs of verifying 0 to `limit` proposals."""
        return [self.costs.of_verify(pending + 1 + count) for count in range(limit + 1)]

    def count(
        self, confidences: Sequence[Sequence[float]] | None, *, drafted: int, in_order: bool, pending: int = 0
    ) -> int:
        """How many of the drafted proposals to verify.

        Args:
            confidences: for each row the probability of the likeliest token in each slot; None if not looked at.
            drafted: proposals of each row, at least 1.
            in_order: whether a proposal's distribution depends on the values of those before it.
            pending: tokens that the target runs again in this round.
        """
        costs = [self.costs.of_draft(drafted) + cost for cost in self.verifying(drafted, pending)]
        average = self.acceptance.average(drafted)
        if confidences is None:
            # Slots past the best length were drafted in case the drafter is sure of them, which nobody knows now.
            return max(best_length(survival=chances(average), costs=costs)[0], 1)
        rows = [chances(self.acceptance.of_block(row)) for row in confidences]
        survival = [sum(column) / len(rows) for column in zip(*rows)]
        if in_order:
            count = best_length_in_order(survival=survival, expected=average, costs=costs)
        else:
            count, _ = best_length(survival=survival, costs=costs)
        return max(count, 1)

    def observe(
        self,
        confidences: Sequence[Sequence[float]] | None,
        *,
        accepted: Sequence[int],
        proposed: int,
        drafted: int,
        pending: int = 0,
    ) -> None:
        """What became of a round with a draft.

        Args:
            confidences: as in `count`.
            accepted: proposals of each row that were accepted; rows that ended are left out, in `confidences` too.
            proposed: sent to the target.
            drafted: put through the head.
            pending: tokens that the target ran again.
        """
        for row, count in enumerate(accepted):
            seen = None if confidences is None else confidences[row]
            self.acceptance.observe(seen, accepted=count, proposed=proposed)
        self.acceptance.fade()
        cost = self.costs.of_draft(drafted) + self.costs.of_verify(pending + 1 + proposed)
        self.drafting.observe(
            tokens=1.0 + sum(accepted) / max(len(accepted), 1), cost=cost / self.costs.of_verify(pending + 1)
        )
