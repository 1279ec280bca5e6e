"""The decoding loop: draft, verify, accept, roll back. One prompt at a time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..errors import UnsupportedGenerationError
from ..modeling_dflash import DFlashDraftModel
from ..target import FeatureCapture, check_compatibility, position_limit
from .acceptance import accept_greedy, accept_one, accept_sampled
from .candidate_generator import DFlashCandidateGenerator
from .outputs import OutputRecorder
from .processors import Processors
from .rollback import forget, prepare_for_rollback
from .statistics import GenerationStats
from .target_forward import TargetForward

# Tokens that the buffers of a call have room for at first; they grow by doubling.
_FIRST_ROOM = 1024


class StopRule:
    """Decides after which token to stop; EOS and lengths on the host, any other criterion on every accepted prefix.

    Args:
        criteria: prepared by `generate`.
        max_length: of the generation config.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int):
        self.max_length = max_length
        self.eos: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            else:
                self.others.append(criterion)

    def __call__(self, sequence: torch.LongTensor, token: int, scores: tuple | None) -> bool:
        """Whether generation ends with `token`, the last one of `sequence [1, n]`."""
        if self.others and bool(self.others(sequence, scores).all()):
            return True
        return token in self.eos or sequence.shape[1] >= self.max_length


class DFlashDecoding:
    """One `generate` call.

    Args:
        target: the model that `generate` was called on.
        drafter: its draft model.
        input_ids: `[1, L]`.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: prepared by `generate`.

    Raises:
        TargetMismatchError: if drafter and target do not fit.
        UnsupportedGenerationError: for more than one prompt, or a cache that cannot be cropped.
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
    ):
        if input_ids.shape[0] != 1:
            raise UnsupportedGenerationError(
                f"Generation with a DFlash drafter takes one prompt at a time, got a batch of {input_ids.shape[0]} (a "
                "batch of prompts, or num_return_sequences). Call generate once for each."
            )
        check_compatibility(drafter.config, target)
        self.target, self.drafter = target, drafter
        self.processors = Processors(logits_processor)
        self.generation_config = generation_config
        self.do_sample = bool(generation_config.do_sample)
        self.streamer = streamer
        self.stop = StopRule(stopping_criteria, generation_config.max_length)
        self.recorder = OutputRecorder(generation_config)
        self.stats = GenerationStats()
        self.length = input_ids.shape[1]
        self.prompt_length = self.length
        self.position_limit = position_limit(target)
        self.ids = torch.cat([input_ids, input_ids.new_zeros((1, _FIRST_ROOM))], dim=1)
        self.capture = FeatureCapture(target, drafter.config.target_layer_ids)
        self.forward = TargetForward(
            target,
            self.capture,
            input_ids=input_ids,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            room=_FIRST_ROOM,
        )

    def run(self):
        """Generate; the ids, or the output object that `return_dict_in_generate` asks for."""
        started = time.perf_counter()
        training = self.drafter.training
        self.drafter.eval()
        try:
            with self.capture:
                self._generate()
        finally:
            self.drafter.train(training)
            self.stats.new_tokens = self.length - self.prompt_length
            self.stats.total_seconds = time.perf_counter() - started
            self.drafter.keep_generation_stats(self.stats)
        if self.streamer is not None:
            self.streamer.end()
        return self.recorder.result(self.ids[:, : self.length], self.forward.cache)

    def _generate(self) -> None:
        generator = DFlashCandidateGenerator(
            self.drafter, self.target, processors=self.processors, do_sample=self.do_sample
        )
        started = time.perf_counter()
        outputs = self.forward.prefill()
        prepare_for_rollback(self.forward.cache)
        features = self.capture.take(generator.device)
        generator.add_context(features, self.forward.prompt_positions(features.shape[1]))
        self.recorder.add_prefill(outputs)
        self.stats.prefill_seconds = time.perf_counter() - started
        nothing = self.ids[:, :0]
        _, stopped = self._accept(outputs.logits[:, -1:], nothing, None)
        while not stopped:
            # One row of each verification is the target's own token, so this never passes the maximum length.
            budget = min(generator.max_proposals, self.stop.max_length - self.length - 1)
            if self.position_limit is not None:
                budget = max(min(budget, self.position_limit - self.length), 0)
            stopped = self._round(generator, budget)

    def _round(self, generator: DFlashCandidateGenerator, num_tokens: int) -> bool:
        """Draft `num_tokens`, verify, accept, roll back; whether generation ends here."""
        started = time.perf_counter()
        if self.length + num_tokens + 1 > self.ids.shape[1]:
            self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)], dim=1)
        sequence, draft_scores = self.ids[:, : self.length], None
        if num_tokens > 0:
            sequence, draft_scores = generator.get_candidates(sequence, num_tokens)
        drafted = time.perf_counter()
        done = self.length - self.prompt_length - 1  # the newest token is not in the cache yet
        outputs = self.forward.verify(sequence, done)
        verified = time.perf_counter()
        self.stats.draft_seconds += drafted - started
        self.stats.verify_seconds += verified - drafted
        kept, stopped = self._accept(outputs.logits, sequence[:, self.length :], draft_scores)
        self.recorder.add_round(outputs, cache=self.forward.cache, kept=kept, rows=num_tokens + 1)
        self.stats.proposed.append(num_tokens)
        self.stats.produced.append(kept)
        # The anchor and the accepted proposals stay; the newest token has not been run.
        forget(self.forward.cache, num_tokens + 1 - kept)
        if not stopped:
            features = self.capture.take(generator.device)[:, :kept]
            generator.add_context(features, self.forward.new_positions(done, kept))
        return stopped

    def _accept(
        self, logits: torch.Tensor, draft: torch.LongTensor, draft_scores: torch.Tensor | None
    ) -> tuple[int, bool]:
        """Append the tokens that this verification gives; how many, and whether one of them ends the generation.

        Args:
            logits: `[1, k + 1, V]`.
            draft: `[1, k]`.
            draft_scores: `[1, k, V]` when sampling.
        """
        if not self.processors.rowwise:
            return self._accept_in_order(logits, draft, draft_scores)
        prefix = self.ids[:, : self.length]
        raw = logits.to(device=self.ids.device)
        plain_greedy = not self.do_sample and not self.processors.all and not self.recorder.wanted
        scores = raw if plain_greedy else self.processors.on_rows(prefix, raw.float(), draft=False)
        if not self.do_sample:
            (tokens,) = accept_greedy(draft=draft, scores=scores)
        elif draft.shape[1]:
            (tokens,) = accept_sampled(draft=draft, draft_scores=draft_scores, scores=scores)
        else:
            tokens = torch.multinomial(scores[:, 0].softmax(dim=-1), num_samples=1)[0].tolist()
        self.ids[0, self.length : self.length + len(tokens)] = torch.tensor(tokens, device=self.ids.device)
        for count, token in enumerate(tokens, start=1):
            if self._keep(token, scores[:, count - 1], raw[:, count - 1]):
                return count, True
        return len(tokens), False

    def _accept_in_order(
        self, logits: torch.Tensor, draft: torch.LongTensor, draft_scores: torch.Tensor | None
    ) -> tuple[int, bool]:
        """As `_accept`, position by position: a processor may keep state, so it sees accepted prefixes only."""
        proposals: list[int | None] = [*draft[0].tolist(), None]
        for row, proposal in enumerate(proposals):
            raw = logits[:, row].to(device=self.ids.device, dtype=torch.float32, copy=True)
            kept_logits = raw.clone() if self.recorder.logits is not None else raw
            scores = self.processors.all(self.ids[:, : self.length], raw)
            token, accepted = accept_one(
                draft=proposal,
                draft_scores=None if draft_scores is None or proposal is None else draft_scores[0, row],
                scores=scores[0],
                do_sample=self.do_sample,
            )
            self.ids[0, self.length] = token
            if self._keep(token, scores, kept_logits):
                return row + 1, True
            if not accepted:
                return row + 1, False
        return len(proposals), False

    def _keep(self, token: int, scores: torch.Tensor, logits: torch.Tensor) -> bool:
        """Count, record and stream one token that is in `ids` already; whether generation ends with it."""
        self.length += 1
        self.recorder.add_token(scores, logits.float() if self.recorder.logits is not None else logits)
        stopped = self.stop(self.ids[:, : self.length], token, self.recorder.scores)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        return stopped
