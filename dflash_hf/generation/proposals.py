"""`Proposer`: what is sent to the target in a round, drafted or copied, and how much of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..transfers import on_device
from .block_length import BlockLength, best_length, chances
from .candidate_generator import DFlashCandidateGenerator
from .copying import Copy, Copying
from .round_costs import RoundCosts
from .sequences import Sequences


class Proposer:
    """Chooses the proposals of each round.

    With a length that the user fixed (`generator.fixed`), the drafter's block as asked for. Otherwise what gives the
    most tokens per cost: a part of a drafted block, tokens copied from the context, or nothing.

    Args:
        generator: the drafter's.
        sequences: ids of the call.
        costs: of a round, for a number of sequences.

    Attributes:
        most: the longest proposal.
        copied: rows that verified copied tokens, over all rounds.
    """

    def __init__(
        self,
        generator: DFlashCandidateGenerator,
        sequences: Sequences,
        *,
        costs: Callable[[int], RoundCosts],
    ):
        self.generator, self.sequences = generator, sequences
        self._costs = costs
        self.copied = 0
        self.length = self.copying = None
        if not generator.fixed:
            self.length = BlockLength(costs(sequences.batch_size), most=generator.max_proposals)
            if generator.copied_tokens:
                self.copying = Copying(sequences, most=generator.copied_tokens)
        self._forget_round()

    @property
    def most(self) -> int:
        """The longest proposal."""
        return max(self.generator.num_proposals, self.copying.most if self.copying else 0)

    def select(self, rows: list[int]) -> None:
        """Go on with some rows of the batch only."""
        self.generator.select(rows)
        if self.length is not None:
            self.length.use(self._costs(len(rows)))

    def propose(
        self, rows: list[int], *, live: list[bool], limit: int, pending: int
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Proposals after the newest token of each row.

        Args:
            rows: which rows of the call, n of them.
            live: for each row of the call, whether it goes on.
            limit: the most that there is room for.
            pending: tokens that the target runs again in this round.

        Returns:
            proposals `[n, k]`, k from 0 to `limit`; and when sampling the scores `[n, k, V]` whose softmax is q, or
            None if every q is 1.
        """
        self._forget_round()
        drafts = min(limit, self.generator.num_proposals)
        sequences = self.sequences
        newest = [sequences.lengths[row] - 1 for row in rows]
        if self.length is None:
            return self.generator.propose(
                sequences.window(rows, newest, 1), drafts, prefixes=lambda: list(map(sequences.prefix, rows))
            )
        self._pending = pending
        alive = [index for index, row in enumerate(rows) if live[row]]
        copies = self._look_up(rows, alive)
        tokens = self._copied_alone(len(rows), alive, copies, limit=limit)
        if tokens is not None:
            return tokens, None
        width = self.length.width(drafts, pending=pending)
        if not width:
            return self._of_copies(len(rows), {}, 0), None
        tokens, scores = self.generator.draft(
            sequences.window(rows, newest, 1), width, prefixes=lambda: list(map(sequences.prefix, rows))
        )
        self._drafted = width
        if self.length.needs_confidence:
            # One transfer a round: the host sizes the verification.
            self._confidences = self.generator.confidences(scores).tolist()
        in_order = self.generator.do_sample and self.generator.in_order
        known = None if self._confidences is None else [self._confidences[index] for index in alive]
        # Where a distribution depends on drafted values, leaving a draft for a copy would favour some of them.
        if copies and known is not None and not in_order:
            self._take_better(alive, copies, width)
        if self._copies and len(self._copies) == len(alive):
            count = self._best_of_copies(alive, self._copies, limit=width)[0]
        else:
            kept = [self._confidences[i] for i in alive if i not in self._copies] if known is not None else None
            count = self.length.count(kept, drafted=width, in_order=in_order, pending=pending)
        self._proposed = count
        tokens = tokens[:, :count]
        scores = self.generator.over_vocabulary(scores[:, :count]) if self.generator.do_sample else None
        return self._mixed(tokens, scores) if self._copies and count else (tokens, scores)

    def observe(self, rows: list[int], *, kept: list[int], live: list[bool]) -> None:
        """What became of the proposals.

        Args:
            rows: as in `propose`.
            kept: tokens that each of them keeps.
            live: for each row of the call, whether it goes on. What a row that ended would have kept is not known.
        """
        if self.length is None or not self._proposed:
            return
        known = [index for index, row in enumerate(rows) if live[row]]
        for index in known:
            if index in self._copies:
                self.copying.observe(self._copies[index], accepted=kept[index] - 1, proposed=self._proposed)
        if self._copies:
            self.copying.rates.fade()
        drafted = [index for index in known if index not in self._copies]
        if self._drafted and drafted:
            self.length.observe(
                None if self._confidences is None else [self._confidences[index] for index in drafted],
                accepted=[kept[index] - 1 for index in drafted],
                proposed=self._proposed,
                drafted=self._drafted,
                pending=self._pending,
            )

    def _forget_round(self) -> None:
        self._copies: dict[int, Copy] = {}
        self._confidences: list[list[float]] | None = None
        self._drafted = self._proposed = self._pending = 0

    def _look_up(self, rows: list[int], alive: list[int]) -> dict[int, Copy]:
        """Copies by the index of their row."""
        if self.copying is None:
            return {}
        found = ((index, self.copying.find(rows[index])) for index in alive)
        return {index: copy for index, copy in found if copy is not None}

    def _best_of_copies(self, alive: list[int], copies: dict[int, Copy], *, limit: int) -> tuple[int, float]:
        """Best length of a round that only copies, and its tokens per cost of a plain round."""
        longest = min(limit, max(len(copy.tokens) for copy in copies.values()))
        survival = [0.0] * longest
        for copy in copies.values():
            for position, chance in enumerate(self._chances_of(copy)[:longest]):
                survival[position] += chance / len(alive)
        costs = self.length.verifying(longest, self._pending)
        count, speed = best_length(survival=survival, costs=costs)
        return count, speed * costs[0]

    def _chances_of(self, copy: Copy) -> list[float]:
        return chances([self.copying.rate(copy)] * len(copy.tokens))

    def _copied_alone(
        self, batch_size: int, alive: list[int], copies: dict[int, Copy], *, limit: int
    ) -> torch.LongTensor | None:
        """Copies without a draft, if they promise more tokens per cost than drafting gave so far."""
        if not copies:
            return None
        count, speed = self._best_of_copies(alive, copies, limit=limit)
        drafting = self.length.drafting
        if not count or speed <= (1.0 if drafting.rounds_left else max(drafting.gain, 1.0)):
            return None
        self._copies, self._proposed = copies, count
        self.copied += len(copies)
        return self._of_copies(batch_size, copies, count)

    def _take_better(self, alive: list[int], copies: dict[int, Copy], width: int) -> None:
        """Leave the draft of a row for its copy where that promises more; the draft is paid for by now."""
        costs = self.length.verifying(width, self._pending)
        for index, copy in copies.items():
            drafted = chances(self.length.acceptance.of_block(self._confidences[index]))
            if (
                best_length(survival=self._chances_of(copy)[:width], costs=costs)[1]
                > best_length(survival=drafted, costs=costs)[1]
            ):
                self._copies[index] = copy
        self.copied += len(self._copies)

    def _of_copies(self, batch_size: int, copies: dict[int, Copy], count: int) -> torch.LongTensor:
        """`[batch_size, count]`; rows without a copy, or with a shorter one, hold something to be rejected."""
        rows = [copies[index].tokens[:count] if index in copies else [] for index in range(batch_size)]
        rows = [row + [0] * (count - len(row)) for row in rows]
        return on_device(rows, self.sequences.ids.device).view(batch_size, count)

    def _mixed(
        self, tokens: torch.LongTensor, scores: torch.Tensor | None
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Put copies in the place of drafts; a copy's q is 1 at its token."""
        index = on_device(list(self._copies), tokens.device)
        copied = self._of_copies(len(tokens), self._copies, tokens.shape[1])[index]
        tokens = tokens.index_copy(0, index, copied)
        if scores is not None:
            certain = torch.full_like(scores[index], -torch.inf).scatter_(-1, copied[..., None], 0.0)
            scores = scores.index_copy(0, index, certain)
        return tokens, scores
