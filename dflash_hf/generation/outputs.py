"""What `return_dict_in_generate` asks for, one entry a generated token, as plain generation returns it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation import GenerateDecoderOnlyOutput


class OutputRecorder:
    """Collects scores, logits, attentions and hidden states of kept tokens.

    Args:
        generation_config: says which are wanted.
        config: the target's, of its text part.
        batch_size: b.
    """

    def __init__(self, generation_config: GenerationConfig, *, config: PreTrainedConfig, batch_size: int):
        self.config = config
        self.wanted = bool(generation_config.return_dict_in_generate)
        self.wants_scores = bool(self.wanted and generation_config.output_scores)
        self.wants_logits = bool(self.wanted and generation_config.output_logits)
        self.attentions: tuple | None = () if self.wanted and generation_config.output_attentions else None
        self.hidden_states: tuple | None = () if self.wanted and generation_config.output_hidden_states else None
        self._shown: tuple = ()
        self._scores: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._logits: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    @property
    def of_positions(self) -> bool:
        """Whether states of each position are wanted, which rows of different progress cannot share."""
        return self.attentions is not None or self.hidden_states is not None

    def add_token(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Scores after processors and raw logits `[V]` of one kept token."""
        if self.wants_scores:
            self._scores[row].append(scores.clone())  # a view would keep the rejected rows alive
        if self.wants_logits:
            self._logits[row].append(logits.to(dtype=torch.float32, copy=True))

    def scores_so_far(self) -> tuple | None:
        """What plain generation shows to a stopping criterion: scores `[b, V]` of each token of rows in step."""
        if not self.wants_scores:
            return None
        self._shown += tuple(torch.stack(step) for step in zip(*(row[len(self._shown) :] for row in self._scores)))
        return self._shown

    def add_prefill(self, outputs: Any) -> None:
        """States of the forward pass over the prompt."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def add_round(self, outputs: Any, *, cache: Any, skip: int, kept: int, rows: int) -> None:
        """States of kept positions, one tuple of layers a position.

        Args:
            skip: positions that the forward pass ran again.
            kept: positions after these.
            rows: all positions of the forward pass.
            outputs: of the target's forward pass over the block.
            cache: the target's, before the rollback.
        """
        if self.hidden_states is not None:
            self.hidden_states += tuple(
                tuple(layer[..., row : row + 1, :] for layer in outputs.hidden_states)
                for row in range(skip, skip + kept)
            )
        if self.attentions is not None:
            windows = _windows(self.config, cache, count=len(outputs.attentions))
            self.attentions += tuple(
                tuple(
                    None if weights is None else _weights_of_step(weights, row, rows, window)
                    for weights, window in zip(outputs.attentions, windows)
                )
                for row in range(skip, skip + kept)
            )

    def result(self, sequences: torch.LongTensor, cache: Any):
        """The ids, or transformers' output object around them."""
        if not self.wanted:
            return sequences
        names = {item.name for item in fields(GenerateDecoderOnlyOutput)}
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_steps(self._scores) if self.wants_scores else None,
            logits=_steps(self._logits) if self.wants_logits else None,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            **{"cache" if "cache" in names else "past_key_values": cache},
        )


def _steps(rows: list[list[torch.Tensor]]) -> tuple:
    """Per row lists of `[V]` -> one `[n, V]` a step; zeros where a row had ended."""
    longest = max(map(len, rows))
    return tuple(
        torch.stack([row[step] if step < len(row) else torch.zeros_like(row[0]) for row in rows])
        for step in range(longest)
    )


def _windows(config: PreTrainedConfig, cache: Any, *, count: int) -> list[int | None]:
    """How many keys a step of one token sees at most, for each of `count` attentions that a target returns."""
    if cache.is_compileable:  # static layers: always all of their columns
        return [0] * count
    kinds = [
        kind for kind in getattr(config, "layer_types", None) or [] if "attention" in kind and "linear" not in kind
    ]
    if len(kinds) == count:  # hybrids return attention layers only, and layers may share another's cache
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        return [getattr(config, sizes[kind]) if kind in sizes else None for kind in kinds]
    layers = cache.layers if len(cache.layers) == count else [None] * count
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _weights_of_step(weights: torch.Tensor, row: int, rows: int, window: int | None) -> torch.Tensor:
    """Row `row` of `rows` verified ones `[1, heads, rows, keys]`, with the keys that a step of one token would have."""
    weights = weights[:, :, row : row + 1]
    if window == 0:
        return weights
    end = weights.shape[-1] - rows + row + 1
    return weights[..., max(0, end - (window or end)) : end]
