"""Proposals copied from the context: what followed when the newest tokens occurred before.

Code edits and quotations repeat whole passages. Such a proposal costs no draft, may be longer than a block, and has
q = 1, so that accepting it is exact by the same rule as for drafted ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from .block_length import SmoothedRates
from .sequences import Sequences

# Lengths of a match that are told apart, and the acceptance to expect of each before anything was seen.
_SIZES = (3, 6, 12)
_FIRST_RATES = (0.5, 0.75, 0.9)
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Copy:
    """A continuation that was found.

    Attributes:
        tokens: ids.
        kind: index of the length of the match.
    """

    tokens: list[int]
    kind: int


class Copying:
    """Looks up continuations in the sequences of a call, and knows how often they were right.

    transformers' prompt lookup does the search. It reads all ids, so it is only asked when the newest tokens are known
    to have occurred before: the host keeps the n-grams of each sequence, which costs the same however long it is.

    Args:
        sequences: ids of the call.
        most: tokens of the longest proposal.
    """

    def __init__(self, sequences: Sequences, *, most: int):
        self.sequences = sequences
        self.most = most
        self.rates = SmoothedRates(len(_SIZES))
        self._seen: list[tuple[set[tuple[int, ...]], ...]] = [
            tuple(set() for _ in _SIZES) for _ in range(sequences.batch_size)
        ]
        self._known = [0] * sequences.batch_size
        self._searches = [
            PromptLookupCandidateGenerator(num_output_tokens=most, max_matching_ngram_size=size, max_length=_NO_LIMIT)
            for size in _SIZES
        ]

    def find(self, row: int) -> Copy | None:
        """What may follow the newest tokens of a row; None if they are new."""
        length = self.sequences.lengths[row]
        tokens = self.sequences.tokens[row]
        for size, seen in zip(_SIZES, self._seen[row]):
            # An n-gram is of use once a token has followed it.
            first = max(self._known[row] - size, 0)
            recent = tokens[first : length - 1]
            seen.update(zip(*(recent[offset:] for offset in range(size))))
        self._known[row] = length
        for kind in reversed(range(len(_SIZES))):
            if length > _SIZES[kind] and tuple(tokens[length - _SIZES[kind] : length]) in self._seen[row][kind]:
                found, _ = self._searches[kind].get_candidates(torch.tensor([tokens[:length]]))
                return Copy(found[0, length:].tolist(), kind)
        return None

    def rate(self, copy: Copy) -> float:
        """The chance of each token of a copy, given that the ones before it were accepted."""
        return self.rates.rate(copy.kind, prior=_FIRST_RATES[copy.kind])

    def observe(self, copy: Copy, *, accepted: int, proposed: int) -> None:
        """What became of the first `proposed` tokens of a copy."""
        for position in range(min(accepted + 1, proposed, len(copy.tokens))):
            self.rates.add(copy.kind, position < accepted)
