"""How logits processors may be used: on many rows at once, on draft prefixes, or on accepted prefixes only."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

# Functions of one row of scores alone: they may run on all rows of a block at once.
_ROWWISE = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
# Functions of the prefix and the row, without state: they may also run on prefixes that are later rejected.
_PREFIX = (
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)


def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    return tuple(getattr(hf, name) for name in names if hasattr(hf, name))


ROWWISE_CLASSES = _classes(_ROWWISE)
PREFIX_CLASSES = _classes(_PREFIX)


class Processors:
    """A processor list, sorted by how it may be called. Subclasses count as unknown: they may keep state.

    Args:
        processors: what `generate` prepared for the target.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.all = processors
        self.rowwise = all(type(processor) in ROWWISE_CLASSES for processor in processors)
        pure = ROWWISE_CLASSES + PREFIX_CLASSES
        # Draft logits see the processors without state only; any q keeps the output exact.
        self.draft = LogitsProcessorList(processor for processor in processors if type(processor) in pure)
        self.draft_rowwise = all(type(processor) in ROWWISE_CLASSES for processor in self.draft)

    def on_rows(self, input_ids: torch.LongTensor, logits: torch.Tensor, *, draft: bool) -> torch.Tensor:
        """All positions at once; only for row-wise processors. fp32 `logits [b, n, V]` -> scores `[b, n, V]`."""
        processors = self.draft if draft else self.all
        if not processors:
            return logits
        rows = input_ids.repeat_interleave(logits.shape[1], dim=0)
        return processors(rows, logits.flatten(0, 1)).view_as(logits)
