"""The block length that costs and acceptance call for: arithmetic, estimates, and what generate makes of them."""

import copy
import itertools
import random

import pytest
import torch
from generation_helpers import assert_same_ids, drafter_for, plain, prompt, propose, small_target
from test_sampling import LEVEL, SETTINGS, VOCAB, chi_square_p_value, decode_once, draw, exact_joint

import dflash_hf
from dflash_hf import DFlashCandidateGenerator, DFlashDraftModel
from dflash_hf.errors import DFlashConfigError
from dflash_hf.generation import decoding, round_costs, statistics
from dflash_hf.generation.block_length import (
    BlockAcceptance,
    BlockLength,
    best_length,
    best_length_in_order,
    chances,
)
from dflash_hf.generation.draft_context import DraftContext
from dflash_hf.generation.proposals import Proposer
from dflash_hf.generation.round_costs import RoundCosts, costs_for, interpolate

# The arithmetic.


def tokens_by_enumeration(rates: list[float], count: int) -> float:
    """Expected tokens of a round: every pattern of right and wrong proposals, with its probability."""
    total = 0.0
    for pattern in itertools.product((True, False), repeat=count):
        chance, kept = 1.0, 1
        for right, rate in zip(pattern, rates):
            chance *= rate if right else 1 - rate
        for right in pattern:
            if not right:
                break
            kept += 1
        total += chance * kept
    return total


@pytest.mark.parametrize("seed", range(40))
def test_best_length_by_brute_force(seed):
    """Random rates and costs, also costs that go up and down."""
    numbers = random.Random(seed)
    rates = [numbers.random() for _ in range(5)]
    costs = [numbers.uniform(0.5, 3.0) for _ in range(6)]
    speeds = [tokens_by_enumeration(rates, count) / costs[count] for count in range(6)]
    count, speed = best_length(survival=chances(rates), costs=costs)
    assert count == speeds.index(max(speeds))
    assert speed == pytest.approx(max(speeds))


@pytest.mark.parametrize("seed", range(40))
def test_in_order_rule_is_the_same_where_rates_are_as_expected(seed):
    """With nothing to learn from later proposals both rules agree."""
    numbers = random.Random(seed)
    rates = [numbers.random() for _ in range(5)]
    costs = [numbers.uniform(0.5, 3.0) for _ in range(6)]
    count, _ = best_length(survival=chances(rates), costs=costs)
    assert best_length_in_order(survival=chances(rates), expected=rates, costs=costs) == count


def looks_ahead(rule) -> bool:
    """Whether some later chance decides if an earlier proposal stays."""
    numbers = random.Random(0)
    for _ in range(300):
        rates = [numbers.random() for _ in range(5)]
        costs = sorted(numbers.uniform(1.0, 3.0) for _ in range(6))
        for stays in range(1, 5):  # is proposal number `stays` kept, whatever comes after it?
            answers = set()
            for _ in range(8):
                later = [*rates[:stays], *(numbers.random() for _ in range(5 - stays))]
                answers.add(rule(chances(later), costs) >= stays)
            if len(answers) > 1:
                return True
    return False


def test_in_order_rule_never_looks_ahead():
    """The global maximum does, which is why it is not used where later chances know earlier tokens."""
    expected = [0.6, 0.5, 0.7, 0.6, 0.5]
    assert not looks_ahead(lambda s, c: best_length_in_order(survival=s, expected=expected, costs=c))
    assert looks_ahead(lambda s, c: best_length(survival=s, costs=c)[0])


def test_interpolation():
    points = ((1, 1.0), (3, 2.0), (5, 6.0))
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 4, 5, 7)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert interpolate(((4, 2.5),), 9) == 2.5


# The estimates.


def test_what_was_not_seen_is_not_counted():
    """Proposals after a rejected one, or not sent, say nothing: rates are those of the drafter, not lower."""
    numbers, rates = random.Random(1), [0.9, 0.8, 0.6, 0.7]
    acceptance = BlockAcceptance(4)
    wrong = [[0, 0] for _ in rates]  # every proposal of a block counted
    for _ in range(4000):
        right = [numbers.random() < rate for rate in rates]
        proposed = numbers.randint(1, 4)
        accepted = next((slot for slot in range(proposed) if not right[slot]), proposed)
        acceptance.observe([0.5] * 4, accepted=accepted, proposed=proposed)
        for slot, counts in enumerate(wrong):
            counts[0] += slot < accepted
            counts[1] += 1
    assert acceptance.average(4) == pytest.approx(rates, abs=0.05)
    assert [hits / trials for hits, trials in wrong] != pytest.approx(rates, abs=0.05)


def points(cost, most: int):
    return tuple((count, cost(count)) for count in range(1, most + 1))


TABLES = {
    "cpu": RoundCosts(draft=points(lambda n: 0.45 + 0.035 * n, 15), verify=points(lambda n: 0.81 + 0.19 * n, 16)),
    "packed": RoundCosts(draft=points(lambda n: 0.25 + 0.005 * n, 15), verify=points(lambda n: 1.14 + 0.06 * n, 16)),
    "gpu": RoundCosts(draft=points(lambda n: 0.15, 15), verify=points(lambda n: 1 + 0.003 * n, 16)),
}  # fmt: skip


def modelled_speed(costs: RoundCosts, rate: float, seed: int, *, tokens: int, fixed: int | None = None, told=None):
    """Tokens per cost of a plain round, with a drafter that is right with probability `rate`."""
    numbers, length = random.Random(seed), BlockLength(costs, most=15)
    made = cost = 0.0
    while made < tokens:
        width = length.width(15) if fixed is None else fixed
        count, sure = width, None
        if width and fixed is None:
            if length.needs_confidence:
                sure = [[rate if told is None else told] * width]
            count = length.count(sure, drafted=width, in_order=False)
        accepted = 0
        while accepted < count and numbers.random() < rate:
            accepted += 1
        made += accepted + 1
        cost += costs.of_draft(width) + costs.of_verify(count + 1)
        if width and fixed is None:
            length.observe(sure, accepted=[accepted], proposed=count, drafted=width)
    return made / cost * costs.of_verify(1)


@pytest.mark.parametrize("told", [None, 0.2, 0.95], ids=["calibrated", "unsure", "too sure"])
@pytest.mark.parametrize("name", TABLES)
def test_regret(name, told):
    """Against plain decoding and the best fixed length, from a drafter that is always wrong to one never wrong."""
    costs, ratios = TABLES[name], []
    for rate in (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.97):
        speed = sum(modelled_speed(costs, rate, seed, tokens=400, told=told) for seed in range(6)) / 6
        assert speed > 0.95, f"{speed:.3f} of plain decoding at {rate}"
        fixed = [
            sum(modelled_speed(costs, rate, seed, tokens=400, fixed=count) for seed in range(6)) / 6
            for count in (0, 1, 2, 3, 5, 8, 11, 15)
        ]
        ratios.append(speed / max(fixed))
    assert min(ratios) > 0.85 and sum(ratios) / len(ratios) > 0.945, ratios


def test_drafting_comes_back():
    """A text that becomes predictable after 200 tokens: the drafter that did not pay is tried again."""
    length, costs = BlockLength(TABLES["cpu"], most=15), TABLES["cpu"]
    widths = []
    for number in range(400):
        rate = 0.0 if number < 150 else 1.0
        width = length.width(15)
        widths.append(width)
        if width:
            count = length.count([[0.9] * width], drafted=width, in_order=False)
            length.observe([[0.9] * width], accepted=[int(rate * count)], proposed=count, drafted=width)
    assert costs.of_verify(1) == 1.0
    assert sum(map(bool, widths[:150])) < 12
    assert all(widths[-50:]) and min(widths[-50:]) > 5


# The costs.


@pytest.fixture
def pair():
    """A target whose distribution is spread out, and a drafter that is often wrong; lengths by cost."""
    target = small_target(seed=2, layers=1, hidden=16, vocab=VOCAB, initializer_range=0.3)
    drafter = drafter_for(target, seed=1, layers=1, block_size=4, target_layer_ids=[0])
    return target, by_cost(drafter)


@pytest.fixture
def trained(trained_pair):
    """The trained pair, whose drafter may be told anything."""
    target, drafter = trained_pair
    original = drafter.generation_config
    drafter.generation_config = copy.deepcopy(original)
    yield target, drafter
    drafter.generation_config = original


def by_cost(drafter, **table):
    """Lengths by cost, from a table if one is given, without copying."""
    drafter.generation_config.num_assistant_tokens_schedule = None
    drafter.generation_config.prompt_lookup_num_tokens = 0
    if table:
        whole = {
            "device": "cpu",
            "dtype": "float32",
            "packed": False,
            "threads": 1,
            "batch_size": 1,
            "context_length": 64,
            **table,
        }
        drafter.generation_config.dflash_round_costs = [whole]
    return drafter


FREE = {"draft": [[1, 0.01], [7, 0.01]], "verify": [[1, 1.0], [8, 1.001]]}
STEEP = {"draft": [[1, 0.05], [7, 0.06]], "verify": [[1, 1.0], [8, 2.4]]}
DEAR = {"draft": [[1, 50.0], [7, 50.0]], "verify": [[1, 1.0], [8, 8.0]]}


def test_calibrate_measures_and_keeps_costs(tmp_path):
    """All sizes, batch sizes and contexts; kept over saving and loading, and used from then on."""
    target = small_target()
    drafter = by_cost(drafter_for(target))
    drafter.train()
    sizes = {"batch_size": 1, "context_length": 8, "draft": [[1, 1.0]], "verify": [[1, 1.0]]}
    other = {"device": "other", "dtype": "float32", "packed": False, **sizes}
    drafter.generation_config.dflash_round_costs = [other]
    before = plain(target, prompt(6), max_new_tokens=8)
    tables = dflash_hf.calibrate(drafter, target, batch_sizes=(1, 2), context_lengths=(16, 48), repeats=2)
    assert drafter.training and not target.training
    assert [(t["batch_size"], t["context_length"]) for t in tables] == [(1, 16), (1, 48), (2, 16), (2, 48)]
    for table in tables:
        assert [count for count, _ in table["draft"]] == [1, 2, 3, 4, 6, 7]
        assert [count for count, _ in table["verify"]] == [1, 2, 3, 4, 6, 8, 9]
        for part in ("draft", "verify"):
            costs = [ms for _, ms in table[part]]
            assert costs == sorted(costs) and 0 < costs[0] < 10_000
    drafter.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path)
    assert again.generation_config.dflash_round_costs == [other, *tables]
    used = costs_for(again, target, batch_size=2, context_length=40)
    assert used.verify == tuple((count, ms) for count, ms in tables[3]["verify"])
    assert plain(target, prompt(6), max_new_tokens=8).tolist() == before.tolist()
    drafter.eval()
    assert_same_ids(target, drafter, prompt(6), max_new_tokens=20)


def test_calibrate_refuses_nonsense():
    target = small_target()
    with pytest.raises(DFlashConfigError, match="repeats of at least 1"):
        dflash_hf.calibrate(drafter_for(target), target, repeats=0)


def test_costs_of_another_batch_size(pair):
    """A table of one sequence is read at the total number of rows."""
    target, drafter = pair
    by_cost(drafter, **STEEP)
    costs = costs_for(drafter, target, batch_size=4, context_length=10)
    assert costs.of_verify(2) == pytest.approx(2.4) and costs.of_verify(1) == pytest.approx(1.6)


@pytest.mark.parametrize("change", [{"device": "NVIDIA H200"}, {"dtype": "bfloat16"}, {"packed": True}])
def test_costs_of_other_conditions_are_not_used(pair, change):
    """Then the usual shape of these is."""
    target, drafter = pair
    by_cost(drafter, **DEAR)
    drafter.generation_config.dflash_round_costs[0].update(change)
    costs = costs_for(drafter, target, batch_size=1, context_length=10)
    assert costs == round_costs.default_costs(drafter, target, batch_size=1)
    assert costs.of_verify(16) > 3 * costs.of_verify(1)  # a CPU


def test_verification_is_nearly_free_on_an_accelerator(pair, monkeypatch):
    target, drafter = pair
    conditions = {"device": "NVIDIA H200", "dtype": "bfloat16", "packed": False}
    monkeypatch.setattr(round_costs, "conditions_of", lambda target: conditions)
    costs = costs_for(drafter, target, batch_size=1, context_length=10)
    assert costs.of_verify(16) < 1.1 * costs.of_verify(1)


def test_usual_shapes_of_a_cpu():
    """A verification is dear in fp32, less so packed, nearly free in half precision; an index makes drafts cheaper."""
    target = small_target()
    drafter = drafter_for(target)
    of_eight = {}
    for name in ("plain", "packed", "half"):
        if name == "packed":
            dflash_hf.pack_linears(target)
        elif name == "half":
            dflash_hf.unpack_linears(target)
            target.bfloat16()
        costs = costs_for(drafter, target, batch_size=1, context_length=10)
        of_eight[name] = costs.of_verify(8) / costs.of_verify(1)
    assert of_eight["plain"] > of_eight["packed"] > of_eight["half"] > 1.0
    before = costs.of_draft(7)
    drafter.frequent_token_ids = [1, 2, 3]
    assert costs_for(drafter, target, batch_size=1, context_length=10).of_draft(7) < before


@pytest.mark.parametrize("damage", [{"draft": []}, {"verify": [[1, 0.0]]}, {"batch_size": None}])
def test_a_damaged_table_is_refused(pair, damage):
    target, drafter = pair
    by_cost(drafter, **STEEP)
    (table,) = drafter.generation_config.dflash_round_costs
    table.update(damage)
    if damage == {"batch_size": None}:
        del table["batch_size"]
    with pytest.raises(DFlashConfigError, match="dflash_round_costs.*calibrate"):
        target.generate(prompt(4, vocab=VOCAB), assistant_model=drafter, max_new_tokens=4)


# generate.


def test_free_verification_sends_whole_blocks(monkeypatch):
    """Nothing is gained by sending less; identity in fp32."""
    target = small_target()
    drafter = by_cost(drafter_for(target), **FREE)
    text = plain(target, prompt(6), max_new_tokens=60)
    propose(monkeypatch, text, wrong=lambda position: position % 11 == 3)
    assert_same_ids(target, drafter, prompt(6), max_new_tokens=60)
    stats = drafter.last_generation_stats
    assert stats.proposed[2:-1] and set(stats.proposed[3:-1]) == {7}
    assert stats.copied == 0


def test_a_wrong_drafter_that_is_dear_is_left_alone():
    """After a first try plain steps follow, and the draft forward pass is skipped altogether."""
    target = small_target()
    drafter = by_cost(drafter_for(target), **DEAR)
    calls = []
    drafter.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same_ids(target, drafter, prompt(6), max_new_tokens=120)
    stats = drafter.last_generation_stats
    assert len(calls) <= 4 and sum(map(bool, stats.proposed)) <= 4
    assert stats.new_tokens == 120


def drafts_of(pair, monkeypatch, *, rest: int) -> dict[int, list[int]]:
    """Drafts of a greedy call by the position of their anchor; the first `rest` rounds are plain ones."""
    target, drafter = pair
    drafts, widths = {}, iter([0] * rest)
    real_draft, real_width = DFlashCandidateGenerator.draft, BlockLength.width

    def draft(self, anchor, num_tokens, *, prefixes):
        tokens, scores = real_draft(self, anchor, 7, prefixes=prefixes)
        drafts[prefixes()[0].shape[1]] = tokens[0].tolist()
        return tokens[:, :num_tokens], scores[:, :num_tokens]

    def width(self, limit, **more):
        return next(widths, real_width(self, limit, **more))

    with monkeypatch.context() as patch:
        patch.setattr(DFlashCandidateGenerator, "draft", draft)
        patch.setattr(BlockLength, "width", width)
        assert_same_ids(target, drafter, prompt(12, vocab=100, seed=4), max_new_tokens=160, eos_token_id=None)
    return drafts


def test_the_drafter_keeps_up_over_plain_rounds(trained, monkeypatch):
    """After plain rounds, more than are gathered at once, it drafts what it would have drafted without them."""
    by_cost(trained[1], **FREE)
    throughout = drafts_of(trained, monkeypatch, rest=0)
    for rest in (1, 20, 100):
        drafts = drafts_of(trained, monkeypatch, rest=rest)
        common = drafts.keys() & throughout.keys()
        assert len(common) > 5 and min(drafts) == 13 + rest
        assert all(drafts[position] == throughout[position] for position in common)


def test_features_lost_in_plain_rounds_are_found(trained, monkeypatch):
    """The check sees a drafter that keeps only the newest features."""
    by_cost(trained[1], **FREE)
    throughout = drafts_of(trained, monkeypatch, rest=0)

    def forget(self, new):
        if self.pending is not None and self.pending.features.shape[1] > 1:
            self.flush()
        self.pending = new

    monkeypatch.setattr(DraftContext, "_take", forget)
    drafts = drafts_of(trained, monkeypatch, rest=20)
    assert any(drafts[position] != throughout[position] for position in drafts.keys() & throughout.keys())


@pytest.mark.parametrize("table", [FREE, STEEP, DEAR, {}], ids=["free", "steep", "dear", "default"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_identity(trained, table, batch_size):
    """The same text with every table, alone and in a padded batch."""
    target, drafter = trained
    by_cost(drafter, **table).generation_config.prompt_lookup_num_tokens = None
    ids = torch.cat([prompt(10, vocab=100, seed=seed) for seed in range(batch_size)])
    mask = torch.ones_like(ids)
    if batch_size > 1:
        ids[1, :4], mask[1, :4] = 0, 0
    assert_same_ids(target, drafter, ids, attention_mask=mask, max_new_tokens=50, eos_token_id=7, pad_token_id=0)


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_clock_decides_nothing(pair, do_sample, monkeypatch):
    """The same call gives the same tokens and lengths, whatever the clock says."""
    target, drafter = pair
    by_cost(drafter, **STEEP).generation_config.prompt_lookup_num_tokens = None
    runs = []
    for seed in (1, 2):
        numbers = random.Random(seed)
        monkeypatch.setattr(decoding.time, "perf_counter", lambda numbers=numbers: numbers.uniform(0, 1e6))
        torch.manual_seed(3)
        ids = target.generate(
            prompt(4, vocab=VOCAB), assistant_model=drafter, do_sample=do_sample, top_k=0, max_new_tokens=60
        )
        stats = drafter.last_generation_stats
        runs.append((ids.tolist(), stats.proposed, stats.produced, stats.copied))
    assert runs[0] == runs[1]
    assert len(set(runs[0][1])) > 2, "the lengths must have been chosen"


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_joint_distribution(pair, name):
    """Lengths by confidence leave the target's distribution as it is, with parallel drafts and with prefix ones."""
    target, drafter = pair
    by_cost(drafter, **STEEP)
    _, processors = SETTINGS[name]
    counts, rate = draw(pair, decode_once, processors, 700)
    assert 0.05 < rate < 0.9
    assert chi_square_p_value(counts, exact_joint(target, prompt(4, vocab=VOCAB), processors)) > LEVEL


def test_dropping_tokens_by_their_value_is_found(pair, monkeypatch):
    """The check has the power to see it: only proposals of the lower half of the vocabulary are sent."""
    target, drafter = pair
    by_cost(drafter, **FREE)
    real = Proposer.propose

    def propose_low_ones(self, rows, **more):
        tokens, scores = real(self, rows, **more)
        if tokens.shape[1]:
            low = (tokens < VOCAB // 2)[0]
            tokens = tokens[:, : int(low.long().cumprod(0).sum())]
            scores = scores[:, : tokens.shape[1]]
            self._proposed = tokens.shape[1]
        return tokens, scores

    monkeypatch.setattr(Proposer, "propose", propose_low_ones)
    _, processors = SETTINGS["temperature"]
    counts, _ = draw(pair, decode_once, processors, 700)
    assert chi_square_p_value(counts, exact_joint(target, prompt(4, vocab=VOCAB), processors)) < LEVEL


def test_a_fixed_length_wins_over_costs(pair):
    """num_assistant_tokens, a schedule or a confidence threshold are taken as they are."""
    target, drafter = pair
    by_cost(drafter, **DEAR)
    drafter.generation_config.num_assistant_tokens = 2
    assert_same_ids(target, drafter, prompt(4, vocab=VOCAB), max_new_tokens=40)
    assert set(drafter.last_generation_stats.proposed[:-2]) == {2}
    drafter.generation_config.num_assistant_tokens = None
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    assert_same_ids(target, drafter, prompt(4, vocab=VOCAB), max_new_tokens=40)
    assert set(drafter.last_generation_stats.proposed[:-3]) == {3}


def test_copied_is_counted_over_calls():
    total = statistics.GenerationStats()
    total.add(statistics.GenerationStats(copied=2))
    total.add(statistics.GenerationStats(copied=3))
    assert total.copied == 5
