"""Acceptance counts against loops over blocks."""

import pytest
import torch

from dflash_hf.training.metrics import count_blocks


@pytest.mark.parametrize("seed", range(10))
def test_counts_equal_a_loop(seed):
    """The correct prefix stops at the first wrong or unsupervised slot; padding blocks count for nothing."""
    generator = torch.Generator().manual_seed(seed)
    batch, blocks, size = 3, 5, 2 + seed % 6
    keep = torch.rand(batch, blocks, generator=generator) < 0.8
    supervised = torch.rand(batch, blocks, size, generator=generator) < 0.8
    supervised &= keep[..., None]
    hits = torch.rand(batch, blocks, size, generator=generator) < 0.7
    counts = count_blocks(hits=hits, supervised=supervised, keep=keep)
    prefix_sum, block_count, hit_sum, slot_count = 0, 0, [0] * (size - 1), [0] * (size - 1)
    for b in range(batch):
        for n in range(blocks):
            if not keep[b, n]:
                continue
            block_count += 1
            alive = True
            for k in range(1, size):
                right = bool(hits[b, n, k]) and bool(supervised[b, n, k])
                alive = alive and right
                prefix_sum += alive
                hit_sum[k - 1] += right
                slot_count[k - 1] += bool(supervised[b, n, k])
    assert counts.correct_prefix_sum == prefix_sum and counts.block_count == block_count
    assert counts.hit_sum.tolist() == hit_sum and counts.slot_count.tolist() == slot_count


def test_acceptance_is_the_prefix_and_not_the_mean_accuracy():
    """Hits after the first miss do not count: accuracy 3/4 here, but one accepted proposal."""
    hits = torch.tensor([[[False, True, False, True, True]]])
    ones = torch.ones_like(hits)
    counts = count_blocks(hits=hits, supervised=ones, keep=torch.tensor([[True]]))
    assert counts.correct_prefix_sum == 1 and counts.hit_sum.sum() == 3 and counts.block_count == 1


def test_slot_zero_is_silent():
    """The anchor is known, so its slot is neither a hit nor a miss."""
    hits = torch.ones(1, 1, 4, dtype=torch.bool)
    counts = count_blocks(hits=~hits, supervised=hits, keep=torch.tensor([[True]]))
    other = count_blocks(
        hits=torch.tensor([[[True, False, False, False]]]), supervised=hits, keep=torch.tensor([[True]])
    )
    assert counts.correct_prefix_sum == other.correct_prefix_sum == 0 and other.hit_sum.tolist() == [0, 0, 0]
