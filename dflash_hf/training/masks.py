"""The attention mask of a training step: many blocks over one context. Pure; one rule for every attention path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask

from ..configuration_dflash import DFlashConfig
from ..masks import LayerMasks
from .attention import IMPLEMENTATION, lay_out_blocks

# Implementations that `training_masks` can serve.
IMPLEMENTATIONS = (IMPLEMENTATION, "flex_attention", "sdpa", "eager")

# Written out, a mask rule over 8,192 slots and 12,000 keys takes gigabytes on a GPU; compiled it is never written out.
_compiled_create_block_mask = torch.compile(create_block_mask)


def make_mask_mod(
    *,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    context_length: int,
    block_size: int,
    is_causal: bool,
    sliding_window: int | None,
    window_rule: str = "query",
    document_ids: torch.Tensor | None = None,
) -> Callable:
    """The rule "query q of row b sees key kv", in the signature that flex attention's `create_block_mask` takes.

    Keys are S context rows, then N * B block slots; queries are the N * B slots. Block n sees the context strictly
    before its anchor (the target has not run on the anchor yet) in the anchor's own document, and its own slots. A
    padding block sees itself only, since a fully masked row would be NaN.

    Args:
        anchors: `[b, N]`.
        keep: `[b, N]`, False on padding blocks.
        context_length: S.
        block_size: B.
        is_causal: attention inside the block.
        sliding_window: W, or None on full layers.
        window_rule: `query`: a key less than W positions away is visible, the query itself counts. `anchor`: every slot
            sees the W context rows before the anchor, and the window does not limit the block.
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
        if sliding_window is not None and window_rule == "anchor":
            sees_context = sees_context & (anchor - row <= sliding_window)
        elif sliding_window is not None:
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


def default_implementation(device: torch.device, *, attention_dropout: float = 0.0) -> str:
    """Flex attention on CUDA devices, the package's own block attention elsewhere; neither of them has dropout."""
    if attention_dropout:
        return "sdpa"
    return "flex_attention" if device.type == "cuda" else IMPLEMENTATION


def training_masks(
    *,
    config: DFlashConfig,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    context_length: int,
    implementation: str,
    document_ids: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
) -> LayerMasks:
    """The rule of `make_mask_mod` for each layer type of a drafter, in the form that `implementation` takes.

    Args:
        config: the drafter's.
        anchors, keep: `[b, N]`.
        context_length: S.
        implementation: one of `IMPLEMENTATIONS`.
        document_ids: `[b, S]`, for packed rows.
        document_starts: `[b, N]`, first row of each anchor's document, for packed rows.
    """
    batch_size, count = anchors.shape
    queries = count * config.block_size
    device = anchors.device
    by_layer_type = {}
    for layer_type in set(config.layer_types):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        shape = dict(anchors=anchors, keep=keep, context_length=context_length, block_size=config.block_size)
        mask_mod = make_mask_mod(
            **shape,
            is_causal=config.layer_is_causal(config.layer_types.index(layer_type)),
            sliding_window=window,
            window_rule=config.window_rule,
            document_ids=document_ids,
        )
        if implementation == IMPLEMENTATION:
            mask = lay_out_blocks(mask_mod=mask_mod, **shape, sliding_window=window, document_starts=document_starts)
        elif implementation == "flex_attention":
            create = _compiled_create_block_mask if device.type == "cuda" else create_block_mask
            mask = create(mask_mod, batch_size, None, queries, context_length + queries, device=device)
        else:
            size = dict(batch_size=batch_size, num_queries=queries, num_keys=context_length + queries)
            mask = dense_mask(mask_mod, **size, device=device)
        by_layer_type[layer_type] = mask
    return LayerMasks(by_layer_type, implementation)
