"""The target's forward passes during one call: the prefill, then one verification a round."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, GenerationMixin

from ..errors import UnsupportedGenerationError
from ..target import FeatureCapture
from ..transfers import on_device
from .compiled import compiled_verification

# transformers 5.24 renamed generate's and forward's `past_key_values` (of Mamba: `cache_params`) to `cache`.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_key(target: nn.Module, model_kwargs: dict[str, Any]) -> str:
    """The name under which a target takes its cache in this transformers version.

    Raises:
        UnsupportedGenerationError: if it runs without a cache.
    """
    parameters = inspect.signature(target.forward).parameters
    for name in _CACHE_NAMES:
        # Some targets make a cache of their own in their first forward pass.
        if model_kwargs.get(name) is not None or (name in parameters and model_kwargs.get("use_cache")):
            return name
    raise no_cache(target)


def no_cache(target: nn.Module) -> UnsupportedGenerationError:
    """The error for a target that runs without a cache."""
    return UnsupportedGenerationError(
        f"Generation with a DFlash drafter needs the target's key-value cache, but {type(target).__name__} has none: "
        "the call or the target's config says use_cache=False, or the target keeps no cache. Set use_cache=True, or "
        "generate without assistant_model."
    )


# What every target's forward takes, in the form that this class gives it.
_PLAIN_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", *_CACHE_NAMES}


class TargetForward:
    """Runs the target with what `generate` prepared.

    Positions and mask of all tokens to come are laid out once; a round slices them, or gathers them where rows have
    different lengths. Then the cache holds them with padding on their left, as it holds prompts of different length.
    Targets that prepare their inputs in a way of their own, or take more than ids, are asked to.

    Args:
        target: the model.
        capture: entered hooks on it.
        input_ids: `[b, L]` prompts.
        generation_config: prepared by `generate`.
        model_kwargs: prepared by `generate`.
        room: tokens after the prompt that positions and mask are laid out for at first; it doubles as needed.
        ahead: of how many tokens after these `new_positions` may be asked.
        position_limit: rows of the target's table of positions, if it has one.

    Attributes:
        prompt_positions_used: with a limit, after the prefill: positions up to the end of the longest prompt.
        rows_may_leave: whether rows may be taken out by `select`: all inputs are known row by row.
        compiled: after the prefill, what runs verifications as graphs; None where they run as they are.
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
        ahead: int,
        position_limit: int | None = None,
    ):
        self.position_limit = position_limit
        self.target = target
        self.capture = capture
        self.input_ids = input_ids
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.key = cache_key(target, model_kwargs)
        self._room, self._ahead = room, ahead
        self._takes_mask = "attention_mask" in inspect.signature(target.forward).parameters
        others = [value for name, value in model_kwargs.items() if name not in _PLAIN_INPUTS]
        self.rows_may_leave = not any(isinstance(value, (torch.Tensor, list, tuple, dict)) for value in others)
        # Of the instance: PEFT's prompt learning puts its own there.
        prepare = getattr(target.prepare_inputs_for_generation, "__func__", None)
        own = prepare is not GenerationMixin.prepare_inputs_for_generation
        compileable = getattr(self.cache, "is_compileable", False)
        self._general = own or compileable or not self.rows_may_leave
        self.compiled = None

    @property
    def prompt_columns(self) -> int:
        """Columns of the prompt, what a given cache held before it included; for targets that take a mask."""
        return self._masked

    @property
    def has_mask(self) -> bool:
        """Whether padding can be told to the target; known after the prefill."""
        return self._mask is not None

    @property
    def cache(self) -> Any:
        """The target's cache; None before the prefill of a target that makes its own."""
        return self.model_kwargs.get(self.key)

    def prefill(self) -> Any:
        """Run the prompt (or what a given cache lacks of it); the model's outputs, logits of the last position only."""
        if self.model_kwargs.get("logits_to_keep") is None and self.target._supports_logits_to_keep():
            self.model_kwargs["logits_to_keep"] = 1
        with self.capture.recording():
            outputs = self.target._prefill(self.input_ids, self.generation_config, self.model_kwargs)
        self.model_kwargs[self.key] = outputs.get(self.key)
        if self.cache is None:
            raise no_cache(self.target)
        self._start = {name: self.model_kwargs.get(name) for name in ("position_ids", "attention_mask")}
        self._mask_is_given = self._start["attention_mask"] is not None
        rows, has_columns = len(self.input_ids), not all(getattr(self.cache, "is_linear", [False]))
        if not self._mask_is_given and rows > 1 and self._takes_mask and has_columns:
            # generate drops a mask of ones, but rows will be padded when their lengths differ.
            self._start["attention_mask"] = self.input_ids.new_ones((rows, int(self.cache.get_seq_length())))
        self._lay_out()
        if self.position_limit is not None:  # one transfer a call, for targets with a table of positions
            self.prompt_positions_used = int(self._drafter_positions[:, self._seen - 1].max()) + 1
        self.compiled = compiled_verification(
            self.target,
            self.capture,
            cache=self.cache,
            generation_config=self.generation_config,
            model_kwargs=self.model_kwargs,
        )
        return outputs

    def _lay_out(self) -> None:
        device = self.input_ids.device
        ahead = torch.arange(self._room + 1 + self._ahead, device=device)
        position_ids, mask = self._start["position_ids"], self._start["attention_mask"]
        self._positions = None if position_ids is None else position_ids[..., -1:] + 1 + ahead
        if self._positions is not None and self.position_limit is not None:
            self._positions = self._positions.clamp(max=self.position_limit - 1)  # of tokens that no row keeps
        if position_ids is not None and position_ids.dim() == 2:
            seen = position_ids
        else:  # a target that counts itself, or has several positions a token: count real tokens
            counted = torch.ones_like(self.input_ids) if mask is None else mask
            seen = counted.cumsum(-1) - 1
        seen = seen.expand(self.input_ids.shape[0], -1)
        self._drafter_positions = torch.cat([seen, seen[:, -1:] + 1 + ahead], dim=1)
        self._seen = seen.shape[1]
        self._mask, self._masked = None, 0
        if mask is not None:
            self._mask = torch.cat([mask, mask.new_ones((mask.shape[0], len(ahead)))], dim=1)
            self._masked = mask.shape[1]

    def prompt_positions(self, count: int) -> tuple[torch.LongTensor, torch.BoolTensor | None]:
        """Positions `[b, count]` of the last `count` prompt tokens, and which of them are real (None: all)."""
        if count > self._seen:
            raise UnsupportedGenerationError(
                f"The target ran on {count} positions for {self._seen} tokens: it adds virtual tokens (prompt tuning), "
                "which have no place in the drafter's context. Generate without assistant_model."
            )
        positions = self._drafter_positions[:, self._seen - count : self._seen]
        if self._mask is None:
            return positions, None
        real = self._mask[:, self._masked - count : self._masked].bool()
        return positions, None if bool(real.all()) else real

    def new_positions(self, starts: list[int], count: int) -> torch.LongTensor:
        """Positions `[n, count]` of generated tokens from `starts[i]` on (0 is the first generated one)."""
        return self._of_rows(self._drafter_positions, [self._seen + start for start in starts], count)

    @staticmethod
    def _of_rows(values: torch.Tensor, starts: list[int], count: int) -> torch.Tensor:
        """`count` columns from `starts[i]` on of each row of `values [..., n or 1, m]`."""
        start = starts[0]
        if min(starts) == max(starts):
            return values.narrow(-1, start, count)
        columns = on_device(starts, values.device)[:, None] + torch.arange(count, device=values.device)
        values = values.expand(*values.shape[:-2], len(starts), values.shape[-1])
        return values.gather(-1, columns.expand(*values.shape[:-1], count))

    def _mask_of_rows(self, starts: list[int], count: int) -> torch.Tensor | None:
        """Mask `[n, m]` (None: all ones): what is in the cache, padded on the left, and `count` tokens after it."""
        longest = max(starts)
        total = self._masked + longest + count
        if min(starts) == longest:
            return self._mask[:, :total] if self._mask_is_given else None
        shift = on_device([longest - start for start in starts], self._mask.device)[:, None]
        columns = torch.arange(total, device=self._mask.device) - shift
        return self._mask.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0)

    def select(self, rows: list[int]) -> None:
        """Go on with these rows only; the cache is the caller's to change."""
        index = on_device(rows, self.input_ids.device)
        self.input_ids = self.input_ids[index]
        for name, value in self._start.items():
            if value is not None:
                dim = value.dim() - 2
                self._start[name] = value if value.shape[dim] == 1 else value.index_select(dim, index)
        self._lay_out()

    def verify(self, ids: torch.LongTensor, starts: list[int], *, logits: int) -> Any:
        """Run the target on the tokens after what the cache holds.

        Args:
            ids: `[n, m]`.
            starts: generated tokens of each row that the cache holds already.
            logits: how many positions need logits, the last ones.

        Returns:
            the model's outputs; logits `[n, logits, V]` (or of more positions, the last ones being these).
        """
        real, rows = ids.shape[1], None
        if self.compiled is not None:
            rows = self.compiled.rows(real, generated=max(starts))
            ids = ids if rows is None else functional.pad(ids, (0, rows - real))
        count = ids.shape[1]
        while max(starts) + count > self._room:
            self._room *= 2
            self._lay_out()
        inputs = {
            key: value for key, value in self.model_kwargs.items() if key not in ("attention_mask", "position_ids")
        }
        if self._mask is not None:
            inputs["attention_mask"] = self._mask_of_rows(starts, count)
        if self._positions is not None:
            inputs["position_ids"] = self._of_rows(self._positions, starts, count)
        if self._general:
            inputs = self._prepared_by_target(ids, inputs, count)
        else:
            inputs["input_ids"] = ids
            inputs.pop("inputs_embeds", None)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits if rows is None else rows
        if rows is not None:
            return self.compiled(inputs, count=real)
        with self.capture.recording():
            return self.target(**inputs, return_dict=True)

    def _prepared_by_target(self, ids: torch.LongTensor, inputs: dict[str, Any], count: int) -> dict[str, Any]:
        # What grows with the sequence goes on as in plain generation: the last type, or plain text.
        for name, fill in (("token_type_ids", None), ("mm_token_type_ids", 0), ("moe_mm_token_type_ids", 0)):
            values = inputs.get(name)
            if values is not None:
                tail = values[:, -1:] if fill is None else torch.full_like(values[:, -1:], fill)
                inputs[name] = tail.expand(-1, count)
        inputs.setdefault("attention_mask", None)
        return self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=False, **inputs
        )
