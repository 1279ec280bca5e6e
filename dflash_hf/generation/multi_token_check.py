"""Whether a target with a recurrent state gives for a block what it gives token by token.

Attention does by construction. Some implementations of recurrent layers do not: they start the scan of a block from an
empty state. Then a verification would be wrong without a sign of it.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ..errors import UnsupportedGenerationError
from .rollback import Rollback
from .target_forward import TargetForward

_CHECKED_TOKENS = 4
# Relative size of the difference in the logits. Rounding gives 4e-5 and less in fp32, an empty state 6e-3 and more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1

_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_multi_token_forward(
    target: nn.Module, forward: TargetForward, rollback: Rollback, *, batch_size: int, room: int
) -> None:
    """Run a few tokens after the prompt at once and one by one, and compare; once for each target.

    Args:
        forward: after the prefill; cache and positions are left as they were.
        batch_size: b.
        room: tokens that the cache has room for after the prompt.

    Raises:
        UnsupportedGenerationError: if the logits differ.
    """
    count = min(_CHECKED_TOKENS, room)
    if not rollback.replays or target in _CHECKED or count < 2:
        return
    # Any tokens do; a prompt may have none (embeddings).
    ids = torch.arange(count, device=forward.input_ids.device).expand(batch_size, -1)
    rollback.remember()
    at_once = forward.verify(ids, [0] * batch_size, logits=count).logits[:, -count:]
    rollback.keep(ran=count, kept=0)
    rollback.remember()
    steps = [forward.verify(ids[:, i : i + 1], [i] * batch_size, logits=1).logits[:, -1:] for i in range(count)]
    rollback.keep(ran=count, kept=0)
    one_by_one = torch.cat(steps, dim=1)
    difference = (at_once - one_by_one).float().norm() / one_by_one.float().norm()
    tolerance = _TOLERANCE.get(one_by_one.dtype, _LOW_PRECISION_TOLERANCE)
    if not bool(difference <= tolerance):
        raise UnsupportedGenerationError(
            f"{type(target).__name__} gives other logits for {count} tokens at once than one by one (relative "
            f"difference {float(difference):.2g}, limit {tolerance:g}): its recurrent layers do not go on from their "
            "state, so a block cannot be verified. Generate without assistant_model."
        )
    _CHECKED.add(target)
