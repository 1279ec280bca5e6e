"""Which verified tokens are kept, and where each row ends."""

from __future__ import annotations

from typing import Any

import torch

from ..transfers import on_device
from .acceptance import accept_greedy, accept_one, accept_sampled
from .draws import draw
from .outputs import OutputRecorder
from .processors import Processors
from .sequences import Sequences
from .stopping import StopRule


class Acceptor:
    """Turns the target's logits into kept tokens.

    Rows are independent of each other where everything that looks at them takes one row at a time: then each keeps as
    many tokens as were right for it. Otherwise (`in_step`) all rows keep the same number, the smallest, and processors
    and criteria are called as in plain generation: once a position, with all rows.

    Args:
        sequences: ids of the call; kept tokens are appended here.
        processors: logits processors of the call.
        stop: stopping criteria of the call.
        recorder: scores and logits of kept tokens go there.
        streamer: of the call, or None.
        do_sample: sample, or take the largest score.
        in_step: see above.

    Attributes:
        live: for each row, whether it goes on.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        processors: Processors,
        stop: StopRule,
        recorder: OutputRecorder,
        streamer: Any,
        do_sample: bool,
        in_step: bool,
    ):
        self.sequences = sequences
        self.processors = processors
        self.stop = stop
        self.recorder = recorder
        self.streamer = streamer
        self.do_sample = do_sample
        self.in_step = in_step
        self.live = [True] * sequences.batch_size

    def __call__(
        self, rows: list[int], *, logits: torch.Tensor, draft: torch.LongTensor, draft_scores: torch.Tensor | None
    ) -> list[int]:
        """Append what a verification gives.

        Args:
            rows: which rows of the call were verified, n of them.
            logits: `[n, k + 1, V]`.
            draft: `[n, k]` proposals.
            draft_scores: `[n, k, V]` scores whose softmax the proposals were drawn from, when sampling; None if they
                were not drawn but looked up.

        Returns:
            how many tokens each row keeps: 1 to k + 1, or 0 if it had ended before.
        """
        if self.in_step:
            return self._all_in_step(logits, draft, draft_scores)
        if self.processors.rowwise:
            return self._all_at_once(rows, logits, draft, draft_scores)
        return [
            self._in_order(row, logits[i], draft[i], None if draft_scores is None else draft_scores[i])
            if self.live[row]
            else 0
            for i, row in enumerate(rows)
        ]

    def with_padding(self, rows: list[int], proposals: torch.LongTensor) -> torch.LongTensor:
        """`proposals [n, k]` with the padding that rows in step get after their end, so that the target runs on it."""
        ended = [i for i, row in enumerate(rows) if not self.live[row]]
        if not ended or not self.in_step or self.stop.pad_token is None:
            return proposals
        return proposals.index_fill(0, on_device(ended, proposals.device), self.stop.pad_token)

    def _all_at_once(
        self, rows: list[int], logits: torch.Tensor, draft: torch.LongTensor, draft_scores: torch.Tensor | None
    ) -> list[int]:
        ids = self.sequences.ids
        raw = logits.to(device=ids.device)
        plain_greedy = not self.do_sample and not self.processors.all and not self.recorder.wanted
        scores = raw if plain_greedy else self.processors.on_rows(raw.float(), draft=False)
        if not self.do_sample:
            tokens = accept_greedy(draft=draft, scores=scores)
        elif draft.shape[1]:
            tokens = accept_sampled(draft=draft, draft_scores=draft_scores, scores=scores)
        else:
            tokens = draw(scores[:, 0].softmax(dim=-1)).tolist()
        kept, wanted = [], self.recorder.wanted
        live = [i for i, row in enumerate(rows) if self.live[row]]
        self.sequences.write([rows[i] for i in live], [tokens[i] for i in live])
        for i, row in enumerate(rows):
            if not self.live[row]:
                kept.append(0)
                continue
            count = 0
            for token in tokens[i]:
                count += 1
                of_token = (scores[i, count - 1], raw[i, count - 1]) if wanted else (None, None)
                if self._keep(row, token, *of_token):
                    break
            kept.append(count)
        return kept

    def _in_order(
        self, row: int, logits: torch.Tensor, draft: torch.LongTensor, draft_scores: torch.Tensor | None
    ) -> int:
        """One row, position by position, for processors that look at the prefix. `logits [k + 1, V]`."""
        proposals: list[int | None] = [*draft.tolist(), None]
        for position, proposal in enumerate(proposals):
            raw = logits[position : position + 1].to(device=self.sequences.ids.device, dtype=torch.float32, copy=True)
            kept_logits = raw[0].clone() if self.recorder.wants_logits else raw[0]
            scores = self.processors.of_row(row, draft=False)(self.sequences.prefix(row), raw)[0]
            token, accepted = accept_one(
                draft=proposal,
                draft_scores=None if draft_scores is None or proposal is None else draft_scores[position],
                scores=scores,
                do_sample=self.do_sample,
            )
            self.sequences.write([row], [[token]])
            if self._keep(row, token, scores, kept_logits) or not accepted:
                return position + 1
        return len(proposals)

    def _keep(self, row: int, token: int, scores: torch.Tensor | None, logits: torch.Tensor | None) -> bool:
        """Count, record and stream one token that is in its row's ids already; whether the row ends with it.

        Scores and logits `[V]` may be None where nothing is recorded.
        """
        self.sequences.lengths[row] += 1
        self.recorder.add_token(row, scores, logits)
        # The criteria that may be asked about one of several rows do not look at scores.
        seen = self.recorder.scores_so_far() if self.stop.others and len(self.live) == 1 else None
        stopped = self.stop.of_row(self.sequences, row, token, seen)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        self.live[row] = not stopped
        return stopped

    def _all_in_step(
        self, logits: torch.Tensor, draft: torch.LongTensor, draft_scores: torch.Tensor | None
    ) -> list[int]:
        """All rows, position by position, until one of them differs from its draft."""
        batch, count = draft.shape
        # One transfer a round; the position loop below needs the proposals on the host.
        proposals = draft.tolist()
        for position in range(count + 1):
            raw = logits[:, position].to(device=self.sequences.ids.device, dtype=torch.float32, copy=True)
            kept_logits = raw.clone() if self.recorder.wants_logits else raw
            scores = self.processors.all(self.sequences.aligned(), raw)
            # One transfer a position: the host decides where the rows stop, as the processors must be called in order.
            chosen = None if self.do_sample else scores.argmax(dim=-1).tolist()
            tokens, agreed = [], position < count
            for row in range(batch):
                proposal = proposals[row][position] if position < count else None
                if not self.live[row] and self.stop.pad_token is not None:
                    tokens.append(self.stop.pad_token)
                    # The target ran on the proposal, and its state would stay under the padding.
                    agreed = agreed and proposal == self.stop.pad_token
                    continue
                if chosen is not None:
                    token, accepted = chosen[row], chosen[row] == proposal
                else:
                    token, accepted = accept_one(
                        draft=proposal,
                        draft_scores=None if draft_scores is None or proposal is None else draft_scores[row, position],
                        scores=scores[row],
                        do_sample=True,
                    )
                tokens.append(token)
                agreed = agreed and accepted
            self.sequences.write(list(range(batch)), [[token] for token in tokens])
            for row in range(batch):
                self.sequences.lengths[row] += 1
                self.recorder.add_token(row, scores[row], kept_logits[row])
            stopped = self.stop.of_batch(self.sequences.aligned(), self.recorder.scores_so_far())
            self.live = [live and not end for live, end in zip(self.live, stopped)]
            if self.streamer is not None:
                self.streamer.put(torch.tensor(tokens))
            if not agreed or not any(self.live):
                return [position + 1] * batch
        return [count + 1] * batch
