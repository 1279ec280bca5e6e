"""The target's forward passes during one call: the prefill, then one verification a round."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin

from ..errors import UnsupportedGenerationError
from ..target import FeatureCapture

# transformers 5.24 renamed generate's and forward's `past_key_values` to `cache`.
_CACHE_NAMES = ("cache", "past_key_values")


def cache_key(model_kwargs: dict[str, Any]) -> str:
    """The name under which this transformers version passes the cache.

    Raises:
        UnsupportedGenerationError: if the target runs without a cache.
    """
    for name in _CACHE_NAMES:
        if model_kwargs.get(name) is not None:
            return name
    raise UnsupportedGenerationError(
        "Generation with a DFlash drafter needs the target's key-value cache, but there is none: the call or the "
        "target's config says use_cache=False, or the target keeps no cache. Set use_cache=True."
    )


class TargetForward:
    """Runs the target with what `generate` prepared.

    Positions and mask of all tokens to come are laid out once; a round slices them. Targets that prepare their inputs
    in a way of their own are asked to.

    Args:
        target: the model.
        capture: entered hooks on it.
        input_ids: `[1, L]` prompt.
        generation_config: prepared by `generate`.
        model_kwargs: prepared by `generate`.
        room: tokens after the prompt that positions and mask are laid out for at first; it doubles as needed.
    """

    def __init__(
        self,
        target: nn.Module,
        capture: FeatureCapture,
        *,
        input_ids: torch.LongTensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        room: int,
    ):
        self.target = target
        self.capture = capture
        self.input_ids = input_ids
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.key = cache_key(model_kwargs)
        self._room = room
        self._prompt_length = input_ids.shape[1]
        # Extra tensors that grow with the sequence are left to the target's own preparation.
        own = type(target).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
        compileable = getattr(model_kwargs[self.key], "is_compileable", False)
        grows = any(model_kwargs.get(name) is not None for name in ("token_type_ids", "mm_token_type_ids"))
        self._general = own or compileable or grows

    @property
    def cache(self) -> Any:
        """The target's cache."""
        return self.model_kwargs[self.key]

    def prefill(self) -> Any:
        """Run the prompt (or what a given cache lacks of it); the model's outputs, logits of the last position only."""
        if self.model_kwargs.get("logits_to_keep") is None and self.target._supports_logits_to_keep():
            self.model_kwargs["logits_to_keep"] = 1
        with self.capture.recording():
            outputs = self.target._prefill(self.input_ids, self.generation_config, self.model_kwargs)
        self.model_kwargs[self.key] = outputs[self.key]
        self._lay_out()
        return outputs

    def _lay_out(self) -> None:
        device = self.input_ids.device
        ahead = torch.arange(self._room + 1, device=device)
        position_ids = self.model_kwargs.get("position_ids")
        mask = self.model_kwargs.get("attention_mask")
        if position_ids is not None:
            self._positions = position_ids[..., -1:] + 1 + ahead
            seen = position_ids[0] if position_ids.dim() == 3 else position_ids
        else:  # a target that derives its positions itself: count real tokens
            counted = torch.ones_like(self.input_ids) if mask is None else mask
            seen = counted.cumsum(-1) - 1
            self._positions = None
        self.drafter_positions = torch.cat([seen, seen[:, -1:] + 1 + ahead], dim=1)
        self._seen = seen.shape[1]
        self._mask = None
        if mask is not None:
            self._mask = torch.cat([mask, mask.new_ones((mask.shape[0], self._room + 1))], dim=1)

    def prompt_positions(self, count: int) -> torch.LongTensor:
        """Positions `[1, count]` of the last `count` prompt tokens."""
        return self.drafter_positions[:, self._seen - count : self._seen]

    def new_positions(self, start: int, count: int) -> torch.LongTensor:
        """Positions `[1, count]` of generated tokens `start, start + 1, ...` (0 is the first generated one)."""
        return self.drafter_positions[:, self._seen + start : self._seen + start + count]

    def verify(self, sequence: torch.LongTensor, start: int) -> Any:
        """Run the target on the last tokens of a sequence.

        Args:
            sequence: `[1, L + start + m]`: prompt, generated tokens, proposals.
            start: generated tokens that the cache holds already; the m from there on are run.

        Returns:
            the model's outputs; logits `[1, m, V]`.
        """
        count = sequence.shape[1] - self._prompt_length - start
        total = start + count
        while total > self._room:
            self._room *= 2
            self._lay_out()
        inputs = {key: value for key, value in self.model_kwargs.items() if key != "attention_mask"}
        if self._mask is not None:
            inputs["attention_mask"] = self._mask[:, : self._mask.shape[1] - self._room - 1 + total]
        if self._general:
            inputs = self._prepared_by_target(sequence, inputs, count, total)
        else:
            inputs["input_ids"] = sequence[:, -count:]
            inputs.pop("inputs_embeds", None)
            if self._positions is not None:
                inputs["position_ids"] = self._positions[..., start:total]
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        with self.capture.recording():
            outputs = self.target(**inputs, return_dict=True)
        self.model_kwargs[self.key] = outputs[self.key]
        return outputs

    def _prepared_by_target(
        self, sequence: torch.LongTensor, inputs: dict[str, Any], count: int, total: int
    ) -> dict[str, Any]:
        if self._positions is not None:
            inputs["position_ids"] = torch.cat(
                [self.model_kwargs["position_ids"], self._positions[..., :total]], dim=-1
            )
        for name, fill in (("token_type_ids", None), ("mm_token_type_ids", 0)):
            values = inputs.get(name)
            if values is not None:
                tail = values[:, -1:] if fill is None else torch.full_like(values[:, -1:], fill)
                inputs[name] = torch.cat([values, tail.expand(-1, total)], dim=-1)
        inputs.setdefault("attention_mask", None)
        return self.target.prepare_inputs_for_generation(
            sequence, next_sequence_length=count, is_first_iteration=False, **inputs
        )
