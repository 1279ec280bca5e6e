"""Undo rejected tokens in a target's cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ..errors import UnsupportedGenerationError
from ..transfers import on_device

# Layers whose rows can be moved apart from each other.
_MOVABLE = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)


class Rollback:
    """Takes a target's cache back to the tokens that were accepted.

    Attention layers are cropped. Layers that cannot be (a recurrent state, a quantised layer, a static layer that rolls
    over) are put back to the state before the verification, and the accepted tokens are run again, together with the
    next verification.

    Args:
        cache: the target's, after the prefill (which may drop its own tail: sliding layers keep what a rollback needs
            from now on).

    Raises:
        UnsupportedGenerationError: if the target keeps its state elsewhere.

    Attributes:
        replays: whether a rejection makes accepted tokens run again.
        movable: whether rows may keep different numbers of tokens.
        rows_may_leave: whether rows may be taken out of the cache.
    """

    def __init__(self, cache: Any):
        layers = [layer for layer in getattr(cache, "layers", []) if not _is_empty(layer)]
        self.cache = cache
        self._stateful = [layer for layer in layers if not getattr(layer, "is_croppable", False)]
        self._croppable = [layer for layer in layers if getattr(layer, "is_croppable", False)]
        if not layers or any(type(layer) is StaticLayer for layer in self._stateful):
            raise UnsupportedGenerationError(
                f"The target's {type(cache).__name__} cannot forget rejected tokens: it has no layers to look into, or "
                "is static, before transformers 5.24. Use the default dynamic cache, or generate without "
                "assistant_model."
            )
        self._recording = [
            layer for layer in self._croppable if hasattr(layer, "record_past") and not layer.record_past
        ]
        for layer in self._recording:
            layer.activate_past_recording()
        # MiniMax keeps its states in the cache itself, beside the layers.
        self._own_state = any(_holds_tensors(value) for name, value in vars(cache).items() if name != "layers")
        self.replays = bool(self._stateful) or self._own_state
        self.movable = not self.replays and all(type(layer) in _MOVABLE for layer in layers)
        self.rows_may_leave = self.movable and not any(type(layer) is StaticLayer for layer in layers)
        self._layers = layers
        self._saved: list[dict[str, Any]] = []
        self._saved_cache: dict[str, Any] = {}

    def finish(self) -> None:
        """The caller's sliding layers drop again what is behind their window."""
        for layer in self._recording:
            layer.record_past = False

    def remember(self) -> None:
        """Called before a verification with proposals."""
        if self.replays:
            self._saved = [_snapshot(layer) for layer in self._stateful]
            self._saved_cache = {name: _copy(value) for name, value in vars(self.cache).items() if name != "layers"}

    def keep(self, *, ran: int, kept: int) -> int:
        """Keep the first `kept` of the `ran` newest tokens of every row; returns how many must be run again.

        Called with all of them too: a sliding layer that recorded its past shrinks when it is cropped.
        """
        undo = self.replays and kept < ran
        for layer in self._croppable:
            layer.crop(-ran if undo else kept - ran)
        if undo:
            for layer, saved in zip(self._stateful, self._saved):
                vars(layer).update(saved)
            vars(self.cache).update(self._saved_cache)
        self._saved, self._saved_cache = [], {}
        return kept if undo else 0

    def move(self, *, offsets: list[int], total: int, rows: list[int] | None = None) -> None:
        """Let column j of each row hold what its column `j + offset` held.

        Args:
            offsets: one a row; columns that come from outside are filled with something finite, to be masked.
            total: columns afterwards.
            rows: those that stay, as indices into the cache's rows; None for all of them. `offsets` are theirs.
        """
        picks: dict[tuple, _Pick] = {}  # layers of one kind share their indices
        for layer in self._layers:
            static = type(layer) is StaticLayer
            held, keep = layer.keys.shape[-2], total
            end = held if static else layer.get_seq_length()
            if isinstance(layer, DynamicSlidingWindowLayer):
                keep = min(total, layer.sliding_window - 1)
            key = (layer.keys.device, held, keep)
            if key not in picks:
                starts = [total - keep + offset - (end - held) for offset in offsets]
                picks[key] = _Pick(starts, keep, held=held, rows=rows, device=layer.keys.device)
            pick = picks[key]
            if static:
                if any(offsets):
                    for states in (layer.keys, layer.values):
                        states[:, :, :total] = pick(states).clone()  # source and destination overlap
                layer.cumulative_length.fill_(total)
                continue
            layer.keys, layer.values = pick(layer.keys), pick(layer.values)
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = total


class _Pick:
    """Takes `count` columns from `starts[i]` on of each row: `[b, h, n, d]` -> `[len(starts), h, count, d]`."""

    def __init__(self, starts: list[int], count: int, *, held: int, rows: list[int] | None, device: torch.device):
        self.start = starts[0]
        self.count = count
        self.aligned = min(starts) == max(starts) and self.start >= 0 and self.start + count <= held
        self.rows = None if rows is None else on_device(rows, device)
        if not self.aligned:
            which = torch.arange(len(starts), device=device) if rows is None else self.rows
            columns = on_device(starts, device)[:, None] + torch.arange(count, device=device)
            self.index = which[:, None], columns.clamp(0, held - 1)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.aligned:
            states = states[:, :, self.start : self.start + self.count]
            return states if self.rows is None else states[self.rows]
        rows, columns = self.index
        return states[rows, :, columns].transpose(1, 2)


def _is_empty(layer: Any) -> bool:
    """A layer without a cache of its own: one that shares another's, or none at all."""
    return type(layer).__name__ == "DummyLayer" or (
        isinstance(layer, DynamicLayer) and not hasattr(layer, "conv_states") and not layer.is_initialized
    )


def _snapshot(layer: Any) -> dict[str, Any]:
    # A dynamic layer replaces its keys and values and never writes into them; a static one writes new tokens over
    # rejected ones. Other states are written in place.
    rolls_over = isinstance(layer, StaticLayer) and layer.is_sliding
    shared = ("keys", "values") if isinstance(layer, (DynamicLayer, StaticLayer)) and not rolls_over else ()
    return {name: value if name in shared else _copy(value) for name, value in vars(layer).items()}


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, torch.Tensor) for item in values)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value
