"""After which token a row ends."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from .sequences import Sequences

# Criteria that judge each row by its own ids alone, so they may be asked about one row.
_ROWWISE = (MaxTimeCriteria, StopStringCriteria)


class StopRule:
    """EOS and lengths are looked at on the host, any other criterion is asked about every accepted prefix.

    Args:
        criteria: prepared by `generate`.
        max_length: of the generation config.
        pad_token_id: prepared by `generate`.
        batch_size: b.

    Attributes:
        max_length: the smallest limit on a row's length.
        pad_token: what plain generation writes after a row that has ended; None if it goes on with the row.
        per_row: whether rows may be judged apart from each other. Otherwise all of them must go in step.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        *,
        max_length: int,
        pad_token_id: torch.Tensor | None,
        batch_size: int,
    ):
        self.max_length = max_length
        self.criteria = criteria
        self.eos: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            else:
                self.others.append(criterion)
        # As plain generation has it: without an EOS criterion a row that has ended goes on until all have.
        pads = any(hasattr(item, "eos_token_id") for item in criteria)
        self.pad_token = int(pad_token_id) if pads and pad_token_id is not None else None
        known = all(type(criterion) in _ROWWISE for criterion in self.others)
        self.per_row = batch_size == 1 or (known and (self.pad_token is not None or not self.others))

    def of_row(self, sequences: Sequences, row: int, token: int, scores: tuple | None) -> bool:
        """Whether a row ends with `token`, its last one."""
        if self.others and bool(self.others(sequences.prefix(row), scores).all()):
            return True
        return token in self.eos or sequences.lengths[row] >= self.max_length

    def of_batch(self, sequences: torch.LongTensor, scores: tuple | None) -> list[bool]:
        """Which rows of `sequences [b, n]` end with their last token."""
        stopped = self.criteria(sequences, scores).tolist()
        # A length may come from the generation config alone, without a criterion.
        return [one or sequences.shape[1] >= self.max_length for one in stopped]
