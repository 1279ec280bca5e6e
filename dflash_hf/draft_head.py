"""`DraftHead`: what surrounds a draft forward pass, block embeddings before it and proposals after it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .errors import TargetMismatchError
from .modeling_dflash import DFlashDraftModel
from .packing import PackedLinear, linear_of_rows
from .target import OutputHead, embed_with, execution_device, output_vocabulary


class DraftHead:
    """Embeddings of block tokens, and draft logits over the target's vocabulary.

    Embedding and output head are the drafter's own where it has them, else the target's. Proposals start at slot 1, or
    at slot 0 with `sample_from_anchor`.

    Args:
        drafter: the draft model.
        target: the model that it drafts for.

    Attributes:
        first_slot: the slot that proposes the token after the anchor.
        walks: whether a proposal's logits depend on the proposals before it, so that they come from `walk`.
        restricts: whether some tokens can never be proposed (their logits are -inf).
        frequent: tokens `[v]` that all proposals come from, or None for the whole vocabulary.

    Raises:
        TargetMismatchError: if the drafter's trimmed vocabulary or its index of frequent tokens leaves the target's
            vocabulary, or the target has no output head.
    """

    def __init__(self, drafter: DFlashDraftModel, target: nn.Module):
        config = drafter.config
        self.drafter, self.target = drafter, target
        self.first_slot = config.first_slot
        self.correction = drafter.correction()
        self.walks = self.correction is not None
        self.scale = config.input_embedding_scale
        self._embedding = target.get_input_embeddings() if drafter.embed_tokens is None else None
        self.head = OutputHead(target, config, own=drafter.lm_head)
        self.vocab_size = output_vocabulary(target)
        # Rows that the drafter's own tables have; padding may make them more or fewer than the target's.
        self.rows = config.vocab_size if self.walks or config.own_head else None
        self.token_ids = None
        if drafter.d2t is not None:
            self.token_ids = torch.arange(len(drafter.d2t), device=drafter.d2t.device) + drafter.d2t
            _check_map(self.token_ids, self.vocab_size, "trimmed vocabulary (tensor 'd2t')")
        self.frequent = drafter.frequent_token_ids
        if self.frequent is not None:
            _check_map(self.frequent, self.vocab_size, "index of frequent tokens (frequent_tokens.json)")
            self.frequent = self.frequent.to(execution_device(self.head.head))
        self._frequent_head = None
        self.restricts = (
            self.token_ids is not None
            or self.frequent is not None
            or config.selector_rank is not None
            or (self.rows is not None and self.rows < self.vocab_size)
        )

    def max_proposals(self, block_size: int) -> int:
        """Proposals that a block of `block_size` slots gives."""
        return block_size - self.first_slot

    def embed(self, token_ids: torch.LongTensor) -> torch.Tensor:
        """Embeddings `[..., H]` of block tokens `[...]`, on the device of the table."""
        own = self.drafter.embed_tokens
        if own is None:
            return embed_with(self._embedding, token_ids, scale=self.scale)
        rows = own(token_ids.to(execution_device(own)))
        return rows if self.scale in (None, 1.0) else rows * self.scale

    def slots(self, hidden_states: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The hidden states `[b, num_tokens, H]` of the proposing slots, of a block's `[b, B, H]`."""
        return hidden_states[:, self.first_slot : self.first_slot + num_tokens]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., V]` over the target's vocabulary; of proposals before any correction (`walks`).

        Args:
            hidden_states: `[..., H]`.
        """
        if self.frequent is not None:
            return self.spread(self.frequent_logits(hidden_states))
        logits = self.head(hidden_states.to(execution_device(self.head.head)))
        if self.token_ids is None and self.rows is not None:
            logits = logits[..., : self.rows]
        return self._on_target_vocabulary(logits)

    def frequent_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., v]` over the tokens of `frequent`, in its order.

        Args:
            hidden_states: `[..., H]`.
        """
        hidden_states = hidden_states.to(execution_device(self.head.head))
        if not self.head.has_rows:  # quantised, adapted or offloaded: its own forward, then a choice
            return self.head(hidden_states)[..., self.frequent]
        if self._frequent_head is None:  # gathered once a call
            rows = self.head.rows(self.frequent)
            self._frequent_head = linear_of_rows(*rows, packed=isinstance(self.head.head, PackedLinear))
        head = self._frequent_head
        return self.head.transform(head(hidden_states.to(head.weight.dtype)))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits or scores `[..., v]` over `frequent` -> `[..., V]`, with -inf for all other tokens."""
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.frequent.to(logits.device)] = logits
        return full

    def walk(self, hidden_states: torch.Tensor, logits: torch.Tensor) -> Walk:
        """Start choosing proposals from left to right.

        Args:
            hidden_states: `[b, k, H]` of the proposing slots.
            logits: `[b, k, V]`, what `logits` gives for them.
        """
        return Walk(self, hidden_states, logits)

    def _on_own_rows(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[..., : self.rows] if self.token_ids is None else logits[..., self.token_ids.to(logits.device)]

    def _on_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        if self.token_ids is not None:
            full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
            full[..., self.token_ids.to(logits.device)] = logits
            return full
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return functional.pad(logits, (0, missing), value=-torch.inf)
        return logits if missing == 0 else logits[..., : self.vocab_size]


class Walk:
    """Scores of one block's proposals, each given the token that was chosen before it.

    Args:
        head: of the drafter.
        hidden_states: `[b, k, H]`.
        logits: `[b, k, V]`.
    """

    def __init__(self, head: DraftHead, hidden_states: torch.Tensor, logits: torch.Tensor):
        self.head, self.hidden_states, self.logits = head, hidden_states, logits
        self._state = None

    def scores(self, index: int, previous: torch.LongTensor) -> torch.Tensor:
        """Scores `[b, V]` of proposal `index`; call it in order.

        Args:
            index: 0 for the token after the anchor.
            previous: `[b]`, the token before it: the anchor, or the proposal that was chosen.
        """
        logits, hidden = self.logits[:, index], self.hidden_states[:, index]
        if not self.head.walks:
            return logits
        scores, self._state = self.head.correction.step(
            self.head._on_own_rows(logits.to(hidden.device)),
            hidden=hidden,
            previous=previous.to(hidden.device).clamp(max=self.head.rows - 1),  # a padded id has no row of its own
            embed=lambda ids: self.head.embed(ids).to(hidden.device),
            index=index,
            state=self._state,
        )
        return self.head._on_target_vocabulary(scores)


def without_empty_rows(scores: torch.Tensor) -> torch.Tensor:
    """Rows in which every token was ruled out become uniform, so that q is a distribution; any q keeps output exact.

    It happens where processors rule out all tokens that a drafter can propose.

    Args:
        scores: `[..., V]`.
    """
    return scores.masked_fill((scores == -torch.inf).all(dim=-1, keepdim=True), 0.0)


def _check_map(token_ids: torch.Tensor, vocab_size: int, name: str) -> None:
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(outside):
        raise TargetMismatchError(
            f"The drafter's {name} holds token id {int(outside[0])}, but the target's vocabulary has {vocab_size} "
            "tokens. Use the target that it was trained for."
        )
