"""What `return_dict_in_generate` asks for, one entry a generated token, as plain generation returns it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput


class OutputRecorder:
    """Collects scores, logits, attentions and hidden states of kept tokens.

    Args:
        generation_config: says which are wanted.
    """

    def __init__(self, generation_config: GenerationConfig):
        self.wanted = bool(generation_config.return_dict_in_generate)
        self.scores: tuple | None = () if self.wanted and generation_config.output_scores else None
        self.logits: tuple | None = () if self.wanted and generation_config.output_logits else None
        self.attentions: tuple | None = () if self.wanted and generation_config.output_attentions else None
        self.hidden_states: tuple | None = () if self.wanted and generation_config.output_hidden_states else None

    def add_token(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Scores after processors and raw logits `[1, V]` of one kept token."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def add_prefill(self, outputs: Any) -> None:
        """States of the forward pass over the prompt."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def add_round(self, outputs: Any, *, cache: Any, kept: int, rows: int) -> None:
        """States of the first `kept` of `rows` verified positions, one tuple of layers a position.

        Args:
            outputs: of the target's forward pass over the block.
            cache: the target's, before the rollback.
        """
        if self.hidden_states is not None:
            self.hidden_states += tuple(
                tuple(layer[:, row : row + 1] for layer in outputs.hidden_states) for row in range(kept)
            )
        if self.attentions is not None:
            self.attentions += tuple(
                tuple(
                    None if weights is None else _weights_of_step(weights, row, rows, layer)
                    for weights, layer in zip(outputs.attentions, cache.layers)
                )
                for row in range(kept)
            )

    def result(self, sequences: torch.LongTensor, cache: Any):
        """The ids, or transformers' output object around them."""
        if not self.wanted:
            return sequences
        names = {item.name for item in fields(GenerateDecoderOnlyOutput)}
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            **{"cache" if "cache" in names else "past_key_values": cache},
        )


def _weights_of_step(weights: torch.Tensor, row: int, rows: int, cache_layer: Any) -> torch.Tensor:
    """Row `row` of `rows` verified ones `[1, heads, rows, keys]`, with the keys that a step of one token would have."""
    weights = weights[:, :, row : row + 1]
    if cache_layer.is_compileable:  # a static layer: always all of its columns
        return weights
    end = weights.shape[-1] - rows + row + 1
    window = getattr(cache_layer, "sliding_window", None) or end
    return weights[..., max(0, end - window) : end]
