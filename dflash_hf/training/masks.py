"""The attention mask of a training step: many blocks over one context. Pure; one rule for every attention path."""

from __future__ import annotations

from collections.abc import Callable

import torch


def make_mask_mod(
    *,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    context_length: int,
    block_size: int,
    is_causal: bool,
    sliding_window: int | None,
    document_ids: torch.Tensor | None = None,
) -> Callable:
    """The rule "query q of row b sees key kv", in the signature that flex attention's `create_block_mask` takes.

    Keys are S context rows, then N * B block slots; queries are the N * B slots. Block n sees the context strictly
    before its anchor (the target has not run on the anchor yet) in the anchor's own document, and its own slots. A
    padding block sees itself only, since a fully masked row would be NaN. Sliding windows count the query itself.

    Args:
        anchors: `[b, N]`.
        keep: `[b, N]`, False on padding blocks.
        context_length: S.
        block_size: B.
        is_causal: attention inside the block.
        sliding_window: W, or None on full layers.
        document_ids: `[b, S]`, for packed rows.
    """

    def mask_mod(b, h, q, kv):
        block = q // block_size
        slot = q % block_size
        anchor = anchors[b, block]
        in_context = kv < context_length
        row = torch.where(in_context, kv, 0)
        sees_context = in_context & keep[b, block] & (row < anchor)
        if document_ids is not None:
            sees_context = sees_context & (document_ids[b, row] == document_ids[b, anchor])
        other = torch.where(in_context, 0, kv - context_length)
        other_slot = other % block_size
        sees_block = ~in_context & (other // block_size == block)
        if is_causal:
            sees_block = sees_block & (other_slot <= slot)
        if sliding_window is not None:
            sees_context = sees_context & (anchor + slot - row < sliding_window)
            sees_block = sees_block & (slot - other_slot < sliding_window) & (other_slot - slot < sliding_window)
        return sees_context | sees_block

    return mask_mod


def dense_mask(mask_mod: Callable, *, batch_size: int, num_queries: int, num_keys: int, device) -> torch.Tensor:
    """A mask rule written out: boolean `[b, 1, num_queries, num_keys]`, True is visible."""
    b = torch.arange(batch_size, device=device)[:, None, None]
    q = torch.arange(num_queries, device=device)[None, :, None]
    kv = torch.arange(num_keys, device=device)[None, None, :]
    return mask_mod(b, 0, q, kv)[:, None]
