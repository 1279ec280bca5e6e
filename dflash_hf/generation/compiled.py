"""Verification by a compiled forward pass, over a static cache and in a few shapes only."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import CompileConfig, GenerationConfig

from ..compiled_target import CompiledForward, compiled_forward
from ..graphs import fixed_shapes
from ..target import FeatureCapture, position_limit

# A verification is padded to one of these row counts, so that graphs are few. What the padding leaves in the cache
# is cropped at once.
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)


class CompiledVerification:
    """Runs verifications of one call through the target's compiled function.

    Args:
        forward: from `compiled_forward`.
        capture: of the call.
        cache: a static one, of which every layer can be cropped, after the prefill.
        limit: positions of a learned table, or None.
        config: what it was compiled with.
    """

    def __init__(
        self,
        forward: CompiledForward,
        capture: FeatureCapture,
        cache: Any,
        limit: int | None,
        config: CompileConfig,
    ):
        self.forward, self.capture, self.cache, self.config = forward, capture, cache, config
        length = cache.get_max_length()
        # Columns after the prompt. One transfer a call: a static cache counts on its device.
        self._room = (length if limit is None else min(length, limit)) - int(cache.get_seq_length())

    def rows(self, count: int, *, generated: int) -> int | None:
        """Rows that a verification of `count` tokens is padded to; None where there is no room for them.

        Args:
            count: tokens to run.
            generated: columns after the prompt that the cache holds.
        """
        return next((rows for rows in ROW_COUNTS if count <= rows <= self._room - generated), None)

    def __call__(self, inputs: dict[str, Any], *, count: int) -> Any:
        """The model's outputs, logits and taps of the first `count` rows alone.

        Args:
            inputs: of the target's forward, padded.
            count: rows that are real.
        """
        outputs, states = self.forward(self.capture, inputs)
        padding = states[0].shape[1] - count
        outputs.logits = outputs.logits[:, :count]
        self.capture.supply([state[:, :count] for state in states])
        if padding:
            for layer in self.cache.layers:
                layer.crop(-padding)
        return outputs


def compiled_verification(
    target: nn.Module,
    capture: FeatureCapture,
    *,
    cache: Any,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> CompiledVerification | None:
    """Compiled verification where plain generation would compile its steps, and None elsewhere.

    That is: a static cache on a device that transformers compiles for, or a `compile_config` that asks for it, and no
    `disable_compile`. A cache that cannot be cropped, outputs by position (attentions, hidden states) and targets that
    the user compiled are run as they are.

    Args:
        target, capture: as for `TargetForward`.
        cache: of the call, after the prefill.
        generation_config, model_kwargs: prepared by `generate`.
    """
    if not getattr(cache, "is_compileable", False) or capture.runs_eagerly or "llama4" in target.config.model_type:
        return None
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return None
    layers = getattr(cache, "layers", [])
    if not layers or not all(hasattr(layer, "max_cache_len") and layer.is_croppable for layer in layers):
        return None
    if not target._valid_auto_compile_criteria(model_kwargs, generation_config):
        return None
    config = fixed_shapes(target, generation_config.compile_config)
    forward = compiled_forward(target, capture.layer_ids, config)
    return CompiledVerification(forward, capture, cache, position_limit(target), config)
