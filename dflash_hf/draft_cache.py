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
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
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
        pair = self._buffers[layer_idx]
        if pair is None or end >= pair[0].shape[2]:
            pair = self._grow(layer_idx, keys, end + 1)
        if self._columns is None:
            for buffer, new in zip(pair, (keys, values)):
                buffer.narrow(2, start, end - start).copy_(new)
        else:
            rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
            for buffer, new in zip(pair, (keys, values)):
                # Under autocast keys and values differ in dtype; copy_ above casts by itself.
                buffer[rows, :, self._columns] = new.transpose(1, 2).to(buffer.dtype)
        self._lengths[layer_idx] = end
        first = 0
        if self._columns is not None:
            first = self._first
        elif self.window is not None and block_length is not None:
            first = max(end - block_length - self.window, 0)
        keys, values = pair
        return keys.narrow(2, first, end - first), values.narrow(2, first, end - first)

    def _grow(self, layer_idx: int, keys: torch.Tensor, needed: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, _, dim = keys.shape
        # Zeros: rows that a mask hides must still be finite.
        pair = tuple(keys.new_zeros((batch, heads, max(256, 2 * needed), dim)) for _ in range(2))
        length = self._lengths[layer_idx]
        for buffer, old in zip(pair, self._buffers[layer_idx] or ()):
            buffer[:, :, :length] = old[:, :, :length]
        self._buffers[layer_idx] = pair
        return pair

    def crop(self, length: int) -> None:
        """Forget all rows from column `length` on, in every layer."""
        self._lengths = [min(length, held) for held in self._lengths]

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether rows of a drafter with this parameter can be added: its device and dtype, outside inference mode."""
        return all(_takes(buffer, parameter) for pair in self._buffers if pair for buffer in pair)

    def select(self, rows: torch.LongTensor, *, length: int) -> None:
        """Keep only some sequences of the batch, the longest of which has `length` rows."""
        self._buffers = [pair and (pair[0][rows], pair[1][rows]) for pair in self._buffers]
        self.crop(length)
        if len(rows) == 1:  # its rows follow each other again
            self._columns = self.row_ends = None
            self._first = 0


class StaticDraftCache(DraftCache):
    """A draft cache with a fixed number of columns, all of which `update` returns; a mask of `row_ends` hides the rest.

    Where rows go is always said by `place`: nothing depends on a length of the host, so that a graph can use it.

    Args:
        num_layers: number of draft layers.
        batch_size: b.
        columns: of each sequence. One more is there for rows that nobody may see.
        buffers: keys and values `[b, columns + 1, kv_heads, head_dim]` of each layer; made at the first update if None.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        batch_size: int,
        columns: int,
        buffers: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ):
        super().__init__(num_layers)
        self.batch_size, self.columns = batch_size, columns
        self.buffers = [] if buffers is None else buffers

    def clear(self) -> None:
        """Forget what an earlier call left: what a mask hides must be finite, or it shows."""
        for pair in self.buffers:
            for buffer in pair:
                buffer.zero_()

    def place(self, columns: torch.LongTensor, *, row_ends: torch.LongTensor, end: int, first: int = 0) -> None:
        """As `DraftCache.place`, but all columns are returned, whatever `first` is."""
        super().place(columns, row_ends=row_ends, end=end)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *, block_length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put keys and values `[b, kv_heads, n, head_dim]` where `place` said, and return views of all columns.

        Args:
            keys, values: of the new rows.
            layer_idx: of the draft layer.
            block_length: not used; the mask knows where the block begins.

        Returns:
            two of `[b, kv_heads, columns + 1, head_dim]`.
        """
        if layer_idx == len(self.buffers):
            self.buffers.append((self._empty(keys), self._empty(keys)))
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        seen = []
        for buffer, new in zip(self.buffers[layer_idx], (keys, values)):
            buffer.index_put_((rows, self._columns), new.transpose(1, 2).to(buffer.dtype))
            seen.append(buffer.transpose(1, 2))
        return seen[0], seen[1]

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        buffer = states.new_zeros((batch, self.columns + 1, heads, dim))
        torch._dynamo.mark_static_address(buffer)  # a CUDA graph writes into it instead of into a copy
        return buffer

    def crop(self, length: int) -> None:
        """Nothing to do: what `place` does not count is hidden."""

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether rows of a drafter with this parameter can be added."""
        return all(_takes(buffer, parameter) for pair in self.buffers for buffer in pair)

    def load(self, cache: DraftCache, *, length: int) -> None:
        """Take over the first `length` columns of a cache of as many sequences, which has as many columns or more."""
        columns = torch.arange(length, device=cache._buffers[0][0].device).expand(self.batch_size, -1)
        self.place(columns, row_ends=columns[:, 0], end=length)
        for layer_idx, (keys, values) in enumerate(cache._buffers):
            self.update(keys[:, :, :length], values[:, :, :length], layer_idx)

    def as_dynamic(self, length: int) -> DraftCache:
        """A copy of the first `length` columns in a cache that grows."""
        cache = DraftCache(len(self.buffers))
        cache.window = self.window
        for layer_idx, pair in enumerate(self.buffers):
            keys, values = (buffer[:, :length].transpose(1, 2) for buffer in pair)
            cache.update(keys, values, layer_idx)
        return cache


def _takes(buffer: torch.Tensor, parameter: torch.Tensor) -> bool:
    usable = torch.is_inference_mode_enabled() or not buffer.is_inference()
    return usable and buffer.device == parameter.device and buffer.dtype == parameter.dtype
