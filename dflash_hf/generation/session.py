"""`DFlashSession`: several turns on one cache, with the drafter's context kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from ..errors import UnsupportedGenerationError
from ..modeling_dflash import DFlashDraftModel
from .statistics import GenerationStats
from .target_forward import cache_key


class DFlashSession:
    """A conversation: each turn gives all ids so far, and the target runs on the new ones only.

    The target's cache stays from turn to turn, and with it what the drafter knows of the earlier turns. Where a turn
    does not begin with what the cache holds (an edited message, another template), the cache is cropped to what they
    share, or begun anew if it cannot be cropped (a sliding window or a recurrent state that has moved on). In any case
    the output is that of `generate` on all ids.

    Args:
        target: the model.
        drafter: its draft model.
    """

    def __init__(self, target: nn.Module, drafter: DFlashDraftModel):
        self.target, self.drafter = target, drafter
        self._cache: Any = None
        self._held: list[int] = []
        self._key = cache_key(target, {"use_cache": True})

    @property
    def cached_tokens(self) -> int:
        """Tokens that the target need not run on again."""
        return len(self._held)

    @property
    def last_generation_stats(self) -> GenerationStats | None:
        """`GenerationStats` of the latest turn."""
        return self.drafter.last_generation_stats

    def reset(self) -> None:
        """Forget everything."""
        self._cache, self._held = None, []

    @torch.no_grad()
    def generate(
        self, input_ids: torch.LongTensor, *, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> torch.LongTensor:
        """The next turn.

        Args:
            input_ids: `[1, L]`, the whole conversation up to here.
            attention_mask: `[1, L]`; a tokenizer gives it, and it is all ones.
            options: what `generate` takes: `max_new_tokens`, `streamer`, `do_sample`, ...

        Returns:
            `[1, L + n]` ids.

        Raises:
            UnsupportedGenerationError: for more than one conversation, or one with padding.
        """
        if input_ids.shape[0] != 1 or (attention_mask is not None and not bool(attention_mask.all())):
            raise UnsupportedGenerationError(
                f"A session is one conversation without padding, got input_ids of shape {tuple(input_ids.shape)}. Make "
                "a DFlashSession for each conversation."
            )
        reserved = {self._key, "assistant_model", "return_dict_in_generate"} & set(options)
        config = options.get("generation_config", self.target.generation_config)
        several = options.get("num_return_sequences", config.num_return_sequences) or 1
        if reserved or several > 1 or options.get("use_cache") is False:
            raise UnsupportedGenerationError(
                f"A session sets {sorted(reserved) or 'its cache'} itself and gives one answer a turn, but "
                f"num_return_sequences is {several}, use_cache {options.get('use_cache')}. Leave these options out, or "
                "call generate."
            )
        self._keep_common_prefix(input_ids[0].tolist())
        if self._cache is not None:
            options[self._key] = self._cache
        self.reset()  # a turn that fails in the middle leaves a cache that fits nothing
        output = self.target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=self.drafter,
            return_dict_in_generate=True,
            **options,
        )
        cache = output[self._key]
        if not all(getattr(cache, "is_linear", [False])):  # of a recurrent state alone no one can tell how far it is
            self._cache = cache
            self._held = output.sequences[0, : int(cache.get_seq_length())].tolist()
        return output.sequences

    def _keep_common_prefix(self, ids: list[int]) -> None:
        """Crop the cache to what it shares with `ids`, all of which but one token at most may be cached."""
        shared = 0
        while shared < min(len(self._held), len(ids) - 1) and self._held[shared] == ids[shared]:
            shared += 1
        extra = len(self._held) - shared
        if extra == 0:
            return
        if shared and all(type(layer) is DynamicLayer for layer in self._cache.layers):
            self._cache.crop(-extra)
            self._held = self._held[:shared]
        else:
            self.reset()
