"""The decoding loop: draft, verify, accept, roll back."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..compiled_draft import can_be_compiled, compiled_draft
from ..modeling_dflash import DFlashDraftModel
from ..target import FeatureCapture, check_compatibility, position_limit
from .acceptor import Acceptor
from .candidate_generator import DFlashCandidateGenerator
from .kept_context import KeptContext, keep, recall
from .multi_token_check import check_multi_token_forward
from .outputs import OutputRecorder
from .processors import Processors
from .proposals import Proposer
from .rollback import Rollback
from .round_costs import costs_for
from .sequences import Sequences
from .statistics import GenerationStats
from .stopping import StopRule
from .target_forward import TargetForward

# Tokens that the buffers of a call have room for at first; they grow by doubling.
_FIRST_ROOM = 1024


class DFlashDecoding:
    """One `generate` call.

    Args:
        target: the model that `generate` was called on.
        drafter: its draft model.
        input_ids: `[b, L]`, padded on the left.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: prepared by `generate`.
        synced_gpus: go on with forward passes until all processes have finished (sharded targets).

    Raises:
        TargetMismatchError: if drafter and target do not fit.
        UnsupportedGenerationError: if the target keeps its state elsewhere than in a cache with layers, or cannot run
            several tokens on a recurrent state at once.
    """

    def __init__(
        self,
        target: nn.Module,
        drafter: DFlashDraftModel,
        *,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any,
        model_kwargs: dict[str, Any],
        synced_gpus: bool = False,
    ):
        check_compatibility(drafter.config, target)
        batch_size = input_ids.shape[0]
        self.target, self.drafter = target, drafter
        self.processors = Processors(logits_processor, batch_size=batch_size)
        self.do_sample = bool(generation_config.do_sample)
        self.streamer = streamer
        self.synced_gpus = synced_gpus
        self.stop = StopRule(
            stopping_criteria,
            max_length=generation_config.max_length,
            pad_token_id=getattr(generation_config, "_pad_token_tensor", None),
            batch_size=batch_size,
        )
        self.recorder = OutputRecorder(
            generation_config, config=target.config.get_text_config(decoder=True), batch_size=batch_size
        )
        self.stats = GenerationStats(batch_size=batch_size)
        self.sequences = Sequences(input_ids, room=_FIRST_ROOM)
        self.position_limit = position_limit(target)
        self.capture = FeatureCapture(target, drafter.config.target_layer_ids)
        self.forward = TargetForward(
            target,
            self.capture,
            input_ids=input_ids,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            room=_FIRST_ROOM,
            ahead=drafter.config.block_size,
            position_limit=self.position_limit,
        )
        # The caller may use it again: it has to hold all rows, and the drafter's context stays with it.
        self.cache_is_kept = self.recorder.wanted or getattr(self.forward.cache, "_is_user_defined", False)
        self.rows = list(range(batch_size))
        self.pending = 0
        self.proposer: Proposer | None = None
        self.rollback: Rollback | None = None

    def run(self):
        """Generate; the ids, or the output object that `return_dict_in_generate` asks for."""
        started = time.perf_counter()
        in_training = [module for module in self.drafter.modules() if module.training]
        self.drafter.eval()
        try:
            with self.capture:
                self._prefill()
                with self.target._optimize_model_for_decode():
                    self._decode()
        finally:
            for module in in_training:
                module.training = True
            if self.rollback is not None:
                self.rollback.finish()
                self.generator.context.finish()
            self.stats.new_tokens = sum(self.sequences.lengths) - len(self.sequences.lengths) * self._prompt_length
            self.stats.copied = self.proposer.copied if self.proposer else 0
            self.stats.total_seconds = time.perf_counter() - started
            self.drafter.keep_generation_stats(self.stats)
        if self.streamer is not None:
            self.streamer.end()
        return self.recorder.result(self.sequences.result(self.stop.pad_token), self.forward.cache)

    @property
    def _prompt_length(self) -> int:
        return self.sequences.prompt_length

    def _prefill(self) -> None:
        """Run the prompt and take its token."""
        started = time.perf_counter()
        batch_size = len(self.rows)
        draft_cache, lengths = recall(self.forward.cache, self.drafter, batch_size=batch_size)
        self.generator = DFlashCandidateGenerator(
            self.drafter,
            self.target,
            processors=self.processors,
            do_sample=self.do_sample,
            batch_size=batch_size,
            cache=draft_cache,
            lengths=lengths,
        )
        self.proposer = Proposer(
            self.generator,
            self.sequences,
            costs=lambda rows: costs_for(
                self.drafter, self.target, batch_size=rows, context_length=self._prompt_length
            ),
        )
        outputs = self.forward.prefill()
        if self.forward.compiled is not None and can_be_compiled(self.drafter, self.target):
            self.generator.context.use_graphs(
                compiled_draft(self.drafter, self.forward.compiled.config), columns=self.forward.cache.get_max_length()
            )
        features = self.capture.take(self.generator.device)
        self.rollback = Rollback(self.forward.cache)
        check_multi_token_forward(
            self.target,
            self.forward,
            self.rollback,
            batch_size=batch_size,
            room=self.stop.max_length - self._prompt_length - 1,
        )
        positions, real = self.forward.prompt_positions(features.shape[1])
        self.generator.context.add(features, positions, real=real)
        self.recorder.add_prefill(outputs)
        self.acceptor = Acceptor(
            self.sequences,
            processors=self.processors,
            stop=self.stop,
            recorder=self.recorder,
            streamer=self.streamer,
            do_sample=self.do_sample,
            in_step=batch_size > 1 and not self._rows_are_independent(),
        )
        self.stats.prefill_seconds = time.perf_counter() - started
        nothing = self.sequences.ids[:, :0]
        self.acceptor(self.rows, logits=outputs.logits[:, -1:], draft=nothing, draft_scores=None)
        self._let_rows_leave()

    def _decode(self) -> None:
        """Rounds until all rows have ended."""
        while self._goes_on():
            if not any(self.acceptor.live):  # only to keep other processes company
                self.rollback.remember()
                self._run_target(self.sequences.window(self.rows, self._newest(), 1), self._cached(), logits=1)
                self.rollback.keep(ran=1, kept=0)
            elif self.pending > self.generator.block_size:
                self._replay()
            else:
                self._round()
        if self.cache_is_kept:
            self._finish_cache()

    def _goes_on(self) -> bool:
        finished = not any(self.acceptor.live)
        if not self.synced_gpus:
            return not finished
        return self.target._has_unfinished_sequences(finished, True, device=self.sequences.ids.device)

    def _rows_are_independent(self) -> bool:
        """Whether each row may go as far as its own proposals are right."""
        return (
            self.stop.per_row
            and self.processors.per_row
            and self.streamer is None
            and not self.recorder.of_positions
            and self.rollback.movable
            and self.forward.has_mask
            # A static cache that is returned has its rows where plain generation puts them.
            and (self.rollback.rows_may_leave or not self.cache_is_kept)
        )

    def _newest(self) -> list[int]:
        """Column of the newest token of each row in computation: the anchor, which the target has not run on."""
        return [self.sequences.lengths[row] - 1 for row in self.rows]

    def _cached(self) -> list[int]:
        """Generated tokens of each row in computation that the target's cache holds."""
        cached = [newest - self._prompt_length - self.pending for newest in self._newest()]
        if self.cache_is_kept or not any(self.acceptor.live):
            return cached
        # What a row that has ended would need beyond the others is not kept.
        longest = max(count for count, row in zip(cached, self.rows) if self.acceptor.live[row])
        return [min(count, longest) for count in cached]

    def _budget(self) -> int:
        """The most tokens to propose: never past the maximum length, or the target's table of positions."""
        lengths = [self.sequences.lengths[row] for row in self.rows if self.acceptor.live[row]]
        # One row of each verification is the target's own token. A static cache has no room past the maximum length;
        # elsewhere a row that has less left just stops earlier.
        nearest = min(lengths) if self.rollback.rows_may_leave else max(lengths)
        budget = min(self.proposer.most, self.stop.max_length - nearest - 1)
        if self.position_limit is not None:
            used = self.forward.prompt_positions_used + max(lengths) - self._prompt_length
            budget = min(budget, self.position_limit - used)
        return max(budget, 0)

    def _run_target(self, ids: torch.LongTensor, cached: list[int], *, logits: int) -> Any:
        started = time.perf_counter()
        outputs = self.forward.verify(ids, cached, logits=logits)
        self.stats.verify_seconds += time.perf_counter() - started
        return outputs

    def _replay(self) -> None:
        """Run accepted tokens again that were taken out of a recurrent state with the rejected ones."""
        starts = [newest - self.pending for newest in self._newest()]
        self._run_target(self.sequences.window(self.rows, starts, self.pending), self._cached(), logits=1)
        self.rollback.keep(ran=self.pending, kept=self.pending)
        self.stats.replays += 1
        self.stats.replayed_tokens += self.pending
        self.pending = 0

    def _round(self) -> None:
        """Draft, verify, accept, roll back."""
        started = time.perf_counter()
        sequences, pending = self.sequences, self.pending
        newest = self._newest()
        budget = self._budget()
        if budget > 0:
            proposals, draft_scores = self.proposer.propose(
                self.rows, live=self.acceptor.live, limit=budget, pending=pending
            )
            budget = proposals.shape[1]
            proposals = self.acceptor.with_padding(self.rows, proposals)
        else:
            proposals, draft_scores = sequences.window(self.rows, newest, 0), None
        self.stats.draft_seconds += time.perf_counter() - started
        sequences.reserve(budget + 1)
        ids = sequences.followed_by(proposals, rows=self.rows, starts=[column - pending for column in newest])
        cached = self._cached()
        if budget > 0:
            self.rollback.remember()
        outputs = self._run_target(ids, cached, logits=budget + 1)
        logits = outputs.logits
        if logits.shape[1] > budget + 1:
            logits = logits[:, -budget - 1 :]
        live = list(self.acceptor.live)
        kept = self.acceptor(self.rows, logits=logits, draft=proposals, draft_scores=draft_scores)
        produced = [count for count, row in zip(kept, self.rows) if live[row]]
        self.stats.add_round(produced, proposed=budget)
        if budget > 0:
            self.proposer.observe(self.rows, kept=kept, live=self.acceptor.live)
            self.generator.update_candidate_strategy(ids, None, num_matches=min(produced) - 1)
        self.stats.replayed_tokens += pending * len(self.rows)
        self.recorder.add_round(
            outputs, cache=self.forward.cache, skip=pending, kept=kept[0], rows=pending + budget + 1
        )
        if any(self.acceptor.live) or self.cache_is_kept:
            longest = max(kept)
            features = self.capture.take(self.generator.device).narrow(1, pending, longest)
            # Of one sequence, those of the next block as well: they follow.
            ahead = self.generator.block_size if self.generator.context.contiguous else 0
            positions = self.forward.new_positions([start + pending for start in cached], longest + ahead)
            self.generator.context.add(features, positions, counts=kept)
        self._roll_back(cached, kept, ran=pending + budget + 1)
        self._let_rows_leave()

    def _roll_back(self, cached: list[int], kept: list[int], *, ran: int) -> None:
        """The anchor and the accepted proposals of each row stay; its newest token has not been run."""
        if self.acceptor.in_step or len(self.rows) == 1:
            self.pending = self.rollback.keep(ran=ran, kept=self.pending + kept[0])
            return
        end = self.forward.prompt_columns + max(cached)
        total = self.forward.prompt_columns + max(self._cached())
        self.rollback.move(offsets=[end + count - total for count in kept], total=total)

    def _let_rows_leave(self) -> None:
        """Go on without the rows that have ended, where nothing needs them any more."""
        live = [i for i, row in enumerate(self.rows) if self.acceptor.live[row]]
        if (
            self.acceptor.in_step
            or self.cache_is_kept
            or not (self.rollback.rows_may_leave and self.forward.rows_may_leave)
            or len(live) in (0, len(self.rows))
        ):
            return
        end = self.forward.cache.get_seq_length()
        self.rows = [self.rows[i] for i in live]
        total = self.forward.prompt_columns + max(self._cached())
        self.rollback.move(offsets=[end - total] * len(live), total=total, rows=live)
        self.forward.select(live)
        self.proposer.select(live)

    def _finish_cache(self) -> None:
        """Leave the target's cache as plain generation would, and the drafter's context with it."""
        if self.pending:
            self._replay()
        cached = self._cached()
        if min(cached) < max(cached):
            self._run_padding(cached)
        cache = self.forward.cache
        if not all(getattr(cache, "is_linear", [False])):  # a recurrent state alone has no columns
            self.generator.context.flush()
            context = KeptContext(
                self.drafter,
                cache=self.generator.context.to_keep(),
                lengths=self.generator.context.lengths,
                columns=int(cache.get_seq_length()),
            )
            keep(cache, context)

    def _run_padding(self, cached: list[int]) -> None:
        """Rows that ended early get the states of what plain generation runs: their last token, then padding."""
        longest = max(cached)
        lag = longest - min(cached)
        self.sequences.reserve(lag + 1)
        for row in self.rows:
            self.sequences.ids[row, self.sequences.lengths[row] :] = self.stop.pad_token
        ids = self.sequences.window(self.rows, self._newest(), lag)
        self._run_target(ids, cached, logits=1)
        features = self.capture.take(self.generator.device)[:, :1]
        self.generator.context.add(
            features, self.forward.new_positions(cached, 1), counts=[int(count < longest) for count in cached]
        )
        self.rollback.move(offsets=[longest - count for count in cached], total=self.forward.prompt_columns + longest)
