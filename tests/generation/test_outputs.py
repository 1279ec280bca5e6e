"""return_dict_in_generate: the same structure, shapes and values as plain generate."""

import copy

import pytest
import torch
from generation_helpers import (
    assisted,
    cache_of,
    drafter_for,
    needs_static_rollback,
    plain,
    prompt,
    propose,
    small_target,
)
from target_families import family_target

NEW = 18
WANTED = dict(
    return_dict_in_generate=True,
    output_scores=True,
    output_logits=True,
    output_attentions=True,
    output_hidden_states=True,
)


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


def eager(family: str):
    """A target of its own with eager attention, which alone returns weights."""
    target = copy.deepcopy(family_target(family))
    target.set_attn_implementation("eager")
    return target


def assert_close_nested(ours, theirs, where=""):
    """Tuples of tuples of tensors, or None."""
    if theirs is None:
        assert ours is None, where
    elif isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape, f"{where}: {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=lambda text: f"{where}: {text}")
    else:
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs)):
            assert_close_nested(*pair, f"{where}[{index}]")


@pytest.mark.parametrize("name", ["scores", "logits", "attentions", "hidden_states"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "bloom", "gemma3_text"])
def test_same_as_plain_generate(family, name, monkeypatch):
    """One entry a token: block-wide states are cut to what a step of one token would have given."""
    target = eager(family)
    drafter = drafter_for(target)
    ids = prompt(9, seed=3)
    expected = plain(target, ids, max_new_tokens=NEW, **WANTED)
    propose(monkeypatch, expected.sequences)
    output = assisted(target, drafter, ids, max_new_tokens=NEW, **WANTED)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert max(drafter.last_generation_stats.acceptance_lengths) > 2
    assert type(output) is type(expected)
    assert len(output[name]) == NEW
    assert_close_nested(output[name], expected[name], name)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}, {"suppress_tokens": [5, 6]}])
@pytest.mark.parametrize("right", [False, True])
def test_scores_are_processed_and_logits_are_raw(options, right, target, monkeypatch):
    """On the row-wise path as well as on the path in order."""
    drafter = drafter_for(target)
    ids = prompt(9)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = plain(target, ids, max_new_tokens=NEW, **options, **wanted)
    if right:
        propose(monkeypatch, expected.sequences)
    output = assisted(target, drafter, ids, max_new_tokens=NEW, **options, **wanted)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert_close_nested(output.scores, expected.scores, "scores")
    assert_close_nested(output.logits, expected.logits, "logits")
    assert all(entry.dtype == torch.float32 for entry in (*output.scores, *output.logits))
    changed = any(not torch.equal(score, logit) for score, logit in zip(output.scores, output.logits))
    assert changed == bool(options)


def test_stop_in_mid_block_cuts_every_list(target, monkeypatch):
    """Nothing after the stop token is scored."""
    target.set_attn_implementation("eager")
    drafter = drafter_for(target)
    ids = prompt(9)
    text = plain(target, ids, max_new_tokens=NEW)
    propose(monkeypatch, text, wrong=lambda position: False)
    eos = text[0, 9 + 5].item()
    expected = plain(target, ids, max_new_tokens=NEW, eos_token_id=eos, **WANTED)
    output = assisted(target, drafter, ids, max_new_tokens=NEW, eos_token_id=eos, **WANTED)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits", "attentions", "hidden_states"):
        assert_close_nested(output[name], expected[name], name)


def test_what_is_not_wanted_is_none(target):
    """Without the flags the object holds ids and cache only."""
    output = assisted(target, drafter_for(target), prompt(9), max_new_tokens=NEW, return_dict_in_generate=True)
    assert output.scores is output.logits is output.attentions is output.hidden_states is None
    assert cache_of(output) is not None


def test_flags_without_a_dict_change_nothing(target):
    """output_hidden_states alone keeps its meaning: ids come back, and the features are still right."""
    drafter = drafter_for(target)
    ids = prompt(9)
    expected = plain(target, ids, max_new_tokens=NEW)
    assisted(target, drafter, ids, max_new_tokens=NEW)
    lengths = drafter.last_generation_stats.acceptance_lengths
    output = assisted(target, drafter, ids, max_new_tokens=NEW, output_hidden_states=True, output_scores=True)
    assert output.tolist() == expected.tolist()
    assert drafter.last_generation_stats.acceptance_lengths == lengths


def test_hidden_states_flag_of_the_targets_config():
    """A target whose config asks for hidden states in every call works too."""
    target = small_target(output_hidden_states=True)
    target.config.output_hidden_states = True
    ids = prompt(9)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    expected = plain(target, ids, **options)
    output = assisted(target, drafter_for(target), ids, **options)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert_close_nested(output.hidden_states, expected.hidden_states, "hidden_states")


@needs_static_rollback
@pytest.mark.parametrize("name", ["scores", "attentions", "hidden_states"])
def test_static_cache(name, monkeypatch):
    """A cache of fixed size keeps its columns: attention weights are as wide as it is."""
    target = eager("llama")
    drafter = drafter_for(target)
    ids = prompt(9, seed=3)
    options = {"max_new_tokens": NEW, "cache_implementation": "static", **WANTED}
    expected = plain(target, ids, **options)
    propose(monkeypatch, expected.sequences)
    output = assisted(target, drafter, ids, **options)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert_close_nested(output[name], expected[name], name)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("new_tokens", [1, 2, 9, 18])
def test_returned_cache_can_be_continued(family, new_tokens, monkeypatch):
    """It holds all tokens but the newest one, like plain generate's, and goes on to the same text."""
    target = family_target(family)
    drafter = drafter_for(target)
    ids = prompt(9, seed=3)
    text = plain(target, ids, max_new_tokens=new_tokens + 10)
    propose(monkeypatch, text)
    output = assisted(target, drafter, ids, max_new_tokens=new_tokens, return_dict_in_generate=True)
    assert output.sequences.tolist() == text[:, : 9 + new_tokens].tolist()
    assert cache_of(output).get_seq_length() == output.sequences.shape[1] - 1
    more = plain(target, output.sequences, max_new_tokens=10, cache=cache_of(output))
    assert more.tolist() == text.tolist()


def test_returned_cache_holds_the_rows_of_plain_generate(target, monkeypatch):
    """Keys and values of rejected tokens are gone, those of accepted ones are right."""
    drafter = drafter_for(target)
    ids = prompt(9)
    expected = plain(target, ids, max_new_tokens=NEW, return_dict_in_generate=True)
    propose(monkeypatch, expected.sequences)
    output = assisted(target, drafter, ids, max_new_tokens=NEW, return_dict_in_generate=True)
    for ours, theirs in zip(cache_of(output).layers, cache_of(expected).layers):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)


def test_transition_scores(target, monkeypatch):
    """compute_transition_scores works on our output."""
    drafter = drafter_for(target)
    ids = prompt(9)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}
    expected = plain(target, ids, **options)
    propose(monkeypatch, expected.sequences)
    output = assisted(target, drafter, ids, **options)
    results = [
        target.compute_transition_scores(each.sequences, each.scores, normalize_logits=True)
        for each in (output, expected)
    ]
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_sampled_scores(target):
    """When sampling, scores are the warped ones of the target at the tokens that were kept."""
    drafter = drafter_for(target)
    torch.manual_seed(0)
    output = target.generate(
        prompt(9),
        assistant_model=drafter,
        do_sample=True,
        temperature=0.5,
        top_k=7,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    with torch.no_grad():
        logits = target(output.sequences).logits[0, 8:-1]
    torch.testing.assert_close(torch.cat(output.logits), logits, atol=1e-4, rtol=1e-4)
    warped = logits / 0.5
    warped[warped < warped.topk(7).values[:, -1:]] = -float("inf")
    torch.testing.assert_close(torch.cat(output.scores), warped, atol=1e-3, rtol=1e-4)
    chosen = torch.cat(output.scores).gather(1, output.sequences[0, 9:, None])
    assert chosen.isfinite().all()
