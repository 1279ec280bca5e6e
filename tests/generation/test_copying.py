"""Tokens copied from the context: found, counted, and as lossless as drafted ones."""

import random

import pytest
import torch
from generation_helpers import assert_same_ids, drafter_for, plain, prompt, propose, small_target
from test_length_by_cost import FREE, STEEP, by_cost, pair, trained  # noqa: F401  (fixtures)
from test_sampling import (
    LEVEL,
    SETTINGS,
    SMALL,
    VOCAB,
    accept_sampled,
    chi_square_p_value,
    decode_once,
    exact_joint,
    in_order,
    p_value_of,
    rows,  # noqa: F401
)
from transformers import LogitsProcessorList

from dflash_hf.errors import DFlashConfigError
from dflash_hf.generation import acceptance, copying
from dflash_hf.generation.copying import Copying
from dflash_hf.generation.sequences import Sequences

# The search.


def longest_match(tokens: list[int], size: int) -> list[int] | None:
    """What follows the first earlier place of the last `size` tokens, by brute force."""
    for start in range(len(tokens) - size):
        if tokens[start : start + size] == tokens[-size:]:
            return tokens[start + size :]
    return None


@pytest.mark.parametrize("seed", range(6))
def test_finds_what_brute_force_finds(seed):
    """After every growth of the text, by one or several tokens; the longest kind of match wins."""
    numbers = random.Random(seed)
    text = [numbers.randrange(5) for _ in range(30)]
    sequences = Sequences(torch.tensor([text, text]), room=2000)
    searcher, kinds = Copying(sequences, most=6), set()
    for _ in range(120):
        found = searcher.find(1)
        matches = [longest_match(text, size) for size in (3, 6, 12)]
        best = max((kind for kind in range(3) if matches[kind] is not None), default=None)
        kinds.add(best)
        assert (found is None) == (best is None)
        if found is not None:
            assert found.kind == best and found.tokens == matches[best][:6]
        more = [numbers.randrange(5) for _ in range(numbers.randrange(1, 5))]
        if numbers.random() < 0.4:  # a repeated passage
            start, length = numbers.randrange(len(text) - 15), numbers.choice((7, 15))
            more = text[start : start + length]
        sequences.reserve(len(more) + 2)
        sequences.write([1], [[*more, 4, 4]])  # the last two are rejected
        sequences.lengths[1] += len(more)
        text += more
    assert kinds >= {0, 1, 2}, "every kind of match must occur"


def test_only_known_fates_are_counted():
    """Nothing after the first rejected token, nothing past the end of the copy, nothing that was not sent."""
    searcher = Copying(Sequences(torch.tensor([[1, 2]]), room=4), most=6)
    copy = copying.Copy([1, 2, 3], 0)
    searcher.observe(copy, accepted=1, proposed=5)
    assert (searcher.rates.hits[0], searcher.rates.trials[0]) == (1, 2)
    searcher.observe(copy, accepted=3, proposed=5)
    assert (searcher.rates.hits[0], searcher.rates.trials[0]) == (4, 5)
    searcher.observe(copy, accepted=2, proposed=2)
    assert (searcher.rates.hits[0], searcher.rates.trials[0]) == (6, 7)


# The acceptance rule.


def certain(q):
    """The rules with a copied draft, whatever q was given."""
    return torch.tensor([2, 4])


def copied(rule):
    return lambda *, draft, draft_scores, scores: rule(draft=draft, draft_scores=None, scores=scores)


def accept_copied(*, draft, draft_scores, scores):
    (tokens,) = acceptance.accept_sampled(draft=draft[None], draft_scores=None, scores=scores[None])
    return tokens


def accept_one_hot(*, draft, draft_scores, scores):
    """The form for a batch of which only some rows are copied."""
    scores_of_copy = torch.full((2, SMALL), -torch.inf).scatter_(-1, draft[:, None], 0.0)
    return accept_sampled(draft=draft, draft_scores=scores_of_copy, scores=scores)


def copied_in_order(*, draft, draft_scores, scores):
    return in_order(draft=draft, draft_scores=[None, None], scores=scores)


@pytest.mark.parametrize("accept", [accept_copied, accept_one_hot, copied_in_order])
def test_acceptance_rule(accept, rows):  # noqa: F811
    """All forms give p exactly when q is 1 at a fixed token."""
    torch.manual_seed(0)
    assert p_value_of(rows, accept, 8000, certain) > LEVEL


def test_wrong_rule_is_found(rows):  # noqa: F811
    """The same check rejects a copy that is judged by the drafter's q."""
    torch.manual_seed(0)
    assert p_value_of(rows, accept_sampled, 6000, certain) < LEVEL


def test_a_copied_token_that_the_target_excludes():
    """p = 0 rejects it, p = 1 keeps it, and nothing divides by zero."""
    scores = torch.tensor([[[0.0, -torch.inf, 0.0], [-torch.inf, -torch.inf, 0.0], [0.0, 0.0, -torch.inf]]])
    torch.manual_seed(0)
    first = {tuple(acceptance.accept_sampled(draft=torch.tensor([[1, 2]]), draft_scores=None, scores=scores)[0])
             for _ in range(60)}  # fmt: skip
    assert first == {(0,), (2,)}
    second = [acceptance.accept_sampled(draft=torch.tensor([[2]]), draft_scores=None, scores=scores[:, 1:])[0]
              for _ in range(60)]  # fmt: skip
    assert all(tokens[0] == 2 and len(tokens) == 2 for tokens in second)


# generate.


def repetitive_target():
    """A target whose next token depends on the newest one alone: greedy text falls into a cycle."""
    target = small_target(seed=2, layers=1, hidden=16, vocab=VOCAB, initializer_range=0.3)
    target.model.layers[0].self_attn.o_proj.weight.data.zero_()
    return target


@pytest.mark.parametrize("batch_size", [1, 3])
def test_repeated_text_is_copied(batch_size):
    """Greedy: the same ids in far fewer rounds, though the drafter is always wrong, and longer than its block."""
    target = repetitive_target()
    drafter = by_cost(drafter_for(target, layers=1, block_size=4, target_layer_ids=[0]), **FREE)
    drafter.generation_config.prompt_lookup_num_tokens = None
    ids = torch.cat([prompt(8, vocab=VOCAB, seed=seed) for seed in range(batch_size)])
    text = plain(target, ids, max_new_tokens=200)
    assert text[0, -20:].tolist() in [text[0, i : i + 20].tolist() for i in range(180)], "no cycle"
    assert_same_ids(target, drafter, ids, max_new_tokens=200)
    stats = drafter.last_generation_stats
    assert stats.copied > 5 and max(stats.proposed) == 8
    assert stats.rounds < 100


@pytest.mark.parametrize("in_step", [False, True], ids=["rows apart", "in step"])
def test_sampled_batches_copy(in_step):
    """With top-k 1 sampling has one outcome, so that text can be compared; an own processor makes rows go in step."""
    target = repetitive_target()
    drafter = by_cost(drafter_for(target, layers=1, block_size=4, target_layer_ids=[0]), **FREE)
    drafter.generation_config.prompt_lookup_num_tokens = None
    ids = torch.cat([prompt(8, vocab=VOCAB, seed=seed) for seed in range(3)])
    options = {"max_new_tokens": 120, "do_sample": True, "top_k": 1}
    if in_step:
        options["logits_processor"] = LogitsProcessorList([lambda input_ids, scores: scores])
    assert_same_ids(target, drafter, ids, **options)
    assert drafter.last_generation_stats.copied > 5


def test_copying_can_be_switched_off():
    """prompt_lookup_num_tokens on the drafter's generation_config: 0 for none, a number for at most so many."""
    target = repetitive_target()
    drafter = by_cost(drafter_for(target, layers=1, block_size=4, target_layer_ids=[0]), **FREE)
    assert_same_ids(target, drafter, prompt(8, vocab=VOCAB), max_new_tokens=100)
    assert drafter.last_generation_stats.copied == 0
    drafter.generation_config.prompt_lookup_num_tokens = 5
    assert_same_ids(target, drafter, prompt(8, vocab=VOCAB), max_new_tokens=100)
    assert drafter.last_generation_stats.copied > 0 and max(drafter.last_generation_stats.proposed) == 5
    drafter.generation_config.prompt_lookup_num_tokens = -1
    with pytest.raises(DFlashConfigError, match="prompt_lookup_num_tokens is -1"):
        target.generate(prompt(8, vocab=VOCAB), assistant_model=drafter, max_new_tokens=4)


def test_a_fixed_length_copies_nothing():
    """Acceptance lengths of whole blocks are the drafter's alone."""
    target = repetitive_target()
    drafter = drafter_for(target, layers=1, block_size=4, target_layer_ids=[0])
    assert_same_ids(target, drafter, prompt(8, vocab=VOCAB), max_new_tokens=100)
    assert drafter.last_generation_stats.copied == 0


def test_a_good_drafter_is_not_left_for_copies(monkeypatch):
    """Where the drafter is always right, copying that is often wrong does not take its place."""
    target = small_target(vocab=12, seed=5)
    drafter = by_cost(drafter_for(target), **FREE)
    ids, options = prompt(40, vocab=12), {"max_new_tokens": 100, "repetition_penalty": 1.3}
    text = plain(target, ids, **options)
    propose(monkeypatch, text, wrong=lambda position: False)
    rounds = {}
    for limit in (0, None):
        drafter.generation_config.prompt_lookup_num_tokens = limit
        assert_same_ids(target, drafter, ids, **options)
        rounds[limit] = drafter.last_generation_stats.rounds
    assert rounds[None] <= 1.1 * rounds[0] + 1


# Some of the vocabulary, in an order of its own: copies hold other tokens too.
INDEX = [9, 4, 12, 3, 15, 7, 1, 10]


@pytest.mark.parametrize(
    ("name", "table", "index"),
    [("temperature", STEEP, None), ("temperature", STEEP, INDEX), ("repetition_penalty", FREE, None)],
    ids=["temperature", "index of tokens", "repetition penalty"],
)
def test_joint_distribution(pair, name, table, index, monkeypatch):  # noqa: F811
    """Copies and drafts in one call leave the target's distribution as it is."""
    target, drafter = pair
    by_cost(drafter, **table).generation_config.prompt_lookup_num_tokens = None
    monkeypatch.setattr(drafter, "_frequent_token_ids", None if index is None else torch.tensor(index))
    # Matches of one token, so that a text of four tokens has some.
    monkeypatch.setattr(copying, "_SIZES", (1, 2, 3))
    ids = torch.tensor([[12, 7, 9, 4, 5, 12, 3, 15, 8, 6, 11, 10, 14, 13, 9, 4]])
    _, processors = SETTINGS[name]
    counts, copies, drafts = torch.zeros((VOCAB,) * 3), 0, 0
    torch.manual_seed(1)
    with torch.no_grad():
        for _ in range(700):
            counts[tuple(decode_once(pair, ids, processors)[0, 16:19].tolist())] += 1
            copies += drafter.last_generation_stats.copied
            drafts += sum(map(bool, drafter.last_generation_stats.proposed))
    assert 100 < copies < drafts - 50, "both must happen often"
    assert chi_square_p_value(counts, exact_joint(target, ids, processors)) > LEVEL


@pytest.mark.parametrize("index", [None, range(0, 100, 2)], ids=["all", "index of tokens"])
def test_batches_mix_copies_and_drafts(trained, index, monkeypatch):  # noqa: F811
    """Sampled rows are reproducible and greedy rows are the target's, where some rows copy and others draft."""
    target, drafter = trained
    monkeypatch.setattr(drafter, "_frequent_token_ids", None if index is None else torch.tensor(list(index)))
    by_cost(drafter, **STEEP).generation_config.prompt_lookup_num_tokens = None
    passage = prompt(14, vocab=100, seed=1)
    ids = torch.cat([torch.cat([passage, passage], dim=1), prompt(28, vocab=100, seed=2)])
    assert_same_ids(target, drafter, ids, max_new_tokens=60, eos_token_id=None)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        out = target.generate(
            ids, assistant_model=drafter, do_sample=True, top_k=3, max_new_tokens=40, eos_token_id=None
        )
        runs.append((out.tolist(), drafter.last_generation_stats.proposed))
    assert runs[0] == runs[1]
