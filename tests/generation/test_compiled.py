"""Verification by a compiled forward pass: the same text, the right features, few graphs."""

import pytest
import torch
from compiled_helpers import Graphs, options
from conftest import tiny_target
from generation_helpers import assert_same_ids, assisted, drafter_for, hook_count, needs_static_rollback, plain, prompt

from dflash_hf.generation import compiled

pytestmark = needs_static_rollback


LENGTH = 200  # of every static cache, so that none makes graphs of its own


@pytest.fixture(scope="module")
def shared():
    """A target and a backend whose graphs are made once for all tests here."""
    target = tiny_target(layers=3)
    target._previous_max_cache_length = LENGTH
    return target, Graphs()


@pytest.fixture
def target(shared):
    return shared[0]


@pytest.fixture
def graphs(shared):
    """The backend, its counts beginning anew."""
    backend = shared[1]
    backend.made = backend.runs = 0
    return backend


@pytest.mark.parametrize("new_tokens", [1, 2, 30])
def test_text_and_rounds(target, new_tokens, graphs):
    """Those of an eager call: features that were lost or of padded rows would change the rounds."""
    drafter = drafter_for(target)
    ids = prompt()
    expected = plain(target, ids, max_new_tokens=new_tokens, cache_implementation="static")
    assert torch.equal(expected, assisted(target, drafter, ids, max_new_tokens=new_tokens))
    rounds = drafter.last_generation_stats.acceptance_lengths
    hooks = hook_count(target)
    output = assisted(target, drafter, ids, **options(graphs, max_new_tokens=new_tokens))
    assert torch.equal(output, expected)
    assert drafter.last_generation_stats.acceptance_lengths == rounds
    assert (graphs.runs > 0) == (new_tokens > 1)
    assert hook_count(target) == hooks


def test_features_and_acceptance(trained_pair, graphs):
    """The trained pair accepts about five tokens a round; with wrong features it accepts none."""
    target, drafter = trained_pair
    ids = torch.arange(4, 20)[None]
    expected = assisted(target, drafter, ids, max_new_tokens=60)
    rounds = drafter.last_generation_stats.acceptance_lengths
    assert sum(rounds) / len(rounds) > 3
    assert torch.equal(assisted(target, drafter, ids, **options(graphs, max_new_tokens=60)), expected)
    assert drafter.last_generation_stats.acceptance_lengths == rounds
    assert graphs.runs >= len(rounds) - 2, "only the last rounds, near the end of the cache, may run as they are"


def test_features_of_an_earlier_run_are_found(trained_pair, graphs, monkeypatch):
    """The fault put back: states that are not those of this run."""
    target, drafter = trained_pair
    ids = torch.arange(4, 20)[None]
    assisted(target, drafter, ids, max_new_tokens=60)
    rounds = drafter.last_generation_stats.acceptance_lengths
    first = []
    real = compiled.CompiledForward.__call__

    def stale(self, capture, inputs):
        outputs, states = real(self, capture, inputs)
        first.append(states)
        return outputs, [torch.zeros_like(state) for state in states]

    monkeypatch.setattr(compiled.CompiledForward, "__call__", stale)
    assisted(target, drafter, ids, **options(graphs, max_new_tokens=60))
    assert first and drafter.last_generation_stats.acceptance_lengths != rounds


def test_padding_is_taken_out_of_the_cache(target, graphs, monkeypatch):
    """Six rows run as eight; what the other two leave would be seen by every later token."""
    drafter = drafter_for(target, block_size=6)
    ids = prompt()
    expected = plain(target, ids, max_new_tokens=30)
    assert torch.equal(assisted(target, drafter, ids, **options(graphs, max_new_tokens=30)), expected)
    monkeypatch.setattr(compiled.CompiledVerification, "__call__", _without_crop)
    assert not torch.equal(assisted(target, drafter, ids, **options(graphs, max_new_tokens=30)), expected)


def _without_crop(self, inputs, *, count):
    outputs, states = self.forward(self.capture, inputs)
    outputs.logits = outputs.logits[:, :count]
    self.capture.supply([state[:, :count] for state in states])
    return outputs


def test_graphs_are_few_and_used_again(target):
    """One graph a row count, whatever the block length, and one for drafts; a second call makes none."""
    graphs = Graphs()
    drafter = drafter_for(target)
    for wanted in (7, 6, 5, 3, 2, 1, 7, 4):
        drafter.generation_config.num_assistant_tokens = wanted
        assert_same_ids_compiled(target, drafter, graphs)
    assert graphs.made <= 5  # 8, 4, 2 rows, 1 at the end, and the draft
    before = graphs.made
    assert_same_ids_compiled(target, drafter, graphs)
    assert graphs.made == before


def assert_same_ids_compiled(target, drafter, graphs):
    ids = prompt()
    expected = plain(target, ids, max_new_tokens=25)
    assert torch.equal(assisted(target, drafter, ids, **options(graphs, max_new_tokens=25)), expected)


def test_other_taps_and_the_embedding(target, graphs):
    """Two drafters of one target; the last layer's state is the one before the final norm."""
    for taps in ([-1, 2], [0, 2]):
        drafter = drafter_for(target, target_layer_ids=taps)
        ids = prompt()
        expected = assisted(target, drafter, ids, max_new_tokens=25)
        rounds = drafter.last_generation_stats.acceptance_lengths
        assert torch.equal(assisted(target, drafter, ids, **options(graphs, max_new_tokens=25)), expected)
        assert drafter.last_generation_stats.acceptance_lengths == rounds


def test_a_batch_and_sampling(target, graphs):
    """Rows of different length in one static cache; the same seed gives the text of an eager call."""
    drafter = drafter_for(target)
    ids = torch.cat([prompt(8), prompt(8, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    more = {"attention_mask": mask, "max_new_tokens": 20}
    expected = plain(target, ids, **more)
    assert torch.equal(assisted(target, drafter, ids, **options(graphs, **more)), expected)
    texts = []
    for how in ({"cache_implementation": "static"}, options(graphs)):
        torch.manual_seed(0)
        texts.append(assisted(target, drafter, prompt(), do_sample=True, max_new_tokens=20, **how))
    assert torch.equal(*texts)
    assert graphs.runs > 0


def test_scores_are_not_overwritten(target, graphs):
    """Returned scores are those of each step."""
    drafter = drafter_for(target)
    wanted = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True}
    expected = plain(target, prompt(), **wanted)
    output = assisted(target, drafter, prompt(), **options(graphs, **wanted))
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    assert graphs.runs > 0


@pytest.mark.parametrize(
    "more",
    [
        {"disable_compile": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"cache_implementation": None},
    ],
)
def test_where_it_is_not_compiled(target, more, graphs):
    """As asked for, or because graphs do not give what is wanted."""
    output = assisted(target, drafter_for(target), prompt(), **options(graphs, max_new_tokens=20, **more))
    output = output if isinstance(output, torch.Tensor) else output.sequences
    assert torch.equal(output, plain(target, prompt(), max_new_tokens=20))
    assert graphs.runs == 0


def test_the_target_is_not_kept_alive(graphs):
    """Graphs go with their target."""
    import gc
    import weakref

    target = tiny_target(layers=1)
    assisted(target, drafter_for(target, target_layer_ids=[0]), prompt(), **options(graphs, max_new_tokens=12))
    gone = weakref.ref(target)
    del target
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_real_backends(backend, tmp_path, monkeypatch):
    """Inductor's code for a CPU, and what lies before it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    target = tiny_target(layers=1)
    drafter = drafter_for(target, layers=1, target_layer_ids=[0])
    expected = assert_same_ids(target, drafter, prompt(), max_new_tokens=14)
    rounds = drafter.last_generation_stats.acceptance_lengths
    output = assisted(target, drafter, prompt(), **options(backend, max_new_tokens=14))
    assert torch.equal(output, expected)
    assert drafter.last_generation_stats.acceptance_lengths == rounds
