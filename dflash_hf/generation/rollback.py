"""Undo rejected tokens in a target's cache."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedGenerationError


def prepare_for_rollback(cache: Any) -> None:
    """Let sliding layers keep what a rollback needs. Called after the prefill, which may drop its own tail.

    Raises:
        UnsupportedGenerationError: if the cache cannot be cropped.
    """
    croppable = getattr(cache, "is_croppable", hasattr(cache, "crop"))
    if not croppable:
        raise UnsupportedGenerationError(
            f"The target's {type(cache).__name__} cannot forget rejected tokens (it holds a recurrent state, a "
            "quantised layer or a static layer: sliding ones, before transformers 5.24 all). Use the default dynamic "
            "cache, a target whose cache can be cropped, or generate "
            "without assistant_model."
        )
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


def forget(cache: Any, count: int) -> None:
    """Remove the newest `count` rows. Called with 0 too: a sliding layer that recorded its past shrinks on `crop`."""
    cache.crop(-count)
