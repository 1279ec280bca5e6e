"""Attention masks of a draft forward pass. The rule for training blocks is in `training/masks.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import DFlashError


def block_visibility(
    *,
    block_length: int,
    num_keys: int,
    is_causal: bool,
    sliding_window: int | None,
    padding_mask: torch.Tensor | None,
    device: torch.device,
    row_ends: torch.LongTensor | None = None,
    window_rule: str = "query",
    context_window: int | None = None,
) -> torch.Tensor | None:
    """Which keys each slot of a block sees. The block's own keys are the last `block_length` ones.

    Args:
        block_length: B.
        num_keys: L, context rows and block together; the rows are contiguous and end with the block.
        is_causal: attention inside the block.
        sliding_window: W.
        padding_mask: `[b, L]`, non-zero is visible.
        row_ends: `[b]`, the number of keys of each sequence where they differ; its block is at their end.
        window_rule: `query`: a key is visible if `q - k < W`, and if not causal also `k - q < W`. `anchor`: every slot
            sees the W context rows before the block, and the window does not limit the block.
        context_window: with `row_ends`, the newest context rows that each block sees; None for all.

    Returns:
        Boolean `[b or 1, 1, B, L]`, True is visible; None if everything is.
    """
    window_bites = sliding_window is not None and sliding_window < num_keys
    if not is_causal and not window_bites and padding_mask is None and row_ends is None:
        return None
    ends = torch.tensor([num_keys], device=device) if row_ends is None else row_ends
    block_starts = ends[:, None, None] - block_length
    query = block_starts + torch.arange(block_length, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, None, :]
    visible = key <= query if is_causal else (key < ends[:, None, None]).expand(-1, block_length, -1)
    if window_bites and window_rule == "anchor":
        visible = visible & (key >= block_starts - sliding_window)
    elif window_bites:
        visible = visible & (query - key < sliding_window)
        if not is_causal:
            visible = visible & (key - query < sliding_window)
    if row_ends is not None and context_window is not None:
        visible = visible & (key >= block_starts - context_window)
    visible = visible[:, None]
    if padding_mask is not None:
        visible = visible & padding_mask[:, None, None, :].bool()
    return visible


def to_additive(visible: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask (True is visible) as numbers to add to attention scores: 0 and the dtype's minimum."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


@dataclass(frozen=True)
class LayerMasks:
    """Masks with the attention implementation that reads them; given as a forward pass's `attention_mask`.

    The pair belongs to one forward pass, so a drafter that is trained with one implementation generates with its own.

    Attributes:
        by_layer_type: layer type -> mask.
        implementation: a name registered with transformers' `AttentionInterface`.
    """

    by_layer_type: dict[str, Any]
    implementation: str


class BlockMasks:
    """The attention mask of each draft layer, built once for all layers that share one.

    Args:
        attention_mask: what the caller of `DFlashDraftModel.forward` gave.
        block: `[b, B, H]`, the slots; their number, dtype and device count.
        total_length: context rows seen so far (cached ones included) plus B.
        implementation: transformers' name of the attention implementation.
        row_ends, context_window: see `block_visibility`.
    """

    def __init__(
        self,
        attention_mask: Any,
        *,
        block: torch.Tensor,
        total_length: int,
        implementation: str,
        row_ends: torch.LongTensor | None = None,
        context_window: int | None = None,
    ):
        if isinstance(attention_mask, LayerMasks):
            attention_mask, implementation = attention_mask.by_layer_type, attention_mask.implementation
        self.given = attention_mask
        self.block = block
        self.total_length = total_length
        self.implementation = implementation or "eager"
        self.row_ends = row_ends
        self.context_window = context_window
        if row_ends is not None and "flash" in self.implementation:
            self.implementation = "sdpa"  # flash kernels take no mask, and keys of different number need one
        self._built: dict[tuple, torch.Tensor | None] = {}

    def of_layer(self, layer: nn.Module, *, num_keys: int) -> Any:
        """Mask for this layer's attention call, in the form that the attention implementation takes."""
        given = self.given
        if isinstance(given, dict):
            given = given[self.layer_type(layer)]
        if given is not None and (not isinstance(given, torch.Tensor) or given.dim() == 4):
            return self._as_implementation_takes_it(self._of_keys(given, num_keys))
        if "flash" in self.implementation:  # takes causality, window and the 2-D padding mask by themselves
            if layer.sliding_window is not None and layer.window_rule != "query":
                raise DFlashError(
                    f"attn_implementation {self.implementation!r} counts a sliding window from each query; this "
                    "drafter counts it from the anchor. Use 'sdpa' or 'eager'."
                )
            return self._of_keys(given, num_keys)
        key = (layer.is_causal, layer.sliding_window, num_keys)
        if key not in self._built:
            visible = block_visibility(
                block_length=self.block.shape[1],
                num_keys=num_keys,
                is_causal=layer.is_causal,
                sliding_window=layer.sliding_window,
                padding_mask=None if given is None else given[:, self.total_length - num_keys : self.total_length],
                device=self.block.device,
                row_ends=self.row_ends,
                window_rule=layer.window_rule,
                context_window=self.context_window,
            )
            self._built[key] = None if visible is None else self._as_implementation_takes_it(visible)
        return self._built[key]

    def _of_keys(self, mask: Any, num_keys: int) -> Any:
        """The columns of the keys that a layer still has: sliding layers of transformers' caches drop old rows."""
        if isinstance(mask, torch.Tensor) and mask.shape[-1] == self.total_length:
            return mask[..., self.total_length - num_keys :]
        return mask

    def _as_implementation_takes_it(self, mask: Any) -> Any:
        if not isinstance(mask, torch.Tensor):
            return mask  # a BlockMask
        if "flash" in self.implementation:
            raise DFlashError(
                f"attn_implementation {self.implementation!r} takes no 4-D mask. Use 'sdpa', 'eager' or "
                "'flex_attention' for training."
            )
        if mask.dtype == torch.bool and self.implementation in ("eager", "flex_attention"):
            return to_additive(mask, dtype=self.block.dtype)  # these add a dense mask to the scores
        return mask

    @staticmethod
    def layer_type(layer: nn.Module) -> str:
        """The key of a per-layer-type mask dictionary."""
        return "full_attention" if layer.sliding_window is None else "sliding_attention"
