"""The drafter's key-value cache: context rows only, in buffers that grow by doubling."""

from __future__ import annotations

import torch


class DraftCache:
    """Keys and values of the context, a pair of buffers a layer.

    `update` returns views, so that a round writes its rows once and copies nothing else; `crop` only moves a counter.
    Sliding layers keep all rows (their mask limits what is seen), because a rejected block must be undone.

    Sequences of a batch may have contexts of different length: `place` says where each one's next rows go. Every
    context starts at column 0, so nothing ever has to be moved.

    Args:
        num_layers: number of draft layers.

    Attributes:
        window: context rows that a block sees, the newest ones; None for all. Keys carry their absolute positions, so
            rows out of the window are just left out.
        row_ends: `[b]` after `place`: the columns of each sequence that hold something after the coming update; None
            while all sequences have the same length.
    """

    def __init__(self, num_layers: int):
        self._buffers: list[torch.Tensor | None] = [None] * num_layers
        self._lengths = [0] * num_layers
        self._columns: torch.Tensor | None = None
        self._end = 0
        self.row_ends: torch.Tensor | None = None
        self.window: int | None = None
        self._first = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held by a layer."""
        return self._lengths[layer_idx]

    def place(self, columns: torch.LongTensor, *, row_ends: torch.LongTensor, end: int, first: int = 0) -> None:
        """Say where the rows of the coming update of each layer go.

        Args:
            columns: `[b, n]`; `end` is a place for rows that nobody may see.
            row_ends: `[b]`, see above.
            end: the largest of `row_ends`.
            first: no sequence sees columns before it; what `update` returns and `row_ends` count from it.
        """
        self._columns, self.row_ends, self._end, self._first = columns, row_ends - first, end, first

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *, block_length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows and return views of all that may be seen, `n` being their number.

        Args:
            keys, values: `[b, kv_heads, n, head_dim]`.
            layer_idx: of the draft layer.
            block_length: how many of the new rows are the block, which sees `window` rows before it.
        """
        start = self._lengths[layer_idx]
        end = start + keys.shape[2] if self._columns is None else self._end
        buffer = self._buffers[layer_idx]
        if buffer is None or end >= buffer.shape[3]:
            buffer = self._grow(layer_idx, keys, end + 1)
        if self._columns is None:
            buffer[0, :, :, start:end] = keys
            buffer[1, :, :, start:end] = values
        else:
            rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
            # Under autocast keys and values differ in dtype; the plain assignment above casts by itself.
            buffer[0, rows, :, self._columns] = keys.transpose(1, 2).to(buffer.dtype)
            buffer[1, rows, :, self._columns] = values.transpose(1, 2).to(buffer.dtype)
        self._lengths[layer_idx] = end
        first = 0
        if self._columns is not None:
            first = self._first
        elif self.window is not None and block_length is not None:
            first = max(end - block_length - self.window, 0)
        return buffer[0, :, :, first:end], buffer[1, :, :, first:end]

    def _grow(self, layer_idx: int, keys: torch.Tensor, needed: int) -> torch.Tensor:
        batch, heads, _, dim = keys.shape
        # Zeros: rows that a mask hides must still be finite.
        buffer = keys.new_zeros((2, batch, heads, max(256, 2 * needed), dim))
        old, length = self._buffers[layer_idx], self._lengths[layer_idx]
        if old is not None:
            buffer[:, :, :, :length] = old[:, :, :, :length]
        self._buffers[layer_idx] = buffer
        return buffer

    def crop(self, length: int) -> None:
        """Forget all rows from column `length` on, in every layer."""
        self._lengths = [min(length, held) for held in self._lengths]

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether rows of a drafter with this parameter can be added: its device and dtype, outside inference mode."""
        return all(
            buffer is None
            or (
                buffer.device == parameter.device
                and buffer.dtype == parameter.dtype
                and (torch.is_inference_mode_enabled() or not buffer.is_inference())
            )
            for buffer in self._buffers
        )

    def select(self, rows: torch.LongTensor, *, length: int) -> None:
        """Keep only some sequences of the batch, the longest of which has `length` rows."""
        self._buffers = [None if buffer is None else buffer[:, rows] for buffer in self._buffers]
        self.crop(length)
        if len(rows) == 1:  # its rows follow each other again
            self._columns = self.row_ends = None
            self._first = 0
