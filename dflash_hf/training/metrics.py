"""Acceptance numbers of training blocks, as sums and counts that are reduced once."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockCounts:
    """What a set of blocks adds up to.

    Attributes:
        correct_prefix_sum: scalar, sum over blocks of the number of leading correct proposals.
        block_count: scalar.
        hit_sum: `[B - 1]`, correct proposals by slot.
        slot_count: `[B - 1]`, supervised proposals by slot.
    """

    correct_prefix_sum: torch.Tensor
    block_count: torch.Tensor
    hit_sum: torch.Tensor
    slot_count: torch.Tensor


def count_blocks(*, hits: torch.Tensor, supervised: torch.Tensor, keep: torch.Tensor) -> BlockCounts:
    """Count correct prefixes: a block's proposals are accepted up to the first wrong or unsupervised one.

    Args:
        hits: bool `[..., N, B]`, slot 0 is not looked at.
        supervised: bool `[..., N, B]`.
        keep: bool `[..., N]`.
    """
    right = (hits & supervised)[..., 1:]
    prefix = right.long().cumprod(dim=-1).sum(dim=-1)
    rows = tuple(range(right.dim() - 1))
    return BlockCounts(
        correct_prefix_sum=(prefix * keep).sum(),
        block_count=keep.sum(),
        hit_sum=right.sum(dim=rows),
        slot_count=supervised[..., 1:].sum(dim=rows),
    )
