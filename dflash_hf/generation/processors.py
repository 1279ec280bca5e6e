"""How logits processors may be used: on many rows at once, on draft prefixes, or on accepted prefixes only."""

from __future__ import annotations

import copy

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
# Of these, the ones that look at the ids of tokens, not at their scores alone.
_BY_ID = ("SuppressTokensLogitsProcessor",)
# Functions of the prefix and the row, without state: they may also run on prefixes that are later rejected.
_PREFIX = (
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)
# The same, but they hold the prompts of the whole batch, so rows cannot be shown to them one at a time.
_BATCH_PREFIX = ("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")


def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    return tuple(getattr(hf, name) for name in names if hasattr(hf, name))


ROWWISE_CLASSES = _classes(_ROWWISE)
BY_ID_CLASSES = _classes(_BY_ID)
PREFIX_CLASSES = _classes(_PREFIX)
BATCH_PREFIX_CLASSES = _classes(_BATCH_PREFIX)


class Processors:
    """A processor list, sorted by how it may be called. Subclasses count as unknown: they may keep state.

    Args:
        processors: what `generate` prepared for the target.
        batch_size: b.

    Attributes:
        all: the list itself.
        draft: those that draft logits see.
        rowwise, draft_rowwise: whether these look at a row of scores alone.
        draft_any_vocabulary: whether `draft` may run on the scores of a part of the vocabulary.
        per_row: whether rows may be shown to them apart from each other.
    """

    def __init__(self, processors: LogitsProcessorList, *, batch_size: int = 1):
        self.all = processors
        self.batch_size = batch_size
        self._of_row: dict[tuple[int, bool], LogitsProcessorList] = {}
        self.rowwise = all(type(processor) in ROWWISE_CLASSES for processor in processors)
        pure = ROWWISE_CLASSES + PREFIX_CLASSES
        self.per_row = all(type(processor) in pure for processor in processors)
        if batch_size == 1:
            pure += BATCH_PREFIX_CLASSES
            self.per_row = True
        # Draft logits see the processors without state only; any q keeps the output exact.
        self.draft = LogitsProcessorList(processor for processor in processors if type(processor) in pure)
        self.draft_rowwise = all(type(processor) in ROWWISE_CLASSES for processor in self.draft)
        self.draft_any_vocabulary = self.draft_rowwise and not any(type(p) in BY_ID_CLASSES for p in self.draft)

    def of_row(self, row: int, *, draft: bool) -> LogitsProcessorList:
        """The processors for ids `[1, n]` of one row of the batch."""
        processors = self.draft if draft else self.all
        if self.batch_size == 1:
            return processors
        if (row, draft) not in self._of_row:
            self._of_row[row, draft] = LogitsProcessorList(_for_row(processor, row) for processor in processors)
        return self._of_row[row, draft]

    def on_rows(self, logits: torch.Tensor, *, draft: bool) -> torch.Tensor:
        """All positions at once; only for row-wise processors. fp32 `logits [b, n, V]` -> scores `[b, n, V]`."""
        processors = self.draft if draft else self.all
        if not processors:
            return logits
        rows = logits.flatten(0, 1)
        no_prefix = torch.empty((rows.shape[0], 0), dtype=torch.long, device=rows.device)  # none of them looks at it
        return processors(no_prefix, rows).view_as(logits)


def _for_row(processor: hf.LogitsProcessor, row: int) -> hf.LogitsProcessor:
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    alone = copy.copy(processor)  # a repetition penalty that knows the padding of each row
    alone.prompt_ignore_length = ignored[row : row + 1]
    return alone
