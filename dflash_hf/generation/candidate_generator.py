"""`DFlashCandidateGenerator`: one draft block from the target's features and the newest token."""

from __future__ import annotations

import torch
from torch import nn
from transformers.generation.candidate_generator import CandidateGenerator

from ..draft_head import DraftHead, without_empty_rows
from ..errors import DFlashConfigError
from ..modeling_dflash import DFlashDraftModel
from .processors import Processors


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposes the tokens after the newest one (the anchor) in one draft forward pass.

    Features of accepted positions are handed over by `add_context`; the drafter's cache holds their keys and values,
    the block's own are dropped after each proposal.

    Args:
        drafter: the draft model. On its `generation_config`, `block_size` shortens the block itself, and
            `num_assistant_tokens` only what is sent to the target.
        target: the model whose embedding and head it borrows.
        processors: the call's logits processors.
        do_sample: sample from q, or take the largest logit.
        batch_size: b, rows of every call.

    Raises:
        DFlashConfigError: if the inference block size is not between 2 and the trained one, or
            `num_assistant_tokens` is below 1.
    """

    requires_model_outputs = False

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: nn.Module,
        *,
        processors: Processors,
        do_sample: bool,
        batch_size: int = 1,
    ):
        config = drafter.config
        self.drafter = drafter
        self.target = target
        self.processors = processors
        self.do_sample = do_sample
        self.block_size = _inference_block_size(drafter)
        self.head = DraftHead(drafter, target)
        self.max_proposals = _max_proposals(drafter, self.head.max_proposals(self.block_size))
        self.device = drafter.norm.weight.device
        self.cache = drafter.new_cache()
        masks = torch.full((batch_size, self.block_size), config.mask_token_id)
        # The mask rows are the same in every round; only slot 0 changes.
        self._block = self.head.embed(masks).to(self.device).clone()
        self._offsets = torch.arange(self.block_size, device=self.device)
        self._features: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None

    def add_context(self, features: torch.Tensor, position_ids: torch.LongTensor) -> None:
        """Take the features of positions that were accepted.

        Args:
            features: `[b, n, K * H_t]` raw concat.
            position_ids: `[b, n]`, absolute.
        """
        if self._features is not None:  # a round without a proposal left its features here
            self.drafter.append_context(self._features, position_ids=self._positions, cache=self.cache)
        self._features, self._positions = features, position_ids.to(self.device)

    def draft_logits(self, anchor: torch.LongTensor, num_tokens: int) -> torch.Tensor:
        """Raw draft logits `[b, num_tokens, V]` for the tokens after `anchor [b, 1]`, before any correction.

        The whole trained block goes through the drafter; only the first `num_tokens` proposals go through the head.
        """
        self._block[:, :1] = self.head.embed(anchor).to(self.device)
        length = self.cache.get_seq_length() + self._features.shape[1]
        block_positions = self._positions[:, -1:] + 1 + self._offsets
        hidden = self.drafter(
            self._block,
            self._features,
            position_ids=torch.cat([self._positions, block_positions], dim=1),
            cache=self.cache,
        ).last_hidden_state
        self._features = self._positions = None
        self.cache.crop(length)
        self._hidden = self.head.slots(hidden, num_tokens)  # of this draft, for heads that walk over it
        return self.head.logits(self._hidden)

    def get_candidates(
        self, input_ids: torch.LongTensor, num_tokens: int | None = None
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Propose tokens after `input_ids`.

        Args:
            input_ids: `[b, L]`; the last ones are the anchors.
            num_tokens: how many to propose; by default `max_proposals`.

        Returns:
            candidate ids `[b, L + num_tokens]`, and when sampling the scores `[b, num_tokens, V]` whose softmax is q.
        """
        num_tokens = self.max_proposals if num_tokens is None else num_tokens
        logits = self.draft_logits(input_ids[:, -1:], num_tokens).to(input_ids.device)
        processors = self.processors
        if processors.draft_rowwise and not self.head.walks:
            if not self.do_sample and not processors.draft:
                return torch.cat([input_ids, logits.argmax(dim=-1)], dim=1), None
            scores = self._scores(processors.on_rows(input_ids, logits.float(), draft=True))
            tokens = self._choose(scores)
            return torch.cat([input_ids, tokens], dim=1), scores if self.do_sample else None
        # A processor, or the head itself, looks at the prefix: that of proposal k holds the ones chosen before it.
        walk, rows = self.head.walk(self._hidden, logits), []
        for index in range(num_tokens):
            scores = walk.scores(index, input_ids[:, -1]).to(input_ids.device)
            rows.append(self._scores(processors.draft(input_ids, scores.float()))[:, None])
            input_ids = torch.cat([input_ids, self._choose(rows[-1])], dim=1)
        return input_ids, torch.cat(rows, dim=1) if self.do_sample else None

    def _scores(self, scores: torch.Tensor) -> torch.Tensor:
        return without_empty_rows(scores) if self.head.restricts and self.do_sample else scores

    def _choose(self, scores: torch.Tensor) -> torch.LongTensor:
        """One token `[b, n]` for each row of `scores [b, n, V]`."""
        if not self.do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(scores.softmax(dim=-1).flatten(0, 1), num_samples=1).view(scores.shape[:2])

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Part of transformers' interface; the block length is fixed here."""


def _inference_block_size(drafter: DFlashDraftModel) -> int:
    trained = drafter.config.block_size
    block_size = getattr(drafter.generation_config, "block_size", None)
    if block_size is None:
        return trained
    if not 2 <= block_size <= trained:
        raise DFlashConfigError(
            f"generation_config.block_size is {block_size}; this drafter was trained with blocks of {trained}, so it "
            f"runs with 2 to {trained}."
        )
    return block_size


def _max_proposals(drafter: DFlashDraftModel, most: int) -> int:
    wanted = drafter.generation_config.num_assistant_tokens
    if wanted is None:
        return most
    if wanted < 1:
        raise DFlashConfigError(
            f"generation_config.num_assistant_tokens is {wanted}; a round proposes at least 1 token. Set 1 to "
            f"{most}, or None for the whole block."
        )
    return min(int(wanted), most)
