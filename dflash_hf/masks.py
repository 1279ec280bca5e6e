"""Attention masks inside a draft block at inference; pure functions. Training masks are in `training/masks.py`."""

from __future__ import annotations

import torch


def block_visibility(
    *,
    block_length: int,
    num_keys: int,
    is_causal: bool,
    sliding_window: int | None,
    padding_mask: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Which keys each slot of a block sees. The block's own keys are the last `block_length` ones.

    Args:
        block_length: B.
        num_keys: L, context rows and block together; the rows are contiguous and end with the block.
        is_causal: attention inside the block.
        sliding_window: W; a key is visible if `q - k < W`, and if not causal also `k - q < W`.
        padding_mask: `[b, L]`, non-zero is visible.

    Returns:
        Boolean `[b or 1, 1, B, L]`, True is visible; None if everything is.
    """
    window_bites = sliding_window is not None and sliding_window < num_keys
    if not is_causal and not window_bites and padding_mask is None:
        return None
    query = torch.arange(num_keys - block_length, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    visible = key <= query if is_causal else torch.ones_like(key <= query)
    if window_bites:
        visible = visible & (query - key < sliding_window)
        if not is_causal:
            visible = visible & (key - query < sliding_window)
    visible = visible[None, None]
    if padding_mask is not None:
        visible = visible & padding_mask[:, None, None, :].bool()
    return visible


def to_additive(visible: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask (True is visible) as numbers to add to attention scores: 0 and the dtype's minimum."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
