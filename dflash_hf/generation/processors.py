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
# Of these, the ones that always leave a token, whatever came before them.
_LEAVE_ONE = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")
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

# None of the row-wise ones looks at it.
_NO_PREFIX = torch.empty((1, 0), dtype=torch.long)
# Vocabularies of this many times top-k are worth a first look for the largest scores.
_LARGE = 16


def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    return tuple(getattr(hf, name) for name in names if hasattr(hf, name))


ROWWISE_CLASSES = _classes(_ROWWISE)
BY_ID_CLASSES = _classes(_BY_ID)
LEAVE_ONE_CLASSES = _classes(_LEAVE_ONE)
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
        draft_may_be_empty: whether `draft` may rule out every token that a drafter can propose.
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
        self.draft_may_be_empty = not all(type(processor) in LEAVE_ONE_CLASSES for processor in self.draft)
        self._top_k, self._draft_top_k = _end_of_top_k(processors), _end_of_top_k(self.draft)
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
        split = self._draft_top_k if draft else self._top_k
        if draft and split and rows.shape[-1] > processors[split - 1].top_k:
            rows = _top_k_only(processors[:split], processors[split:], rows)
        elif split and rows.device.type == "cpu" and rows.shape[-1] >= _LARGE * processors[split - 1].top_k:
            rows = _top_k_first(processors[:split], processors[split:], rows)
        else:
            rows = _apply(processors, rows)
        return rows.view_as(logits)


def _apply(processors: list[hf.LogitsProcessor], rows: torch.Tensor) -> torch.Tensor:
    """Row-wise processors on `rows [n, V]`."""
    for processor in processors:  # the list's own call inspects every signature, which takes longer
        rows = processor(_NO_PREFIX, rows)
    return rows


def _end_of_top_k(processors: LogitsProcessorList) -> int:
    """How many processors there are up to top-k, if the others need only what it leaves; else 0."""
    names = [type(processor).__name__ for processor in processors]
    if "TopKLogitsWarper" not in names:
        return 0
    end = names.index("TopKLogitsWarper") + 1
    before, after = set(names[: end - 1]), set(names[end:])
    simple = before <= {"TemperatureLogitsWarper"} and after <= {"TopPLogitsWarper", "MinPLogitsWarper"}
    return end if simple and processors[end - 1].filter_value == -float("inf") else 0


def _top_k_only(
    until_top_k: list[hf.LogitsProcessor], after: list[hf.LogitsProcessor], rows: torch.Tensor
) -> torch.Tensor:
    """The processors on each row's `top_k` largest scores, whichever of equal ones that are: for drafts, where any
    distribution keeps the output exact."""
    largest, ids = rows.topk(until_top_k[-1].top_k, dim=-1)
    kept = _apply(after, _apply(until_top_k[:-1], largest))
    return torch.full_like(rows, -torch.inf).scatter_(-1, ids, kept)


def _top_k_first(
    until_top_k: list[hf.LogitsProcessor], after: list[hf.LogitsProcessor], rows: torch.Tensor
) -> torch.Tensor:
    """The processors on each row's largest scores only; sorting a whole vocabulary costs more than all the rest."""
    ids = rows.topk(2 * until_top_k[-1].top_k, dim=-1, sorted=False).indices
    largest = _apply(until_top_k, rows.gather(-1, ids))
    kept = _apply(after, largest)
    # Which of several equal scores stays depends on all of them: such a cut is left to the processors themselves, and
    # so is a row in which top-k kept everything that was taken.
    least = kept.masked_fill(kept == -torch.inf, torch.inf).amin(dim=-1)
    removed = largest.masked_fill(kept != -torch.inf, -torch.inf).amax(dim=-1)
    unclear = (least == removed) | (largest > -torch.inf).all(dim=-1)
    scores = torch.full_like(rows, -torch.inf).scatter_(-1, ids, kept)
    if bool(unclear.any()):
        scores[unclear] = _apply(after, _apply(until_top_k, rows[unclear]))
    return scores


def _for_row(processor: hf.LogitsProcessor, row: int) -> hf.LogitsProcessor:
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    alone = copy.copy(processor)  # a repetition penalty that knows the padding of each row
    alone.prompt_ignore_length = ignored[row : row + 1]
    return alone
