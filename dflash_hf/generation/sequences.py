"""The token ids of a call: prompts and generated tokens of all rows, each row with a length of its own."""

from __future__ import annotations

import torch

from ..transfers import on_device


class Sequences:
    """Ids in a buffer that grows by doubling.

    A row's columns are those of plain generation: its prompt with the padding it came with, then its tokens.

    Args:
        input_ids: `[b, L]` prompts.
        room: tokens after the prompt that there is room for at first.

    Attributes:
        lengths: of each row, prompt included.
        tokens: the ids of each row on the host, up to `lengths` and possibly more.
    """

    def __init__(self, input_ids: torch.LongTensor, *, room: int):
        self.batch_size, self.prompt_length = input_ids.shape
        self.lengths = [self.prompt_length] * self.batch_size
        self.tokens: list[list[int]] = input_ids.tolist()
        self.ids = torch.cat([input_ids, input_ids.new_zeros((self.batch_size, room))], dim=1)
        self._views = self.ids.split(1)
        self._proposed_to: int | None = None

    def prefix(self, row: int) -> torch.LongTensor:
        """All ids `[1, n]` of a row so far."""
        return self.ids[row : row + 1, : self.lengths[row]]

    def aligned(self) -> torch.LongTensor:
        """Ids `[b, n]` of all rows, which have the same length."""
        return self.ids[:, : self.lengths[0]]

    def reserve(self, count: int) -> None:
        """Make room for `count` more tokens in every row."""
        if max(self.lengths) + count > self.ids.shape[1]:
            self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)], dim=1)
            self._views = self.ids.split(1)

    def window(self, rows: list[int], starts: list[int], count: int) -> torch.LongTensor:
        """`count` ids from column `starts[i]` on of each row `rows[i]`: `[len(rows), count]`."""
        if len(rows) == 1:
            return self._views[rows[0]].narrow(1, starts[0], count)
        if len(rows) == self.batch_size and min(starts) == max(starts):
            return self.ids.narrow(1, starts[0], count)
        device = self.ids.device
        columns = on_device(starts, device)[:, None] + torch.arange(count, device=device)
        return self.ids[on_device(rows, device)[:, None], columns]

    def followed_by(self, proposals: torch.LongTensor, *, rows: list[int], starts: list[int]) -> torch.LongTensor:
        """The ids of each row from column `starts[i]` to its newest one, then `proposals [len(rows), k]`.

        There must be room for them (`reserve`): those of a single row are left after its newest token, so that `write`
        need not copy the accepted ones.
        """
        row, start = rows[0], starts[0]
        length, count = self.lengths[row], proposals.shape[1]
        self._proposed_to = None
        if len(rows) > 1:
            return torch.cat([self.window(rows, starts, length - start), proposals], dim=1)
        if count:
            self._views[row].narrow(1, length, count).copy_(proposals)
            self._proposed_to = row
        return self._views[row].narrow(1, start, length + count - start)

    def write(self, rows: list[int], tokens: list[list[int]]) -> None:
        """Put `tokens[i]` after the newest one of each row `rows[i]`, without counting them yet.

        After `followed_by` all but the last of a row's tokens are its proposals.
        """
        for row, new in zip(rows, tokens):
            self.tokens[row][self.lengths[row] :] = new
        device, count = self.ids.device, max(map(len, tokens))
        if len(rows) == 1:
            (row,), (new,) = rows, tokens
            start = self.lengths[row]
            if count == 1 or self._proposed_to == row:
                self._views[row].narrow(1, start + count - 1, 1).fill_(new[-1])
            else:
                self._views[row].narrow(1, start, count).copy_(on_device([new], device))
            return
        # One copy to the device for all rows. What pads a shorter one is not counted later on either.
        values = [[row, self.lengths[row], *new, *[0] * (count - len(new))] for row, new in zip(rows, tokens)]
        values = on_device(values, device)
        self.ids[values[:, :1], values[:, 1:2] + torch.arange(count, device=device)] = values[:, 2:]

    def result(self, pad_token: int | None) -> torch.LongTensor:
        """Ids `[b, n]`, n being the longest row's length; shorter rows are padded on the right."""
        longest = max(self.lengths)
        ids = self.ids[:, :longest]
        if min(self.lengths) == longest:
            return ids
        ends = on_device(self.lengths, ids.device)[:, None]
        past_end = torch.arange(longest, device=ids.device) >= ends
        return ids.masked_fill(past_end, pad_token)
