"""`DFlashCandidateGenerator`: one draft block from the target's features and the newest token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.generation.candidate_generator import CandidateGenerator

from ..draft_cache import DraftCache
from ..draft_head import DraftHead, without_empty_rows
from ..errors import DFlashConfigError
from ..modeling_dflash import DFlashDraftModel
from ..transfers import on_device
from .draft_context import DraftContext
from .draws import draw
from .processors import Processors


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposes the tokens after the newest one (the anchor) in one draft forward pass.

    Features of accepted positions are handed over to its `context`.

    Args:
        drafter: the draft model. On its `generation_config`, `block_size` shortens the block itself, and
            `num_assistant_tokens` (with its schedule) and `assistant_confidence_threshold` only what is sent to the
            target. Without them the length is chosen by cost; `num_assistant_tokens_schedule="constant"` alone sends
            the whole block. `dflash_context_window` limits the context rows that a block sees to the newest ones.
            `prompt_lookup_num_tokens` limits what is copied from the context (0: nothing; twice the
            block by default).
        target: the model whose embedding and head it borrows.
        processors: the call's logits processors.
        do_sample: sample from q, or take the largest logit.
        batch_size: b, rows of the batch; each keeps a context of its own length.
        cache: context keys and values of an earlier turn, one row a batch row; new ones by default.
        lengths: context rows of each batch row in `cache`.

    Raises:
        DFlashConfigError: if the inference block size is not between 2 and the trained one, `num_assistant_tokens` or
            `dflash_context_window` is below 1, or `prompt_lookup_num_tokens` below 0.

    Attributes:
        context: what the drafter has seen of each sequence.
        fixed: whether the user set how much of a block is sent.
        copied_tokens: the most that may be copied from the context.
        in_order: whether a proposal's distribution depends on the values of those before it.
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
        cache: DraftCache | None = None,
        lengths: list[int] | None = None,
    ):
        config = drafter.config
        self.drafter = drafter
        self.target = target
        self.processors = processors
        self.do_sample = do_sample
        self.block_size = _inference_block_size(drafter)
        self.head = DraftHead(drafter, target)
        # Logits stay on the drafter's frequent tokens until something asks about the whole vocabulary.
        self._narrow = self.head.frequent is not None and not self.head.walks and processors.draft_any_vocabulary
        self.max_proposals = self.head.max_proposals(self.block_size)
        self.num_proposals = _num_proposals(drafter, self.max_proposals)
        knobs = drafter.generation_config
        self.schedule = knobs.num_assistant_tokens_schedule
        self.confidence_threshold = knobs.assistant_confidence_threshold
        # A length that the user set stays as it is; otherwise it is chosen by cost.
        self.fixed = any((knobs.num_assistant_tokens, self.schedule, self.confidence_threshold))
        self.copied_tokens = _copied_tokens(drafter)
        self.in_order = self.head.walks or not processors.draft_rowwise
        self._proposed = 0
        self.device = drafter.norm.weight.device
        self.context = DraftContext(
            drafter, batch_size=batch_size, block_size=self.block_size, cache=cache, lengths=lengths
        )
        self.rows = list(range(batch_size))
        masks = torch.full((batch_size, self.block_size), config.mask_token_id)
        # The mask rows are the same in every round; only slot 0 changes.
        self._block = self.head.embed(masks).to(self.device).clone()

    def select(self, rows: list[int]) -> None:
        """Go on with some rows of the batch only."""
        self.context.select(rows)
        self._block = self._block[on_device(rows, self.device)]
        self.rows = [self.rows[row] for row in rows]

    def draft_logits(self, anchor: torch.LongTensor, num_tokens: int) -> torch.Tensor:
        """Raw draft logits `[b, num_tokens, V]` for the tokens after `anchor [b, 1]`, before any correction.

        They cover the frequent tokens alone where the drafter has an index of them and no processor looks at token ids.
        The whole trained block goes through the drafter; only the first `num_tokens` proposals go through the head.
        """
        self._block.narrow(1, 0, 1).copy_(self.head.embed(anchor))
        hidden = self.context.hidden_states(self._block)
        self._hidden = self.head.slots(hidden, num_tokens)  # of this draft, for heads that walk over it
        return self.head.frequent_logits(self._hidden) if self._narrow else self.head.logits(self._hidden)

    def propose(
        self, anchor: torch.LongTensor, num_tokens: int, *, prefixes: Callable[[], list[torch.LongTensor]]
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Propose tokens after each row's newest one.

        Args:
            anchor: that newest one, `[b, 1]`.
            num_tokens: how many to propose.
            prefixes: gives the ids `[1, n]` of each row up to its anchor; asked where a proposal depends on them.

        Returns:
            proposals `[b, num_tokens]`, and when sampling the scores `[b, num_tokens, V]` whose softmax is q.
        """
        tokens, scores = self.draft(anchor, num_tokens, prefixes=prefixes)
        if self.confidence_threshold:
            sure = self.confidences(scores) >= self.confidence_threshold
            # One transfer a round: the host sizes the verification. The longest row decides; what is dropped is dropped
            # for the distributions alone, never for the token that was drawn, which would bias the output.
            count = int(sure.long().cumprod(dim=1).sum(dim=1).max())
            tokens, scores = tokens[:, :count], scores[:, :count]
        self._proposed = tokens.shape[1]
        return tokens, self.over_vocabulary(scores) if self.do_sample else None

    def draft(
        self, anchor: torch.LongTensor, num_tokens: int, *, prefixes: Callable[[], list[torch.LongTensor]]
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        """As `propose`, but with all tokens and always with scores, which may cover the frequent tokens alone."""
        logits = self.draft_logits(anchor, num_tokens).to(anchor.device)
        if self.in_order:
            return self._from_left_to_right(prefixes(), logits)
        scores = logits
        if self.do_sample or self.processors.draft:
            scores = self._usable(self.processors.on_rows(logits.float(), draft=True))
        tokens = self._choose(scores)
        return self.head.frequent.to(tokens.device)[tokens] if self._narrow else tokens, scores

    def over_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of `draft` -> `[b, n, V]`."""
        return self.head.spread(scores) if self._narrow else scores

    @staticmethod
    def confidences(scores: torch.Tensor) -> torch.Tensor:
        """Probability `[b, n]` of the likeliest token in each row of `scores [b, n, V]`."""
        scores = scores.float()
        return (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp()

    def _from_left_to_right(
        self, prefixes: list[torch.LongTensor], logits: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        """A processor, or the head itself, looks at the prefix: that of proposal k holds the ones chosen before it."""
        walk, rows, tokens = self.head.walk(self._hidden, logits), [], []
        for index in range(logits.shape[1]):
            previous = torch.cat([prefix[:, -1] for prefix in prefixes])
            scores = walk.scores(index, previous).to(logits.device).float()
            if self.processors.draft_rowwise:
                scores = self.processors.on_rows(scores[:, None], draft=True)
            else:
                alone = [
                    self.processors.of_row(row, draft=True)(prefix, scores[i : i + 1])
                    for i, (row, prefix) in enumerate(zip(self.rows, prefixes))
                ]
                scores = torch.stack(alone)
            rows.append(self._usable(scores))
            tokens.append(self._choose(rows[-1]))
            prefixes = [torch.cat([prefix, token[None]], dim=1) for prefix, token in zip(prefixes, tokens[-1])]
        return torch.cat(tokens, dim=1), torch.cat(rows, dim=1)

    def _usable(self, scores: torch.Tensor) -> torch.Tensor:
        return without_empty_rows(scores) if self.do_sample and self.processors.draft_may_be_empty else scores

    def get_candidates(
        self, input_ids: torch.LongTensor, num_tokens: int | None = None
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """transformers' interface: `input_ids [b, L]` -> ids with proposals `[b, L + num_tokens]`, and q's scores.

        `num_tokens` is `num_proposals` by default.
        """
        num_tokens = self.num_proposals if num_tokens is None else num_tokens
        tokens, scores = self.propose(input_ids[:, -1:], num_tokens, prefixes=lambda: list(input_ids.split(1)))
        return torch.cat([input_ids, tokens], dim=1), scores

    def _choose(self, scores: torch.Tensor) -> torch.LongTensor:
        """One token `[b, n]` for each row of `scores [b, n, V]`."""
        if not self.do_sample:
            return scores.argmax(dim=-1)
        return draw(scores.softmax(dim=-1))[..., 0]

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor | None, num_matches: int
    ) -> None:
        """Apply `num_assistant_tokens_schedule`: two more after a block that was right throughout, else one fewer.

        Each call starts anew: with a length carried over, the same seed would not give the same sampled text.

        Args:
            input_ids, scores: part of transformers' interface, not used.
            num_matches: accepted proposals of the row that accepted the fewest.
        """
        if self.schedule not in ("heuristic", "heuristic_transient") or not self._proposed:
            return
        step = 2 if num_matches == self._proposed else -1
        self.num_proposals = min(max(self.num_proposals + step, 1), self.max_proposals)


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


def _copied_tokens(drafter: DFlashDraftModel) -> int:
    most = drafter.generation_config.prompt_lookup_num_tokens
    if most is None:
        return 2 * _inference_block_size(drafter)
    if most < 0:
        raise DFlashConfigError(
            f"generation_config.prompt_lookup_num_tokens is {most}. Set 0 to copy nothing from the context, a number "
            "to copy at most that many tokens, or None for twice the block."
        )
    return int(most)


def _num_proposals(drafter: DFlashDraftModel, most: int) -> int:
    wanted = drafter.generation_config.num_assistant_tokens
    if wanted is None:
        return most
    if wanted < 1:
        raise DFlashConfigError(
            f"generation_config.num_assistant_tokens is {wanted}; a round proposes at least 1 token. Set 1 to "
            f"{most}, or None for the whole block."
        )
    return min(int(wanted), most)
