"""A cache from an earlier turn, a prefill in chunks, embeddings for a prompt: equal to plain generate."""

import copy

import pytest
import torch
from generation_helpers import assisted, cache_of, drafter_for, plain, prompt, propose, small_target
from target_families import family_target
from transformers import DynamicCache

FAMILIES = ["llama", "qwen3", "gemma2", "mistral", "gpt2", "bloom", "granite"]
NEW = 17


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


def first_turn(target, ids, with_drafter=None):
    """The output of a turn, its cache included."""
    options = {"max_new_tokens": 7, "return_dict_in_generate": True}
    if with_drafter is None:
        return plain(target, ids, **options)
    return assisted(target, with_drafter, ids, **options)


@pytest.mark.parametrize("earlier", ["plain", "assisted"])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_with_the_full_ids(family, right, earlier, monkeypatch):
    """Only what the cache lacks is run; a second run on top of the cache would be silently wrong."""
    target = family_target(family)
    drafter = drafter_for(target)
    turn = first_turn(target, prompt(6), drafter if earlier == "assisted" else None)
    ids = torch.cat([turn.sequences, prompt(5, seed=9)], dim=1)
    expected = plain(target, ids, max_new_tokens=NEW)  # without the cache: everything from scratch
    assert plain(target, ids, max_new_tokens=NEW, cache=copy.deepcopy(cache_of(turn))).tolist() == expected.tolist()
    if right:
        # What the drafter made of an earlier turn of its own stays with the cache: its context begins at the start.
        propose(monkeypatch, expected, offset=0 if earlier == "assisted" else cache_of(turn).get_seq_length())
    output = assisted(target, drafter, ids, max_new_tokens=NEW, cache=cache_of(turn))
    assert output.tolist() == expected.tolist()
    if right:
        assert max(drafter.last_generation_stats.acceptance_lengths) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_with_the_new_ids_and_a_mask(family):
    """Only the new ids, and a mask over everything: the cache is used as it is."""
    target = family_target(family)
    drafter = drafter_for(target)
    turn = first_turn(target, prompt(6))
    new = torch.cat([turn.sequences[:, -1:], prompt(5, seed=9)], dim=1)
    full = torch.cat([turn.sequences[:, :-1], new], dim=1)
    options = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(full)}
    expected = plain(target, new, cache=copy.deepcopy(cache_of(turn)), **options)
    assert expected[:, new.shape[1] :].tolist() == plain(target, full, max_new_tokens=NEW)[:, full.shape[1] :].tolist()
    assert assisted(target, drafter, new, cache=cache_of(turn), **options).tolist() == expected.tolist()


def test_second_turn_with_left_padding(monkeypatch):
    """The padding of the first turn stays masked in the second."""
    target = family_target("llama")
    drafter = drafter_for(target)
    ids = torch.cat([torch.zeros((1, 3), dtype=torch.long), prompt(6)], dim=1)
    mask = (torch.arange(9) >= 3).long()[None]
    turn = plain(target, ids, max_new_tokens=7, attention_mask=mask, return_dict_in_generate=True)
    ids = torch.cat([turn.sequences, prompt(5, seed=9)], dim=1)
    mask = torch.cat([mask, torch.ones((1, 12), dtype=torch.long)], dim=1)
    expected = plain(target, ids, max_new_tokens=NEW, attention_mask=mask)
    propose(monkeypatch, expected, offset=cache_of(turn).get_seq_length())
    output = assisted(target, drafter, ids, max_new_tokens=NEW, attention_mask=mask, cache=cache_of(turn))
    assert output.tolist() == expected.tolist()


def test_many_turns_on_one_cache(trained_pair):
    """A conversation: each turn goes on with the cache of the one before."""
    target, drafter = trained_pair
    ids, cache = prompt(6, vocab=120), DynamicCache(config=target.config)
    for turn in range(4):
        expected = plain(target, ids, max_new_tokens=15, eos_token_id=None)
        output = assisted(target, drafter, ids, max_new_tokens=15, eos_token_id=None, cache=cache)
        assert output.tolist() == expected.tolist()
        assert cache.get_seq_length() == output.shape[1] - 1
        ids = torch.cat([output, prompt(3, vocab=120, seed=turn)], dim=1)


def test_features_of_a_second_turn_have_absolute_positions(target, monkeypatch):
    """The drafter's context starts where the cache ends: rows and positions belong together."""
    drafter = drafter_for(target)
    turn = first_turn(target, prompt(6))
    ids = torch.cat([turn.sequences, prompt(5, seed=9)], dim=1)
    seen = []
    real = type(drafter).forward

    def forward(self, noise, context, position_ids=None, **more):
        seen.append((context, position_ids[0].tolist()))
        return real(self, noise, context, position_ids=position_ids, **more)

    monkeypatch.setattr(type(drafter), "forward", forward)
    text = assisted(target, drafter, ids, max_new_tokens=NEW, cache=cache_of(turn))
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
    start = 12  # the cache holds 6 + 7 - 1 positions
    for context, positions in seen:
        count = context.shape[1]
        torch.testing.assert_close(context, taps[:, start : start + count], atol=1e-4, rtol=1e-4)
        assert positions == list(range(start, start + count + 8))
        start += count


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 50])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bloom"])
def test_prefill_in_chunks(family, chunk, monkeypatch):
    """The features of all chunks reach the drafter, in order."""
    target = family_target(family)
    drafter = drafter_for(target)
    ids = prompt(11, seed=3)
    expected = plain(target, ids, max_new_tokens=NEW)
    assert plain(target, ids, max_new_tokens=NEW, prefill_chunk_size=chunk).tolist() == expected.tolist()
    propose(monkeypatch, expected)
    output = assisted(target, drafter, ids, max_new_tokens=NEW, prefill_chunk_size=chunk)
    assert output.tolist() == expected.tolist()


def test_chunks_give_the_same_acceptance(trained_pair):
    """A drafter that lost a chunk's features would propose otherwise."""
    target, drafter = trained_pair
    ids = prompt(23, vocab=120)
    lengths = []
    for chunk in (None, 4, 7):
        assisted(target, drafter, ids, max_new_tokens=40, eos_token_id=None, prefill_chunk_size=chunk)
        lengths.append(drafter.last_generation_stats.acceptance_lengths)
    assert lengths[0] == lengths[1] == lengths[2]


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "granite", "mistral"])
def test_embeddings_for_a_prompt(family, with_ids, monkeypatch):
    """inputs_embeds serve the prefill only; positions go on behind them."""
    target = family_target(family)
    drafter = drafter_for(target)
    ids = prompt(9)
    with torch.no_grad():
        embeds = target.get_input_embeddings()(ids)
    options = {"inputs_embeds": embeds, "max_new_tokens": NEW, "do_sample": False}
    if with_ids:
        options["input_ids"] = ids
    expected = target.generate(**options)
    text = plain(target, ids, max_new_tokens=NEW)
    assert expected[0, -NEW:].tolist() == text[0, -NEW:].tolist()
    assert target.generate(**options, assistant_model=drafter).tolist() == expected.tolist()
    propose(monkeypatch, text)
    assert target.generate(**options, assistant_model=drafter).tolist() == expected.tolist()
    assert max(drafter.last_generation_stats.acceptance_lengths) > 2


@pytest.mark.parametrize("length", range(1, 14))
def test_embeddings_stop_at_the_exact_length(length, target):
    """max_length with embeddings means what plain generate makes of it."""
    drafter = drafter_for(target)
    with torch.no_grad():
        embeds = target.get_input_embeddings()(prompt(9))
    options = {"inputs_embeds": embeds, "max_length": 9 + length, "do_sample": False}
    expected = target.generate(**options)
    assert target.generate(**options, assistant_model=drafter).tolist() == expected.tolist()


def test_given_position_ids(target, monkeypatch):
    """Positions that start elsewhere are continued, for the target and for the drafter."""
    drafter = drafter_for(target)
    ids = prompt(9)
    positions = torch.arange(30, 39)[None]
    expected = plain(target, ids, max_new_tokens=NEW, position_ids=positions)
    propose(monkeypatch, expected)
    assert assisted(target, drafter, ids, max_new_tokens=NEW, position_ids=positions).tolist() == expected.tolist()
