"""Anchors, labels and loss weights of training blocks; pure functions on one row.

An anchor is the position of the newest known token of a block; slot k of the block (k = 1..B-1) predicts the token at
anchor + k. Drafters that sample from the anchor are shifted by one: slot 0 proposes too, and slot k predicts the token
at anchor + k + 1. `first_slot`, 1 or 0, says which it is.
"""

from __future__ import annotations

import hashlib

import torch

IGNORE = -100


def default_gamma(block_size: int) -> float:
    """Decay constant of the loss weights: linear through block sizes (8, 4), (10, 5), (16, 7), at least 1.

    Source: DFlash (arXiv 2602.06036), which gives the three points.
    """
    slope, origin = (0.5, (8, 4.0)) if block_size <= 10 else (1 / 3, (10, 5.0))
    return max(1.0, origin[1] + slope * (block_size - origin[0]))


def example_generator(*, seed: int, epoch: int, index: int) -> torch.Generator:
    """A CPU generator that depends on these three numbers only, so that a resumed run draws the same anchors."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def allowed_anchors(*, loss_mask: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Positions that may be anchors: i and i + 1 supervised, in the same document.

    Args:
        loss_mask: `[T]`, non-zero on supervised tokens.
        document_ids: `[T]`, for packed rows.

    Returns:
        Boolean `[T]`.
    """
    supervised = loss_mask.bool()
    allowed = torch.zeros_like(supervised)
    allowed[:-1] = supervised[:-1] & supervised[1:]
    if document_ids is not None:
        allowed[:-1] &= document_ids[:-1] == document_ids[1:]
    return allowed


def sample_anchors(
    *,
    loss_mask: torch.Tensor,
    num_anchors: int,
    generator: torch.Generator,
    document_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchors uniformly without replacement.

    Args:
        loss_mask: `[T]`.
        num_anchors: N, the constant number of slots.
        generator: source of randomness.
        document_ids: `[T]`, for packed rows.

    Returns:
        `anchors [N]` (int64; the kept ones first and sorted, then zeros) and `keep [N]` (bool).
    """
    positions = allowed_anchors(loss_mask=loss_mask, document_ids=document_ids).nonzero().flatten()
    order = torch.randperm(len(positions), generator=generator)[:num_anchors]
    # Sorted anchors make block-sparse attention sparse.
    chosen = positions[order].sort().values
    anchors = torch.zeros(num_anchors, dtype=torch.int64)
    keep = torch.zeros(num_anchors, dtype=torch.bool)
    anchors[: len(chosen)] = chosen
    keep[: len(chosen)] = True
    return anchors, keep


def block_labels(
    *,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    block_size: int,
    document_ids: torch.Tensor | None = None,
    first_slot: int = 1,
    contiguous_prefix: bool = False,
) -> torch.Tensor:
    """Labels of every slot.

    Slots before `first_slot`, padding blocks, unsupervised tokens, tokens past the end and tokens of another document
    get `IGNORE`; an unsupervised token drops only its own slot, unless `contiguous_prefix`.

    Args:
        input_ids, loss_mask: `[T]`.
        anchors, keep: `[N]`.
        block_size: B.
        document_ids: `[T]`, for packed rows.
        first_slot: the first slot that predicts.
        contiguous_prefix: supervise a block up to its first unsupervised token only.

    Returns:
        int64 `[N, B]`.
    """
    length = len(input_ids)
    positions = anchors[:, None] + torch.arange(1 - first_slot, 1 - first_slot + block_size)[None, :]
    inside = positions.clamp(max=length - 1)
    wanted = keep[:, None] & (positions < length) & loss_mask.bool()[inside]
    wanted[:, :first_slot] = False
    if document_ids is not None:
        wanted &= document_ids[inside] == document_ids[anchors][:, None]
    if contiguous_prefix:
        wanted[:, first_slot:] = wanted[:, first_slot:].long().cumprod(dim=1).bool()
    return torch.where(wanted, input_ids[inside], IGNORE)


def slot_weights(*, labels: torch.Tensor, gamma: float, first_slot: int = 1) -> torch.Tensor:
    """Loss weights `exp(-(k - first_slot) / gamma)` of slots k that have a label, else 0.

    Source: DFlash (arXiv 2602.06036), position-decayed cross-entropy.

    Args:
        labels: `[..., B]`.
        gamma: decay constant, in slots; infinite for equal weights.
        first_slot: the first slot that predicts.

    Returns:
        fp32 `[..., B]`, on the labels' device.
    """
    slots = torch.arange(labels.shape[-1], dtype=torch.float32, device=labels.device)
    return torch.exp(-(slots - first_slot) / gamma) * (labels != IGNORE)
