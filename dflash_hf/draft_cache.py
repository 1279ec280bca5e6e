"""The drafter's key-value cache: context rows only, in buffers that grow by doubling."""

from __future__ import annotations

import torch


class DraftCache:
    """Keys and values of the context, a pair of buffers a layer.

    `update` returns views, so that a round writes its rows once and copies nothing else; `crop` only moves a counter.
    Sliding layers keep all rows (their mask limits what is seen), because a rejected block must be undone.

    Args:
        num_layers: number of draft layers.
    """

    def __init__(self, num_layers: int):
        self._buffers: list[torch.Tensor | None] = [None] * num_layers
        self._lengths = [0] * num_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows held by a layer."""
        return self._lengths[layer_idx]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `keys`, `values` `[b, kv_heads, n, head_dim]`; returns views of all rows, `n` being the length."""
        start = self._lengths[layer_idx]
        end = start + keys.shape[2]
        buffer = self._buffers[layer_idx]
        if buffer is None or end > buffer.shape[3]:
            buffer = self._grow(layer_idx, keys, end)
        buffer[0, :, :, start:end] = keys
        buffer[1, :, :, start:end] = values
        self._lengths[layer_idx] = end
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def _grow(self, layer_idx: int, keys: torch.Tensor, needed: int) -> torch.Tensor:
        batch, heads, _, dim = keys.shape
        buffer = keys.new_empty((2, batch, heads, max(256, 2 * needed), dim))
        old, length = self._buffers[layer_idx], self._lengths[layer_idx]
        if old is not None:
            buffer[:, :, :, :length] = old[:, :, :, :length]
        self._buffers[layer_idx] = buffer
        return buffer

    def crop(self, length: int) -> None:
        """Forget all rows from `length` on, in every layer."""
        self._lengths = [min(length, held) for held in self._lengths]
