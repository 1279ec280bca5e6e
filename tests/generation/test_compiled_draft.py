"""Draft forward passes as graphs over a static draft cache: what the drafter gives as it is."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from compiled_helpers import Graphs, SameMemory, options
from conftest import tiny_drafter, tiny_target
from generation_helpers import assisted, cache_of, drafter_for, needs_static_rollback, plain, prompt
from transformers import CompileConfig, GenerationConfig

from dflash_hf import compiled_draft as module
from dflash_hf.compiled_draft import CompiledDraft, compiled_draft
from dflash_hf.draft_cache import StaticDraftCache
from dflash_hf.generation.round_costs import conditions_of

pytestmark = needs_static_rollback
WIDE = {"target_layer_ids": [0, 2], "block_size": 6}


def config_of(backend):
    return CompileConfig(backend=backend, mode=None, dynamic=False)


def as_it_is(drafter, features, positions, block, anchor):
    """Hidden states of a block after all `features [1, n, F]` of one sequence, without a cache."""
    positions = torch.cat([positions, anchor + torch.arange(block.shape[1])])[None]
    return drafter(block, features, position_ids=positions).last_hidden_state


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ],
)
@torch.no_grad()
def test_hidden_states(more):
    """Three sequences of different length, positions that do not begin at 0, rounds that keep 0 to B rows."""
    target = tiny_target(layers=3)
    drafter = tiny_drafter(target, **{**WIDE, **more})
    size, width = drafter.config.block_size, drafter.fc.in_features
    torch.manual_seed(0)
    lengths, offsets = [3, 9, 1], torch.tensor([[0], [7], [30]])
    known = [torch.randn(1, length, width) for length in lengths]
    backend = Graphs()
    graphs = compiled_draft(drafter, config_of(backend))
    cache = graphs.take_cache(batch_size=3, columns=60)
    longest = max(lengths)
    columns = torch.arange(longest).expand(3, -1)
    columns = torch.where(columns < torch.tensor(lengths)[:, None], columns, longest)
    cache.place(columns, row_ends=torch.tensor(lengths), end=longest)
    padded = torch.cat([torch.nn.functional.pad(one, (0, 0, 0, longest - one.shape[1])) for one in known])
    drafter.append_context(padded, position_ids=offsets + torch.arange(longest), cache=cache)
    for counts in ([2, 1, 4], [1, 6, 2], [0, 0, 0], [1, 1, 1]):
        features = torch.randn(3, max(counts), width)
        block = torch.randn(3, size, drafter.config.hidden_size)
        anchors = offsets + torch.tensor([[n + k] for n, k in zip(lengths, counts)])
        found = graphs(block, features, anchors, lengths=lengths, counts=counts, cache=cache)
        known = [torch.cat([old, features[i : i + 1, : counts[i]]], dim=1) for i, old in enumerate(known)]
        lengths = [one.shape[1] for one in known]
        for i, one in enumerate(known):
            positions = offsets[i] + torch.arange(lengths[i])
            expected = as_it_is(drafter, one, positions, block[i : i + 1], anchors[i])
            torch.testing.assert_close(found[i : i + 1], expected, atol=1e-5, rtol=1e-5)
    assert backend.made == 1 and backend.runs == 4


@pytest.mark.parametrize("fault", ["rows nobody may see are seen", "block at the wrong place", "positions shifted"])
@torch.no_grad()
def test_faults_are_found(fault, monkeypatch):
    """The test above fails on each of them."""
    if fault == "rows nobody may see are seen":
        real = StaticDraftCache.place

        def place(self, columns, *, row_ends, end, first=0):
            real(self, columns, row_ends=row_ends + 1, end=end)

        monkeypatch.setattr(StaticDraftCache, "place", place)
    elif fault == "block at the wrong place":
        real = CompiledDraft.__call__

        def call(self, *inputs, lengths, **more):
            return real(self, *inputs, lengths=[length + 1 for length in lengths], **more)

        monkeypatch.setattr(CompiledDraft, "__call__", call)
    else:
        real_draft = module._draft
        monkeypatch.setattr(
            module,
            "_draft",
            lambda drafter, block, features, anchors, *more: real_draft(
                drafter, block, features, torch.where(more[0][1, :, None] > 0, anchors * 2, anchors), *more
            ),
        )
    with pytest.raises(AssertionError, match="not close"):
        test_hidden_states({})


@pytest.fixture(scope="module")
def graphs():
    """One backend, so that the pair's graphs are made once."""
    return Graphs()


@pytest.fixture
def pair(trained_pair):
    """The trained pair, with a static cache of one length in all tests, and its generation config put back."""
    target, drafter = trained_pair
    before = drafter.generation_config
    drafter.generation_config = GenerationConfig(num_assistant_tokens_schedule="constant")
    target._previous_max_cache_length = 160
    yield target, drafter
    drafter.generation_config = before


def rounds_with(target, drafter, ids, **more):
    """Text and acceptance lengths."""
    return assisted(target, drafter, ids, **more), drafter.last_generation_stats.acceptance_lengths


def assert_same_rounds(target, drafter, ids, graphs, **more):
    """With graphs and without; returns the acceptance lengths."""
    expected, rounds = rounds_with(target, drafter, ids, cache_implementation="static", **more)
    runs = graphs.runs
    text, same = rounds_with(target, drafter, ids, **options(graphs, **more))
    assert torch.equal(text, expected) and same == rounds
    assert graphs.runs >= runs + 2 * len(rounds) // len(ids) - 4, "drafts too, but for the last rounds"
    return rounds


def test_rounds(pair, graphs):
    """The same proposals as without graphs, whole context or a window of it, greedy or sampled."""
    target, drafter = pair
    ids = torch.arange(4, 20)[None]
    rounds = assert_same_rounds(target, drafter, ids, graphs, max_new_tokens=60)
    assert sum(rounds) / len(rounds) > 3
    drafter.generation_config.dflash_context_window = 5
    assert_same_rounds(target, drafter, ids, graphs, max_new_tokens=60)
    torch.manual_seed(0)
    expected = rounds_with(target, drafter, ids, cache_implementation="static", max_new_tokens=40, do_sample=True)
    torch.manual_seed(0)
    found = rounds_with(target, drafter, ids, **options(graphs), max_new_tokens=40, do_sample=True)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]


def test_rows_that_go_apart(pair, graphs):
    """Rows that accept different numbers of tokens, a padded prompt among them."""
    target, drafter = pair
    ids = torch.stack([torch.arange(4, 16), torch.arange(9, 21), torch.arange(5, 17)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    rounds = assert_same_rounds(target, drafter, ids, graphs, max_new_tokens=40, attention_mask=mask)
    assert max(rounds) > 3


@pytest.mark.parametrize("first", ["graphs", "as it is"])
@pytest.mark.parametrize("second", ["graphs", "as it is"])
def test_next_turn(pair, graphs, first, second):
    """The context stays with the target's cache, whichever turn runs as graphs."""
    target, drafter = pair
    how = {"graphs": options(graphs), "as it is": {"cache_implementation": "static"}}
    ids = torch.arange(4, 20)[None]
    output = assisted(target, drafter, ids, **how[first], return_dict_in_generate=True, max_new_tokens=20)
    more = {**how[second], "max_new_tokens": 30, "cache": cache_of(output)}
    more.pop("cache_implementation")
    text, rounds = rounds_with(target, drafter, output.sequences, **more)
    assert torch.equal(text, plain(target, ids, max_new_tokens=50))
    assert sum(rounds) / len(rounds) > 3, "a drafter without the first turn accepts less"


def test_by_cost(pair, graphs):
    """Rounds that copy more than a block holds, and rounds without a draft: their features go into the cache too."""
    target, drafter = pair
    size = drafter.config.block_size
    costs = {
        "batch_size": 1,
        "context_length": 0,
        "draft": [[n, 0.9] for n in range(1, size + 1)],
        "verify": [[n, 1.0] for n in range(1, 40)],
    }
    drafter.generation_config = GenerationConfig(prompt_lookup_num_tokens=3 * size)
    drafter.generation_config.dflash_round_costs = [{**conditions_of(target), **costs}]
    ids = torch.arange(4, 20).repeat(3)[None]
    assert_same_rounds(target, drafter, ids, graphs, max_new_tokens=80)
    stats = drafter.last_generation_stats
    assert stats.copied and max(stats.produced) > size and 0 < stats.copied < stats.rounds


def test_buffers_are_used_again(pair, graphs):
    """A call takes the buffers that the last one gave back, so that the addresses in the graphs stay right."""
    target, drafter = pair
    call = options(graphs, max_new_tokens=12)
    pool = compiled_draft(drafter, call["compile_config"])
    ids = torch.arange(4, 20)[None]
    assisted(target, drafter, ids, **call)

    def buffers(batch_size: int) -> list[int]:
        (cache,) = (cache for (rows, _), cache in pool._free.items() if rows == batch_size)
        return [tensor.data_ptr() for pair in cache.buffers for tensor in pair]

    first, made = buffers(1), graphs.made
    assisted(target, drafter, ids[:, :12], **call)
    assert buffers(1) == first and graphs.made == made
    assisted(target, drafter, ids.repeat(3, 1), **call)
    others, made = buffers(3), graphs.made
    for rows in (1, 3, 1):
        assisted(target, drafter, ids.repeat(rows, 1), **call)
    assert buffers(1) == first and buffers(3) == others and graphs.made == made


def test_free_caches_are_few_and_of_the_size_of_a_call(pair):
    """A draft attends to all columns, so a longer cache is not taken for a short call; and only some are kept."""
    pool = CompiledDraft(pair[1], config_of(Graphs()))
    for columns in (40, 30000, 40, 100, 200, 300):
        cache = pool.take_cache(batch_size=1, columns=columns)
        assert columns <= cache.columns < columns + 8
        pool.give_back(cache)
    assert len(pool._free) == 4 and max(cache.columns for cache in pool._free.values()) < 400


def test_what_a_call_left_behind_does_not_show(pair, graphs):
    """Buffers are used again; not-a-number times zero is not a number."""
    target, drafter = pair
    ids = torch.arange(4, 20)[None]
    call = options(graphs, max_new_tokens=30)
    expected = rounds_with(target, drafter, ids, **call)

    pool = compiled_draft(drafter, call["compile_config"])
    for tensor in (tensor for cache in pool._free.values() for each in cache.buffers for tensor in each):
        tensor.fill_(torch.nan)
    found = rounds_with(target, drafter, ids, **call)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]


@torch.no_grad()
def test_two_threads():
    """A result is taken out of the graph's memory before another thread's run writes over it."""
    target = tiny_target(layers=3)
    drafter = tiny_drafter(target, **WIDE)
    graphs = CompiledDraft(drafter, config_of(SameMemory()))
    width, size, hidden = drafter.fc.in_features, drafter.config.block_size, drafter.config.hidden_size

    def run(seed, cache):
        torch_generator = torch.Generator().manual_seed(seed)
        block = torch.randn(1, size, hidden, generator=torch_generator)
        features = torch.randn(1, 3, width, generator=torch_generator)
        return graphs(block, features, torch.tensor([[3]]), lengths=[0], counts=[3], cache=cache)

    caches = [graphs.take_cache(batch_size=1, columns=30) for _ in range(2)]
    for cache in caches:  # makes the buffers
        cache.place(torch.zeros(1, 1, dtype=torch.long), row_ends=torch.ones(1, dtype=torch.long), end=1)
        drafter.append_context(torch.ones(1, 1, width), position_ids=torch.zeros(1, 1, dtype=torch.long), cache=cache)
    expected = [run(seed, cache) for seed, cache in enumerate(caches)]
    wrong = []

    def many(seed):
        with torch.no_grad():
            for _ in range(300):
                if not torch.allclose(run(seed, caches[seed]), expected[seed], atol=1e-4):
                    wrong.append(seed)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=many, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_the_drafter_is_not_kept_alive():
    """Graphs go with their drafter."""
    target = tiny_target(layers=1)
    drafter = drafter_for(target, target_layer_ids=[0], layers=1)
    assisted(target, drafter, prompt(), **options(Graphs(), max_new_tokens=12))
    gone = weakref.ref(drafter)
    del drafter
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
