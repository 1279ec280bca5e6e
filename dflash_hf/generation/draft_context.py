"""`DraftContext`: the target's features of accepted positions, on their way into the drafter's cache and in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..compiled_draft import CompiledDraft
from ..draft_cache import DraftCache
from ..errors import DFlashConfigError
from ..modeling_dflash import DFlashDraftModel
from ..pretrained import CONTEXT_WINDOW
from ..transfers import on_device

# Rounds without a draft gather features; this many go into the cache at once.
_MOST_PENDING = 64


@dataclass
class Pending:
    """Features that are not in the drafter's cache yet, and where the next block begins.

    Attributes:
        features: `[b, n, K * H_t]`.
        positions: `[b, n]`; where rows are contiguous `[1, n + B]`, those of the next block included.
        counts: real features of each sequence.
        anchors: `[b, 1]` positions of the next blocks' first slots; None where rows are contiguous.
        real: `[b, n]`, which features those are; None for the first ones.
    """

    features: torch.Tensor
    positions: torch.LongTensor
    counts: list[int]
    anchors: torch.LongTensor | None = None
    real: torch.BoolTensor | None = None


class DraftContext:
    """What a drafter has seen of each sequence, and its forward pass after that.

    The cache holds keys and values of the context; those of a block are dropped after each draft.

    Args:
        drafter: the draft model. `dflash_context_window` on its `generation_config` limits the context rows that a
            block sees to the newest ones.
        batch_size: b, sequences; each has a context of its own length.
        block_size: B.
        cache: context keys and values of an earlier turn; new ones by default.
        lengths: context rows of each sequence in `cache`.

    Raises:
        DFlashConfigError: if `dflash_context_window` is below 1.

    Attributes:
        lengths: context rows of each sequence in the cache.
        pending: features that are not in it yet.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        *,
        batch_size: int,
        block_size: int,
        cache: DraftCache | None = None,
        lengths: list[int] | None = None,
    ):
        self.drafter, self.block_size = drafter, block_size
        self.device = drafter.norm.weight.device
        self.cache = drafter.new_cache() if cache is None else cache
        self.cache.window = _context_window(drafter)
        self.lengths = [0] * batch_size if lengths is None else list(lengths)
        self.pending: Pending | None = None
        self._graphs: CompiledDraft | None = None
        self._offsets = torch.arange(block_size, device=self.device)

    @property
    def contiguous(self) -> bool:
        """Whether new context rows simply follow those before them: of one sequence, where no graph takes them."""
        return len(self.lengths) == 1 and self._graphs is None

    def use_graphs(self, graphs: CompiledDraft, *, columns: int) -> None:
        """Run draft forward passes as graphs from now on; before any context is added.

        Args:
            graphs: of this drafter.
            columns: of the target's cache, the most that a sequence can have.
        """
        cache = graphs.take_cache(batch_size=len(self.lengths), columns=columns + self.block_size)
        cache.window = self.cache.window
        if any(self.lengths):
            cache.load(self.cache, length=max(self.lengths))
        self._graphs, self.cache = graphs, cache

    def finish(self) -> None:
        """Called once at the end."""
        if self._graphs is not None:
            self._graphs.give_back(self.cache)

    def to_keep(self) -> DraftCache:
        """Keys and values of the context, for a later call."""
        return self.cache if self._graphs is None else self.cache.as_dynamic(max(self.lengths))

    def add(
        self,
        features: torch.Tensor,
        position_ids: torch.LongTensor,
        *,
        real: torch.BoolTensor | None = None,
        counts: list[int] | None = None,
    ) -> None:
        """Take the features of positions that were accepted.

        Args:
            features: `[b, n, K * H_t]` raw concat.
            position_ids: `[b, n]`, absolute; of a single sequence may go on over the next block, `[1, n + B]`.
            real: `[b, n]`, which positions are to be taken; None for all of them.
            counts: instead of `real`, how many of each row, from its first one on.
        """
        position_ids = position_ids.to(self.device)
        if self.contiguous:
            if counts is not None and counts[0] < features.shape[1]:
                features, position_ids = features[:, : counts[0]], position_ids[:, : counts[0]]
            given = position_ids
            if real is not None:
                features, position_ids = (
                    features[:, real[0].to(features.device)],
                    position_ids[:, real[0].to(self.device)],
                )
            count = features.shape[1]
            if position_ids.shape[1] == count:
                newest = position_ids if count else given
                position_ids = self._with_block(position_ids, newest[:, -1:] + 1)
            self._take(Pending(features, position_ids, [count]))
            return
        of_a_round = counts is not None
        if of_a_round:
            anchors = position_ids[:, :1] + on_device(counts, self.device)[:, None]
        else:
            anchors = position_ids[:, -1:] + 1
            counts = [features.shape[1]] * len(features)
        if real is not None:
            real = real.to(self.device)
            newest = torch.where(real, position_ids, -1).amax(dim=1, keepdim=True) + 1
            anchors = torch.where(real.any(dim=1, keepdim=True), newest, anchors)
            counts = real.sum(dim=1).tolist()  # one transfer a call, of a batch's prompts
        new = Pending(features, position_ids, counts, anchors, real)
        if self._graphs is None:
            new.real = self._real(new)
            # What is hidden must be finite, or it shows.
            new.features = features.masked_fill(~new.real[..., None], 0)
            self._take(new)
            return
        # A graph takes what one round keeps, the first rows of each sequence. The rest goes into the cache as it is.
        self.flush()
        self.pending = new
        if not of_a_round or features.shape[1] > self.block_size:
            self.flush()

    def _real(self, new: Pending) -> torch.BoolTensor:
        """Which features `[b, n]` are real."""
        if new.real is not None:
            return new.real
        columns = torch.arange(new.features.shape[1], device=self.device)
        return columns < on_device(new.counts, self.device)[:, None]

    def _with_block(self, positions: torch.LongTensor, anchors: torch.LongTensor) -> torch.LongTensor:
        return torch.cat([positions, anchors + self._offsets], dim=1)

    def _take(self, new: Pending) -> None:
        """Keep features for the next draft, with those that rounds without a draft left here."""
        old = self.pending
        if old is not None and old.features.shape[1] + new.features.shape[1] > _MOST_PENDING:
            self.flush()
            old = None
        if old is not None:
            together = new.anchors is not None
            new = Pending(
                torch.cat([old.features, new.features], dim=1),
                torch.cat([old.positions[:, : old.features.shape[1]], new.positions], dim=1),
                [sum(both) for both in zip(old.counts, new.counts)],
                torch.maximum(old.anchors, new.anchors) if together else None,
                torch.cat([old.real, new.real], dim=1) if together else None,
            )
        self.pending = new

    def flush(self) -> None:
        """Bring what `add` took into the cache."""
        new = self.pending
        if new is None or not new.features.shape[1]:
            return
        if new.anchors is not None:
            self._place(new, block=False)
        positions = new.positions[:, : new.features.shape[1]]
        self.drafter.append_context(new.features, position_ids=positions, cache=self.cache)
        self.lengths = [length + count for length, count in zip(self.lengths, new.counts)]
        self.pending = None
        if self._graphs is not None:  # where the next block begins is still needed
            nothing = new.features[:, :0], new.positions[:, :0], [0] * len(self.lengths)
            self.pending = Pending(*nothing, new.anchors)

    def _place(self, new: Pending, *, block: bool) -> None:
        """Tell the cache where the rows of `new`, and of a block after them, go in each sequence."""
        ends = [length + count for length, count in zip(self.lengths, new.counts)]
        extra = self.block_size if block else 0
        end = max(ends) + extra
        starts = on_device([self.lengths, ends], self.device)[..., None]
        real = self._real(new)
        columns = torch.where(real, starts[0] + real.cumsum(dim=1) - 1, end)
        if block:
            columns = torch.cat([columns, starts[1] + self._offsets], dim=1)
        window = self.cache.window
        first = 0 if window is None or not block else max(min(ends) - window, 0)
        self.cache.place(columns, row_ends=starts[1, :, 0] + extra, end=end, first=first)

    def select(self, rows: list[int]) -> None:
        """Go on with some sequences only."""
        index = on_device(rows, self.device)
        new = self.pending
        if new is not None:
            features, positions, anchors, real = (
                tensor[index] for tensor in (new.features, new.positions, new.anchors, new.real)
            )
            if len(rows) == 1:
                features, positions = features[:, real[0]], self._with_block(positions[:, real[0]], anchors)
                anchors = real = None
            self.pending = Pending(features, positions, [new.counts[row] for row in rows], anchors, real)
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.select(index, length=max(self.lengths))

    def hidden_states(self, block: torch.Tensor) -> torch.Tensor:
        """Run the drafter on `block [b, B, H]` (embeddings) after all that was added; `[b, B, H]`."""
        new, positions = self.pending, self.pending.positions
        if self._graphs is not None:
            hidden = self._graphs(
                block, new.features, new.anchors, lengths=self.lengths, counts=new.counts, cache=self.cache
            )
        else:
            if new.anchors is not None:
                positions = self._with_block(positions, new.anchors)
                self._place(new, block=True)
            hidden = self.drafter(block, new.features, position_ids=positions, cache=self.cache).last_hidden_state
        self.lengths = [length + count for length, count in zip(self.lengths, new.counts)]
        self.pending = None
        self.cache.crop(max(self.lengths))
        return hidden


def _context_window(drafter: DFlashDraftModel) -> int | None:
    window = getattr(drafter.generation_config, CONTEXT_WINDOW, None)
    if window is not None and window < 1:
        raise DFlashConfigError(
            f"generation_config.{CONTEXT_WINDOW} is {window}; a block sees at least 1 context row. Set None for the "
            "whole context."
        )
    return window
