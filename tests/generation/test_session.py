"""Several turns on one cache: the output of `generate` on all ids, with the target run on new tokens only."""

import copy

import pytest
import torch
from generation_helpers import assisted, cache_of, drafter_for, plain, prompt, propose, small_target
from target_families import family_target

from dflash_hf import DFlashSession
from dflash_hf.errors import UnsupportedGenerationError

NEW = 12


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


@pytest.fixture
def session(target):
    """A conversation with it."""
    return DFlashSession(target, drafter_for(target))


def tokens_run(target, call):
    """Token positions that the target ran on during `call`."""
    counts = []
    hook = target.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(out.shape[1]))
    try:
        call()
    finally:
        hook.remove()
    return sum(counts)


def test_ten_turns(target, session, monkeypatch):
    """The prompt of a turn is never run twice, and the drafter's context holds every token of every turn."""
    seen = []
    real = session.drafter.forward

    def forward(*args, cache, **options):
        output = real(*args, cache=cache, **options)
        seen.append(cache.get_seq_length() - session.drafter.config.block_size)
        return output

    monkeypatch.setattr(session.drafter, "forward", forward)
    ids = prompt(6)
    for turn in range(10):
        expected = plain(target, ids, max_new_tokens=NEW)
        before = session.cached_tokens
        output = session.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert output.tolist() == expected.tolist()
        assert seen[-1] >= ids.shape[1]  # context rows of the last draft of this turn
        assert session.cached_tokens == output.shape[1] - 1
        assert before == (0 if turn == 0 else ids.shape[1] - 4)
        ids = torch.cat([output, prompt(3, seed=turn + 20)], dim=1)


def test_the_target_runs_on_new_tokens_only(target, session):
    """The prefill of a second turn: the newest token of the first one and what was added, not the whole prompt."""
    ids = prompt(40)
    output = session.generate(ids, max_new_tokens=NEW, do_sample=False)
    ids = torch.cat([output, prompt(3, seed=5)], dim=1)
    inputs = []
    hook = target.model.layers[0].register_forward_hook(lambda module, args, out: inputs.append(args[0].shape[1]))
    session.generate(ids, max_new_tokens=2, do_sample=False)
    hook.remove()
    assert inputs[0] == 4


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_an_edited_conversation(family):
    """A turn that differs from what is held: cropped, or begun anew behind a sliding window."""
    target = family_target(family)
    session = DFlashSession(target, drafter_for(target))
    output = session.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    edited = torch.cat([output, prompt(2, seed=3)], dim=1)
    edited[0, 5] = (edited[0, 5] + 1) % 97
    assert session.generate(edited, max_new_tokens=NEW, do_sample=False).tolist() == (
        plain(target, edited, max_new_tokens=NEW).tolist()
    )
    shorter = prompt(4)
    assert session.generate(shorter, max_new_tokens=NEW, do_sample=False).tolist() == (
        plain(target, shorter, max_new_tokens=NEW).tolist()
    )


def test_a_failed_turn_leaves_nothing(target, session):
    """An error in the middle of a turn: the next one starts from nothing and is right."""
    output = session.generate(prompt(6), max_new_tokens=NEW, do_sample=False)
    ids = torch.cat([output, prompt(2, seed=3)], dim=1)

    class Broken(Exception):
        pass

    def fail(*args):
        raise Broken

    hook = target.model.layers[1].register_forward_hook(fail)
    with pytest.raises(Broken):
        session.generate(ids, max_new_tokens=NEW, do_sample=False)
    hook.remove()
    assert session.cached_tokens == 0
    assert session.generate(ids, max_new_tokens=NEW, do_sample=False).tolist() == (
        plain(target, ids, max_new_tokens=NEW).tolist()
    )


def test_one_conversation_only(session):
    """Two rows, or padding: an error with the remedy."""
    with pytest.raises(UnsupportedGenerationError, match=r"\(2, 5\).*for each conversation"):
        session.generate(prompt(5).expand(2, -1))
    with pytest.raises(UnsupportedGenerationError, match="padding"):
        session.generate(prompt(5), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))


@pytest.mark.parametrize("copied", [False, True])
def test_the_context_stays_with_a_cache_that_comes_back(target, copied, monkeypatch):
    """Without a session: the cache that `generate` returned, or a copy of it, brings the drafter's context along."""
    drafter = drafter_for(target)
    turn = assisted(target, drafter, prompt(6), max_new_tokens=NEW, return_dict_in_generate=True)
    cache = copy.deepcopy(cache_of(turn)) if copied else cache_of(turn)
    ids = torch.cat([turn.sequences, prompt(3, seed=9)], dim=1)
    expected = plain(target, ids, max_new_tokens=NEW)
    propose(monkeypatch, expected, wrong=lambda position: False)  # reads the position off the length of the context
    assert assisted(target, drafter, ids, max_new_tokens=NEW, cache=cache).tolist() == expected.tolist()
    assert drafter.last_generation_stats.acceptance_length > 4


def test_a_context_that_does_not_fit_is_not_used(target):
    """The target went on without the drafter, or another drafter comes: a new context, the right output."""
    drafter = drafter_for(target)
    turn = assisted(target, drafter, prompt(6), max_new_tokens=NEW, return_dict_in_generate=True)
    more = plain(target, turn.sequences, max_new_tokens=5, cache=cache_of(turn), return_dict_in_generate=True)
    ids = torch.cat([more.sequences, prompt(3, seed=9)], dim=1)
    expected = plain(target, ids, max_new_tokens=NEW)
    again = copy.deepcopy(cache_of(more))
    assert assisted(target, drafter, ids, max_new_tokens=NEW, cache=cache_of(more)).tolist() == expected.tolist()
    assert assisted(target, drafter_for(target), ids, max_new_tokens=NEW, cache=again).tolist() == expected.tolist()
