"""The drafter's context, kept with the target's cache from one call to the next.

A cache that `generate` returns, or that its caller handed in, may come back in a later turn with new tokens only. The
target does not run on the old ones again, so the drafter could not see them: what it had made of them stays with the
cache, through `copy.deepcopy` too.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from ..draft_cache import DraftCache
from ..modeling_dflash import DFlashDraftModel

_NAME = "_dflash_context"


class KeptContext:
    """What a drafter knows of the tokens in a target's cache.

    Args:
        drafter: whose context it is.
        cache: its keys and values.
        lengths: rows of each sequence in it.
        columns: of the target's cache.
    """

    def __init__(self, drafter: DFlashDraftModel, *, cache: DraftCache, lengths: list[int], columns: int):
        self.drafter = weakref.ref(drafter)
        self.cache, self.lengths, self.columns = cache, lengths, columns

    def __deepcopy__(self, memo: dict) -> KeptContext:
        other = object.__new__(KeptContext)
        vars(other).update(vars(self), cache=copy.deepcopy(self.cache, memo), lengths=list(self.lengths))
        return other

    def __reduce__(self):
        return (object, ())  # a cache that is written to disk goes without it


def keep(target_cache: Any, context: KeptContext) -> None:
    """Leave a context with the target's cache."""
    setattr(target_cache, _NAME, context)


def recall(target_cache: Any, drafter: DFlashDraftModel, *, batch_size: int) -> tuple[DraftCache | None, list[int]]:
    """Cache and lengths that this drafter left with a target's cache; None if they are not of what it holds now."""
    # Taken off the cache: a call that fails in the middle leaves it with tokens that the context does not hold.
    kept = vars(target_cache).pop(_NAME, None) if target_cache is not None else None
    nothing = None, [0] * batch_size
    if not isinstance(kept, KeptContext) or kept.drafter() is not drafter or len(kept.lengths) != batch_size:
        return nothing
    if not kept.cache.fits(drafter.norm.weight):
        return nothing
    # One transfer a call where the cache counts on the device.
    missing = kept.columns - int(target_cache.get_seq_length())
    if missing == 0:
        return kept.cache, kept.lengths
    if missing < 0 or batch_size > 1 or missing >= kept.lengths[0]:
        return nothing  # tokens that the drafter never saw, or rows of which it cannot be said what was cropped
    kept.cache.crop(kept.lengths[0] - missing)
    return kept.cache, [kept.lengths[0] - missing]
