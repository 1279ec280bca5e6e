"""Greedy output equals plain generate on every kind of target, with a drafter that is right, wrong, and both."""

import pytest
import torch
from generation_helpers import (
    assert_same_ids,
    assisted,
    drafter_for,
    needs_static_rollback,
    plain,
    prompt,
    propose,
    small_target,
)
from target_families import FAMILIES, family_target


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


@pytest.fixture
def drafter(target):
    """A random drafter for the tiny Llama."""
    return drafter_for(target)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_a_wrong_drafter(family):
    """Nearly every proposal is rejected: each round rolls back almost the whole block."""
    target = family_target(family)
    drafter = drafter_for(target)
    for seed, (length, new) in enumerate([(1, 9), (12, 19)]):
        assert_same_ids(target, drafter, prompt(length, seed=seed), max_new_tokens=new)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_a_drafter_that_is_mostly_right(family, monkeypatch):
    """Blocks are accepted in part and whole, past the sliding window; then the rest is undone."""
    target = family_target(family)
    drafter = drafter_for(target)
    ids = prompt(11, seed=3)
    expected = plain(target, ids, max_new_tokens=30)
    propose(monkeypatch, expected, wrong=lambda position: position % 11 in (3, 7))
    assert assisted(target, drafter, ids, max_new_tokens=30).tolist() == expected.tolist()
    lengths = drafter.last_generation_stats.acceptance_lengths
    assert max(lengths) > 2 and len(set(lengths)) > 1 and sum(lengths) == 29


@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_left_padding(family, monkeypatch):
    """One padded prompt with its attention mask: mask and positions go on correctly after the prompt."""
    target = family_target(family)
    drafter = drafter_for(target)
    ids = torch.cat([torch.zeros((1, 4), dtype=torch.long), prompt(7, seed=5)], dim=1)
    mask = (torch.arange(11) >= 4).long()[None]
    expected = assert_same_ids(target, drafter, ids, attention_mask=mask, max_new_tokens=17)
    propose(monkeypatch, expected, offset=4)  # the padding is no context
    assert_same_ids(target, drafter, ids, attention_mask=mask, max_new_tokens=17)
    assert max(drafter.last_generation_stats.acceptance_lengths) > 2


@pytest.mark.parametrize("new_tokens", range(1, 20))
def test_every_length(new_tokens, target, drafter, monkeypatch):
    """The draft is capped so that the length is met exactly, whatever is left of a block."""
    ids = prompt(5)
    long = plain(target, ids, max_new_tokens=24)
    assert assisted(target, drafter, ids, max_new_tokens=new_tokens).tolist() == long[:, : 5 + new_tokens].tolist()
    propose(monkeypatch, long, wrong=lambda position: False)
    assert assisted(target, drafter, ids, max_new_tokens=new_tokens).tolist() == long[:, : 5 + new_tokens].tolist()
    stats = drafter.last_generation_stats
    assert stats.new_tokens == new_tokens
    assert all(made <= tried + 1 for made, tried in zip(stats.produced, stats.proposed))


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_up_to_the_last_one(family, monkeypatch):
    """The table of learned positions ends at 64: no proposal may be placed behind it."""
    target = family_target(family)
    drafter = drafter_for(target)
    ids = prompt(40)
    expected = plain(target, ids, max_length=64)
    assert expected.shape[1] == 64
    assert assisted(target, drafter, ids, max_length=64).tolist() == expected.tolist()
    propose(monkeypatch, expected, wrong=lambda position: False)
    assert assisted(target, drafter, ids, max_length=64).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_many_random_pairs(family, seed):
    """Other weights, block sizes, taps (the embedding output and the last layer too) and prompt lengths."""
    target = small_target(family, seed=10 + seed)
    taps = [[1, 2], [0], [-1, 3], [3], [-1], [0, 1, 2, 3], [2, 0], [3, -1, 1]][seed]
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5} if seed % 3 == 0 else {}
    drafter = drafter_for(target, seed=seed, block_size=[2, 3, 4, 5, 8, 11, 16, 8][seed], target_layer_ids=taps, **more)
    assert_same_ids(target, drafter, prompt(1 + 3 * seed, seed=seed), max_new_tokens=21 + seed)


@pytest.mark.parametrize("prompt_length", [1, 5, 6, 7, 20])
def test_sliding_window_smaller_than_the_text(prompt_length, monkeypatch):
    """Prompts below, at and above the window: the cache keeps what a rollback needs and no more is seen."""
    target = family_target("mistral")
    drafter = drafter_for(target)
    ids = prompt(prompt_length, seed=8)
    expected = assert_same_ids(target, drafter, ids, max_new_tokens=32)
    propose(monkeypatch, expected, wrong=lambda position: position % 6 == 2)
    assert_same_ids(target, drafter, ids, max_new_tokens=32)


@needs_static_rollback
@pytest.mark.parametrize("new_tokens", [1, 2, 5, 8, 9, 13, 18])
def test_static_cache(new_tokens, target, drafter, monkeypatch):
    """A cache of fixed size has no row for a block that overshoots."""
    ids = prompt(5)
    options = {"max_new_tokens": new_tokens, "cache_implementation": "static"}
    expected = assert_same_ids(target, drafter, ids, **options)
    assert expected.tolist() == plain(target, ids, max_new_tokens=new_tokens).tolist()
    propose(monkeypatch, expected)
    assert_same_ids(target, drafter, ids, **options)


def test_trained_pair(trained_pair):
    """A drafter that is right often, block by block, on texts of its grammar."""
    target, drafter = trained_pair
    for seed in range(4):
        ids = prompt(3 + seed, vocab=120, seed=seed)
        assert_same_ids(target, drafter, ids, max_new_tokens=60, eos_token_id=None)


def test_one_token_prompt_without_ids(target, drafter):
    """generate() without inputs starts from BOS."""
    expected = target.generate(max_new_tokens=9, do_sample=False)
    assert target.generate(max_new_tokens=9, do_sample=False, assistant_model=drafter).tolist() == expected.tolist()


def test_the_drafter_is_fed_the_taps_of_the_text(target, drafter, monkeypatch):
    """Context features and positions of each round equal the raw layer outputs of one pass over the final text."""
    seen = []
    real = type(drafter).forward

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **more):
        seen.append((noise_embeds.clone(), context_hidden_states, position_ids, more["cache"].get_seq_length()))
        return real(self, noise_embeds, context_hidden_states, position_ids=position_ids, **more)

    ids = prompt(6)
    text = plain(target, ids, max_new_tokens=20)
    propose(monkeypatch, text)
    monkeypatch.setattr(type(drafter), "forward", forward)
    assisted(target, drafter, ids, max_new_tokens=20)
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
    embedding = target.get_input_embeddings()
    assert len(seen) > 2
    for noise, context, positions, cached in seen:
        new, block = context.shape[1], noise.shape[1]
        torch.testing.assert_close(context, taps[:, cached : cached + new], atol=1e-4, rtol=1e-4)
        assert positions[0].tolist() == list(range(cached, cached + new + block))
        torch.testing.assert_close(noise[0, 0], embedding(text[0, cached + new]).detach())
        mask_row = embedding.weight[drafter.config.mask_token_id].detach()
        torch.testing.assert_close(noise[0, 1:], mask_row.expand(block - 1, -1))
    assert seen[0][1].shape[1] == 6
