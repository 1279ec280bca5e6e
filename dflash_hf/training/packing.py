"""Several short examples in one row: which go together, and what the target makes of such a row."""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort

import torch
from torch import nn

from ..data.features import compute_states
from ..errors import DFlashError
from ..target import FeatureCapture


def pack_lengths(lengths: list[int], *, capacity: int) -> list[list[int]]:
    """Best-fit decreasing: examples, longest first, each into the fullest row that still has room.

    Args:
        lengths: of the examples, in tokens.
        capacity: of a row.

    Returns:
        Example indices of each row, ascending; every example in exactly one row.

    Raises:
        DFlashError: if an example is longer than a row.
    """
    if lengths and max(lengths) > capacity:
        raise DFlashError(
            f"An example has {max(lengths)} tokens, a packed row holds {capacity}. Raise packed_length, or lower "
            "max_length."
        )
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(free, (lengths[index], -1))
        if place < len(free):
            room, row = free.pop(place)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(free, (room - lengths[index], row))
    return sorted(sorted(row) for row in rows)


def keeps_documents_apart(target: nn.Module, layer_ids: list[int]) -> bool:
    """Whether the target gives the documents of one row the states that they have alone, when positions restart.

    Recurrent and hybrid targets carry their state from one document into the next, and some attention targets take no
    positions; they answer False and run on unpacked documents. The others are asked: two short documents in one row
    against each alone.

    Args:
        target: the frozen target.
        layer_ids: the drafter's taps.
    """
    decoder = target.get_decoder()
    if getattr(target, "_is_stateful", False) or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return False
    weight = target.get_input_embeddings().weight
    device = target.device
    row = torch.arange(3, 16, device=device)[None] % weight.shape[0]
    first = 6
    positions = torch.cat([torch.arange(first), torch.arange(row.shape[1] - first)])[None].to(device)
    with FeatureCapture(target, layer_ids) as capture:
        packed, _ = compute_states(target, capture, row, position_ids=positions)
        alone = [compute_states(target, capture, part)[0] for part in (row[:, :first], row[:, first:])]
    expected = torch.cat(alone, dim=1).float()
    tolerance = 1e-4 if packed.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((packed.float() - expected).norm() <= tolerance * expected.norm())


def states_of_batch(
    target: nn.Module, layer_ids: list[int], batch: dict[str, torch.Tensor], *, packed_forward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's states of a collated batch, packed or not.

    Args:
        target: the frozen target.
        layer_ids: the drafter's taps.
        batch: of `DFlashDataCollator`.
        packed_forward: run packed rows as they are (`keeps_documents_apart`), else document by document.

    Returns:
        Features `[b, S, K * H_t]` and final hidden states `[b, S, H_t]`, those of each document alone.
    """
    input_ids, documents = batch["input_ids"], batch.get("documents")
    with FeatureCapture(target, layer_ids) as capture:
        if documents is None:
            return compute_states(target, capture, input_ids, attention_mask=batch["attention_mask"])
        if packed_forward:
            # Positions that restart make transformers' masks keep documents apart; an attention mask would undo that.
            return compute_states(target, capture, input_ids, position_ids=batch["position_ids"])
        real = documents >= 0
        alone = compute_states(target, capture, input_ids.flatten()[documents.clamp(min=0)], attention_mask=real.long())
    size = input_ids.numel()
    places = torch.where(real, documents, size).flatten()  # padding goes to a row of its own, dropped below
    return tuple(
        states.new_zeros(size + 1, states.shape[-1])
        .index_copy_(0, places, states.flatten(0, 1))[:size]
        .view(*input_ids.shape, -1)
        for states in alone
    )
