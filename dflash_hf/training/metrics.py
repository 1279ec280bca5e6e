"""Acceptance numbers of training blocks, as sums and counts that are reduced once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockCounts:
    """What a set of blocks adds up to; P is the number of proposals of a block.

    Attributes:
        correct_prefix_sum: scalar, sum over blocks of the number of leading correct proposals.
        block_count: scalar.
        hit_sum: `[P]`, correct proposals by place.
        slot_count: `[P]`, supervised proposals by place.
    """

    correct_prefix_sum: torch.Tensor
    block_count: torch.Tensor
    hit_sum: torch.Tensor
    slot_count: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """`[2 + 2 P]`: prefixes, blocks, hits, counts."""
        return torch.cat([torch.stack([self.correct_prefix_sum, self.block_count]), self.hit_sum, self.slot_count])


def count_blocks(
    *, hits: torch.Tensor, supervised: torch.Tensor, keep: torch.Tensor, first_slot: int = 1
) -> BlockCounts:
    """Count correct prefixes: a block's proposals are accepted up to the first wrong or unsupervised one.

    Args:
        hits: bool `[..., N, B]`.
        supervised: bool `[..., N, B]`.
        keep: bool `[..., N]`.
        first_slot: the first slot that proposes; those before it are not looked at.
    """
    right = (hits & supervised)[..., first_slot:]
    prefix = right.long().cumprod(dim=-1).sum(dim=-1)
    rows = tuple(range(right.dim() - 1))
    return BlockCounts(
        correct_prefix_sum=(prefix * keep).sum(),
        block_count=keep.sum(),
        hit_sum=right.sum(dim=rows),
        slot_count=supervised[..., first_slot:].sum(dim=rows),
    )


def acceptance_metrics(sums: list[float]) -> dict[str, float]:
    """`BlockCounts.stacked()`, summed over batches and ranks -> `block_acceptance_length`, `slot_accuracy` (all places
    together) and `slot_accuracy_1` to `slot_accuracy_P`."""
    prefixes, blocks, *rest = sums
    hits, counts = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    metrics = {
        "block_acceptance_length": 1 + prefixes / max(blocks, 1),
        "slot_accuracy": sum(hits) / max(sum(counts), 1),
    }
    for place, (hit, count) in enumerate(zip(hits, counts), start=1):
        metrics[f"slot_accuracy_{place}"] = hit / max(count, 1)
    return metrics


class RunningCounts:
    """Training numbers since the last log. They stay on the device until `take`: no step waits for them.

    Args:
        places: P, proposals of a block.
        device: where steps run.
    """

    def __init__(self, *, places: int, device: torch.device):
        exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.sums = torch.zeros(4 + 2 * places, dtype=exact, device=device)  # tokens, anchors, BlockCounts
        self._since: float | None = None
        self._minutes = 0.0

    def start_clock(self, *, minutes: float = 0.0) -> None:
        """Called when training starts, or goes on after so many minutes."""
        self._since = time.perf_counter()
        self._minutes = minutes

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds: something else than training took them."""
        if self._since is not None:
            self._since += seconds

    def add(self, *, tokens: torch.Tensor, counts: BlockCounts) -> None:
        """Add a batch: its number of tokens, and its blocks."""
        self.sums += torch.cat([torch.stack([tokens, counts.block_count]), counts.stacked()])

    def take(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Metrics of all ranks since the last call; everything starts anew.

        Args:
            reduce: sums a tensor over the ranks.
        """
        tokens, anchors, *blocks = reduce(self.sums.clone()).tolist()
        metrics = acceptance_metrics(blocks)
        now = time.perf_counter()
        if self._since is not None and now > self._since:
            metrics["tokens_per_second"] = tokens / (now - self._since)
            metrics["anchors_per_second"] = anchors / (now - self._since)
            self._minutes += (now - self._since) / 60
            metrics["training_minutes"] = self._minutes
        self.sums.zero_()
        self._since = now
        return metrics
