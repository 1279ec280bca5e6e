"""A window on the drafter's context: what a block sees, in batches too, and that nothing else changes."""

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from generation_helpers import assert_same_ids, prompt
from transformers import LogitsProcessorList

from dflash_hf.errors import DFlashConfigError
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.processors import Processors


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target, tiny_drafter(target)


def generator_of(pair, window, *, batch_size: int = 1) -> DFlashCandidateGenerator:
    target, drafter = pair
    drafter.generation_config.dflash_context_window = window
    try:
        return DFlashCandidateGenerator(
            drafter, target, processors=Processors(LogitsProcessorList()), do_sample=False, batch_size=batch_size
        )
    finally:
        drafter.generation_config.dflash_context_window = None


def features(rows: int, count: int, width: int) -> torch.Tensor:
    return torch.randn(rows, count, width, generator=torch.Generator().manual_seed(count))


def width_of(pair) -> int:
    return pair[1].fc.in_features


def oracle(pair, states: torch.Tensor, anchor: torch.Tensor, window: int) -> torch.Tensor:
    """The newest `window` rows alone, at their own positions."""
    target, drafter = pair
    count, block = states.shape[1], drafter.config.block_size
    slots = torch.full((1, block), drafter.config.mask_token_id)
    slots[:, 0] = anchor
    first = max(count - window, 0)
    positions = torch.arange(first, count + block)[None]
    hidden = drafter(target.get_input_embeddings()(slots), states[:, first:], position_ids=positions)
    return target.lm_head(hidden.last_hidden_state[:, 1:])


@pytest.mark.parametrize("window", [1, 5, 20, 21, 100])
@torch.no_grad()
def test_a_block_sees_the_newest_rows(pair, window):
    """Oracle: a forward pass over those rows alone. Over two rounds, so that some rows come from the cache."""
    generator = generator_of(pair, window)
    states, anchor = features(1, 20, width_of(pair)), torch.tensor([[7]])
    for end, start in ((16, 0), (20, 16)):
        generator.context.add(states[:, start:end], torch.arange(start, end)[None])
        logits = generator.draft_logits(anchor, 7)
        torch.testing.assert_close(logits, oracle(pair, states[:, :end], anchor, window), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_rows_of_a_batch_have_windows_of_their_own(pair):
    """Contexts of different length: each row as if it were alone."""
    generator = generator_of(pair, 6, batch_size=3)
    lengths, states = [14, 9, 3], features(3, 14, width_of(pair))
    real = torch.arange(14)[None] < torch.tensor(lengths)[:, None]
    anchor = torch.tensor([[7], [8], [9]])
    generator.context.add(states, torch.arange(14).expand(3, -1), real=real)
    logits = generator.draft_logits(anchor, 7)
    for row, length in enumerate(lengths):
        alone = oracle(pair, states[row : row + 1, :length], anchor[row], 6)
        torch.testing.assert_close(logits[row : row + 1], alone, atol=2e-5, rtol=1e-4)
    more = features(3, 4, width_of(pair))
    kept = [4, 2, 1]
    positions = torch.tensor(lengths)[:, None] + torch.arange(4)
    generator.context.add(more, positions, counts=kept)
    logits = generator.draft_logits(anchor, 7)
    for row, (length, count) in enumerate(zip(lengths, kept)):
        whole = torch.cat([states[row : row + 1, :length], more[row : row + 1, :count]], dim=1)
        alone = oracle(pair, whole, anchor[row], 6)
        torch.testing.assert_close(logits[row : row + 1], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_is_the_target_s_own(pair, batch_size):
    target, drafter = pair
    drafter.generation_config.dflash_context_window = 4
    try:
        ids = torch.cat([prompt(12, seed=seed) for seed in range(batch_size)])
        assert_same_ids(target, drafter, ids, max_new_tokens=30)
    finally:
        drafter.generation_config.dflash_context_window = None


@torch.no_grad()
def test_a_wide_window_changes_nothing_and_a_narrow_one_does(pair):
    states, anchor = features(1, 20, width_of(pair)), torch.tensor([[7]])
    found = []
    for window in (None, 50, 4):
        generator = generator_of(pair, window)
        generator.context.add(states, torch.arange(20)[None])
        found.append(generator.draft_logits(anchor, 7))
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=1e-3)


def test_the_window_is_saved_and_checked(pair, tmp_path):
    target, drafter = pair
    drafter.generation_config.dflash_context_window = 0
    try:
        with pytest.raises(DFlashConfigError, match="dflash_context_window is 0"):
            target.generate(prompt(4), assistant_model=drafter, max_new_tokens=4)
        drafter.generation_config.dflash_context_window = 512
        drafter.save_pretrained(tmp_path)
    finally:
        drafter.generation_config.dflash_context_window = None
    assert type(drafter).from_pretrained(tmp_path).generation_config.dflash_context_window == 512
