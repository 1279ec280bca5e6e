"""`GenerationStats`: what one `generate` call with a drafter did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GenerationStats:
    """Counts and seconds of one call.

    Seconds are host time: on an accelerator a phase's work may be waited for in the next one; the total is exact.

    Attributes:
        batch_size: rows of the call.
        rounds: target verifications, steps without a proposal included. Rows of a batch share them.
        proposed: draft tokens of one row sent to the target, one entry a row and round.
        produced: tokens kept from it, bonus token included.
        replays: further target forward passes, over tokens that a recurrent state had to forget with rejected ones.
        replayed_tokens: tokens that the target ran on again, those that rode along with a verification included.
        new_tokens: all tokens of the call, the one of the prefill included.
        prefill_seconds, draft_seconds, verify_seconds, total_seconds: `verify` is the target's forward passes;
            the rest of the total is acceptance, rollback and bookkeeping.
    """

    batch_size: int = 1
    rounds: int = 0
    replays: int = 0
    replayed_tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0

    def add_round(self, kept: list[int], *, proposed: int) -> None:
        """Count a verification of `proposed` tokens in each row, of which `kept` were produced."""
        self.rounds += 1
        self.produced.extend(kept)
        self.proposed.extend([proposed] * len(kept))

    def add(self, other: GenerationStats) -> None:
        """Add another call's rounds, tokens and seconds."""
        self.proposed += other.proposed
        self.produced += other.produced
        counts = ("rounds", "replays", "replayed_tokens", "new_tokens")
        for name in (*counts, "prefill_seconds", "draft_seconds", "verify_seconds", "total_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def acceptance_lengths(self) -> list[int]:
        """Tokens that each verification produced in each row, in order."""
        return list(self.produced)

    @property
    def acceptance_length(self) -> float:
        """Tokens produced per verification of a proposal, bonus token included (tau); 0 if there was none."""
        lengths = [made for made, tried in zip(self.produced, self.proposed) if tried]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def accepted_draft_tokens_per_round(self) -> float:
        """The same without the bonus token."""
        return max(self.acceptance_length - 1.0, 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed draft tokens."""
        tried = sum(self.proposed)
        return sum(made - 1 for made, size in zip(self.produced, self.proposed) if size) / tried if tried else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole call, prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.new_tokens} tokens in {self.rounds} rounds, acceptance length {self.acceptance_length:.2f}, "
            f"{self.tokens_per_second:.1f} tokens/s (prefill {self.prefill_seconds:.3f} s, draft "
            f"{self.draft_seconds:.3f} s, verify {self.verify_seconds:.3f} s, total {self.total_seconds:.3f} s)"
        )
