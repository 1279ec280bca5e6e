"""Attention of many blocks over one context, a group of neighbouring blocks at a time.

Blocks are sorted by their anchors, so a group's blocks see nearly the same context rows: keys outside their common
range, and other groups' slots, are never scored. A row of n tokens and N blocks of B slots costs N * B * (n / 2 + B)
scores instead of N * B * (n + N * B), and only one group's scores exist at once. Registered with transformers'
`AttentionInterface` as `IMPLEMENTATION`; it takes a `BlockLayout` as its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from ..errors import DFlashError

IMPLEMENTATION = "dflash_blocks"

# Slots that are scored together: enough for efficient matrix products, few enough that their anchors lie close.
GROUP_SLOTS = 128


@dataclass(frozen=True)
class BlockGroup:
    """Blocks `start` to `end` (exclusive) and the context rows `low` to `high` (exclusive) that any of them sees.

    Attributes:
        hidden: bool `[b, 1, 1, g, B or 1, high - low]`, True where a row is not seen; the slots of a block share a row
            of it where no window tells them apart.
    """

    start: int
    end: int
    low: int
    high: int
    hidden: torch.Tensor


@dataclass(frozen=True)
class BlockLayout:
    """A mask rule cut into groups of blocks.

    Attributes:
        context_length: S.
        block_size: B.
        groups: in the order of the blocks, all of them.
        own_hidden: bool `[b, 1, 1, N, B, B]`, True where a slot of the same block is not seen; None if all are.
    """

    context_length: int
    block_size: int
    groups: tuple[BlockGroup, ...]
    own_hidden: torch.Tensor | None


def lay_out_blocks(
    *,
    mask_mod: Callable,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    context_length: int,
    block_size: int,
    sliding_window: int | None,
    document_starts: torch.Tensor | None = None,
    group_slots: int = GROUP_SLOTS,
) -> BlockLayout:
    """Cut the rule of `make_mask_mod` into groups; for all layers that share the rule.

    The sizes of the groups follow from the anchors' values, so on a GPU this waits for the device; flex attention is
    the choice there.

    Args:
        mask_mod: the rule.
        anchors, keep: `[b, N]`; kept anchors sorted.
        context_length: S.
        block_size: B.
        sliding_window: W of the rule, which bounds the rows that a block sees from below.
        document_starts: `[b, N]`, first row of each anchor's document; 0 by default.
        group_slots: slots in a group, about.
    """
    device = anchors.device
    batch, count = anchors.shape
    first = torch.zeros_like(anchors) if document_starts is None else document_starts
    if sliding_window is not None:  # one row more than the rule lets through, which the rule then hides
        first = torch.maximum(first, anchors - sliding_window)
    lows = torch.where(keep, first, context_length).amin(dim=0).tolist()
    highs = torch.where(keep, anchors, 0).amax(dim=0).tolist()
    rows = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    slots = torch.arange(1 if sliding_window is None else block_size, device=device).view(1, 1, -1, 1)
    size = max(1, group_slots // block_size)
    groups = []
    for start in range(0, count, size):
        end = min(count, start + size)
        high = max(highs[start:end])
        low = min(*lows[start:end], high)
        blocks = torch.arange(start, end, device=device).view(1, -1, 1, 1)
        keys = torch.arange(low, high, device=device).view(1, 1, 1, -1)
        hidden = ~mask_mod(rows, 0, blocks * block_size + slots, keys)
        groups.append(BlockGroup(start, end, low, high, hidden[:, None, None]))
    own = torch.arange(block_size, device=device)
    blocks = torch.arange(count, device=device).view(1, -1, 1, 1) * block_size
    own_hidden = ~mask_mod(rows, 0, blocks + own.view(-1, 1), context_length + blocks + own)
    return BlockLayout(
        context_length=context_length,
        block_size=block_size,
        groups=tuple(groups),
        own_hidden=own_hidden[:, None, None] if own_hidden.any() else None,
    )


class _BlockAttention(torch.autograd.Function):
    """Softmax over a group's context rows and each block's own slots at once; backward recomputes the probabilities.

    The log of the softmax denominator is kept, as in FlashAttention-2 (arXiv 2307.08691), section 3.1. Heads that share
    keys are folded into the rows of one product. Shapes: b rows, k key-value heads, r query heads for each, g blocks
    of a group, B slots, d head size.
    """

    @staticmethod
    def forward(ctx, queries, keys, values, layout: BlockLayout, scaling: float):
        blocks = _Blocks(queries, keys, layout, scaling)
        output = torch.empty_like(blocks.queries)  # [b, k, r, N, B, d]
        log_sums = torch.empty(output.shape[:-1], dtype=blocks.exact, device=output.device)
        own_values = blocks.own(values)
        for group in layout.groups:
            part = slice(group.start, group.end)
            context, own = blocks.scores(keys, group)
            highest = own.amax(dim=-1)
            if group.high > group.low:
                highest = torch.maximum(highest, context.amax(dim=-1))
            context = context.sub_(highest[..., None]).exp_()
            own = own.sub_(highest[..., None]).exp_()
            total = context.sum(dim=-1) + own.sum(dim=-1)
            mixed = _rows(context.to(values.dtype)) @ values[:, :, group.low : group.high]
            mixed = mixed.view(*context.shape[:-1], -1) + _by_block(own.to(values.dtype), own_values[:, :, part])
            output[:, :, :, part] = mixed / total[..., None]
            log_sums[:, :, :, part] = highest + total.log()
        ctx.save_for_backward(queries, keys, values, output, log_sums)
        ctx.layout, ctx.scaling = layout, scaling
        return output.view_as(queries)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        queries, keys, values, output, log_sums = ctx.saved_tensors
        layout = ctx.layout
        blocks = _Blocks(queries, keys, layout, ctx.scaling)
        gradient = gradient.reshape(output.shape)
        mean = (gradient.to(blocks.exact) * output).sum(dim=-1)  # [b, k, r, N, B]
        query_gradient = torch.empty_like(output)
        key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)
        own_keys, own_values = blocks.own(keys), blocks.own(values)
        own_key_gradient, own_value_gradient = blocks.own(key_gradient), blocks.own(value_gradient)
        for group in layout.groups:
            part, rows = slice(group.start, group.end), slice(group.low, group.high)
            up = gradient[:, :, :, part]
            context, own = blocks.scores(keys, group)
            log_sum, average = log_sums[:, :, :, part, :, None], mean[:, :, :, part, :, None]
            context, own = context.sub_(log_sum).exp_(), own.sub_(log_sum).exp_()
            value_gradient[:, :, rows] += _rows(context.to(values.dtype)).mT @ _rows(up)
            own_value_gradient[:, :, part] = _transposed_by_block(own.to(values.dtype), up)
            context = context * ((_rows(up) @ values[:, :, rows].mT).view_as(context) - average)
            own = own * (_by_block(up, own_values[:, :, part].mT) - average)
            context, own = context.to(keys.dtype), own.to(keys.dtype)
            scaled = blocks.queries[:, :, :, part] * ctx.scaling
            key_gradient[:, :, rows] += _rows(context).mT @ _rows(scaled)
            own_key_gradient[:, :, part] = _transposed_by_block(own, scaled)
            through = (_rows(context) @ keys[:, :, rows]).view(*context.shape[:-1], -1)
            query_gradient[:, :, :, part] = (through + _by_block(own, own_keys[:, :, part])) * ctx.scaling
        return query_gradient.view_as(queries), key_gradient, value_gradient, None, None


class _Blocks:
    """Views of queries, and of the slots' own rows of keys or values, by block."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor, layout: BlockLayout, scaling: float):
        self.layout, self.scaling = layout, scaling
        heads, size = keys.shape[1], layout.block_size
        self.queries = queries.contiguous().unflatten(2, (-1, size)).unflatten(1, (heads, -1))  # [b, k, r, N, B, d]
        self.exact = torch.promote_types(queries.dtype, torch.float32)

    def own(self, states: torch.Tensor) -> torch.Tensor:
        """`[b, k, N, B, d]` view of the slots' rows of `states [b, k, S + N * B, d]`."""
        return states[:, :, self.layout.context_length :].unflatten(2, (-1, self.layout.block_size))

    def scores(self, keys: torch.Tensor, group: BlockGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Masked scores of a group: over its context `[b, k, r, g, B, rows]` and its own slots `[b, k, r, g, B, B]`."""
        part = slice(group.start, group.end)
        queries = self.queries[:, :, :, part] * self.scaling
        context = _rows(queries) @ keys[:, :, group.low : group.high].mT
        context = context.view(*queries.shape[:-1], -1).to(self.exact).masked_fill_(group.hidden, float("-inf"))
        own = _by_block(queries, self.own(keys)[:, :, part].mT).to(self.exact)
        if self.layout.own_hidden is not None:
            own = own.masked_fill(self.layout.own_hidden[:, :, :, part], float("-inf"))
        return context, own


def _rows(states: torch.Tensor) -> torch.Tensor:
    """`[b, k, r, g, B, x]` -> `[b, k, r * g * B, x]`."""
    return states.flatten(2, 4)


def _by_block(states: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Each block's rows times its own matrix: `[b, k, r, g, B, x] @ [b, k, g, x, y] -> [b, k, r, g, B, y]`."""
    repeats = states.shape[2]
    product = states.transpose(2, 3).flatten(3, 4) @ own
    return product.unflatten(3, (repeats, -1)).transpose(2, 3)


def _transposed_by_block(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """`[b, k, r, g, B, x]`, `[b, k, r, g, B, y]` -> `[b, k, g, x, y]`, summed over a block's rows and heads."""
    return states.transpose(2, 3).flatten(3, 4).mT @ others.transpose(2, 3).flatten(3, 4)


def block_attention(
    *, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: BlockLayout, scaling: float
) -> torch.Tensor:
    """Attention of all blocks of a row.

    Args:
        queries: `[b, h, N * B, d]`.
        keys, values: `[b, k, S + N * B, d]`; h is a multiple of k.
        layout: of `lay_out_blocks`.
        scaling: of the scores.

    Returns:
        `[b, h, N * B, d]`, in the queries' dtype (under autocast in autocast's).
    """
    kind = queries.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    return _BlockAttention.apply(queries, keys, values, layout, scaling)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
) -> tuple[torch.Tensor, None]:
    """`block_attention` in the signature of transformers' attention functions; the layout holds the mask."""
    if not isinstance(attention_mask, BlockLayout):
        raise DFlashError(
            f"attn_implementation {IMPLEMENTATION!r} is for DFlashTrainer's blocks. Give DFlashTrainingArguments this "
            "name, and load the drafter with 'sdpa'."
        )
    if dropout:
        raise DFlashError(f"attn_implementation {IMPLEMENTATION!r} has no dropout, got {dropout}. Use 'sdpa'.")
    output = block_attention(queries=query, keys=key, values=value, layout=attention_mask, scaling=scaling)
    return output.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
