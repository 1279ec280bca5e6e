"""A target answers the prompts of a dataset: the best training data for its drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from ..errors import DatasetError
from .answers import AnswerFile
from .messages import Messages
from .prompts import Conversation

# Prompts are sorted by length within this many batches: little padding, and a file that is stopped early is still
# close to a random part of the data.
BATCHES_IN_A_WINDOW = 16

# transformers 5.24 renamed generate's `past_key_values` to `cache`.
_CACHE = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else "past_key_values"

# Takes prompts (token ids); gives (number of the prompt, ids of the answer, whether it ended by itself), in any order.
Answerer = Callable[[list[list[int]]], Iterator[tuple[int, list[int], bool]]]


@dataclass
class Progress:
    """What a run has done so far.

    Attributes:
        answers: rows written by this run.
        tokens: their response tokens.
        cut: those that reached the limit.
        too_long: prompts left out because they and an answer do not fit into the target's context.
    """

    answers: int = 0
    tokens: int = 0
    cut: int = 0
    too_long: int = 0


@dataclass
class _Turn:
    conversation: Conversation
    number: int
    messages: Messages
    prompt_ids: list[int]


def regenerate(
    conversations: Iterable[Conversation],
    *,
    tokenizer: Any,
    answerer: Answerer,
    file: AnswerFile,
    window: int,
    max_prompt_tokens: int | None = None,
    enable_thinking: bool | None = None,
) -> Iterator[Progress]:
    """Answer every conversation that `file` lacks, turn by turn, and yield the progress after each answer.

    A row holds `index`, `turn`, `messages` (answer included), `input_ids` and `loss_mask` (1 on the answer, its end
    token included), and `finished`: False for an answer that reached the length limit. Every turn is a row of its own,
    because templates may render earlier turns differently once a new one follows. A cut answer ends its conversation.

    Args:
        conversations: from `read_conversations`.
        tokenizer: the target's, with a chat template.
        answerer: `local_answerer(...)` or a server's.
        file: where the rows go.
        window: prompts handed to `answerer` at once.
        max_prompt_tokens: longer prompts are left out and counted.
        enable_thinking: given to the chat template, if not None.

    Raises:
        DatasetError: if the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DatasetError(
            f"{type(tokenizer).__name__} has no chat template, so prompts cannot be rendered. Set "
            "`tokenizer.chat_template`, or use an instruction-tuned target."
        )
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    progress = Progress()

    def turn_of(conversation: Conversation, number: int, before: Messages) -> _Turn | None:
        messages = [*before, *conversation.turns[number]]
        encoded = tokenizer.apply_chat_template(
            messages, tools=conversation.tools, add_generation_prompt=True, return_dict=True, **options
        )
        ids = list(encoded["input_ids"])
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            progress.too_long += 1
            return None
        return _Turn(conversation, number, messages, ids)

    def missing() -> Iterator[_Turn]:
        for conversation in conversations:
            done = file.turns_of(conversation.index)
            before: Messages = []
            if 0 < done < len(conversation.turns):
                last = file.answer(conversation.index, done - 1)
                if not last["finished"]:
                    continue
                before = last["messages"]
            if done < len(conversation.turns) and (turn := turn_of(conversation, done, before)) is not None:
                yield turn

    source = missing()
    follow_ups: list[_Turn] = []
    while True:
        batch = follow_ups[:window]
        follow_ups = follow_ups[window:]
        batch += islice(source, window - len(batch))
        if not batch:
            yield progress  # the last prompts may have been too long
            return
        for number, ids, finished in answerer([turn.prompt_ids for turn in batch]):
            turn = batch[number]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            messages = [*turn.messages, {"role": "assistant", "content": text}]
            file.append(
                {
                    "index": turn.conversation.index,
                    "turn": turn.number,
                    "messages": messages,
                    "input_ids": [*turn.prompt_ids, *ids],
                    "loss_mask": [0] * len(turn.prompt_ids) + [1] * len(ids),
                    "finished": finished,
                }
            )
            progress.answers += 1
            progress.tokens += len(ids)
            progress.cut += not finished
            following = turn.number + 1
            if finished and following < len(turn.conversation.turns):
                next_turn = turn_of(turn.conversation, following, messages)
                follow_ups += [] if next_turn is None else [next_turn]
            yield progress


def local_answerer(
    target: nn.Module,
    *,
    batch_size: int,
    max_new_tokens: int,
    pad_token_id: int = 0,
    generate_options: dict[str, Any] | None = None,
) -> Answerer:
    """Answers by batched `target.generate`, the longest prompts first.

    Args:
        target: a causal language model.
        batch_size: prompts in one batch.
        max_new_tokens: length limit of an answer.
        pad_token_id: any id; padding is masked.
        generate_options: further options of `generate`, sampling for example.
    """
    options = {"do_sample": False, "pad_token_id": pad_token_id, **(generate_options or {})}

    def answer(prompts: list[list[int]]) -> Iterator[tuple[int, list[int], bool]]:
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for row, ids, finished in _answer_batch(target, [prompts[n] for n in batch], max_new_tokens, options):
                yield batch[row], ids, finished

    return answer


class _HalfDone(StoppingCriteria):
    """Stops a batch once at most half of its rows still run, so that finished rows are not computed any further."""

    def __init__(self, eos_token_ids: torch.Tensor, rows: int):
        self.eos_token_ids = eos_token_ids
        self.done = torch.zeros(rows, dtype=torch.bool, device=eos_token_ids.device)

    def __call__(self, input_ids, scores, **kwargs):
        self.done |= torch.isin(input_ids[:, -1], self.eos_token_ids)
        # A comparison on the device: `generate` reads the result of all criteria at once.
        return (self.done.sum() * 2 >= len(self.done)).expand(len(self.done))


class _RoomyLayer(DynamicLayer):
    """A `DynamicLayer` whose tensors are views into buffers with room to spare, so that a step copies one token.

    transformers' own concatenates everything in every step: a quarter of the time of a batch of 32 on a CPU.
    """

    def __init__(self):
        super().__init__()
        self._key_buffer = self._value_buffer = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._key_buffer, self.keys = _append(self._key_buffer, self.keys, key_states)
        self._value_buffer, self.values = _append(self._value_buffer, self.values, value_states)
        return self.keys, self.values


def _append(buffer: torch.Tensor | None, held: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffer and its filled part with `new [b, h, n, d]` at the end; a new one if it is full or `held` is elsewhere."""
    length = held.shape[-2] if held.numel() else 0
    end = length + new.shape[-2]
    if buffer is None or buffer.shape[-2] < end or (length and held.data_ptr() != buffer.data_ptr()):
        buffer = new.new_empty(*new.shape[:2], end + max(end // 2, 64), new.shape[-1])
        if length:
            buffer[..., :length, :] = held
    buffer[..., length:end, :] = new
    return buffer, buffer[..., :end, :]


def _roomy_cache(target: nn.Module) -> DynamicCache:
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _answer_batch(
    target: nn.Module, prompts: list[list[int]], max_new_tokens: int, options: dict[str, Any]
) -> Iterator[tuple[int, list[int], bool]]:
    """(row, answer, finished) of a batch; rows that finish leave it and the rest goes on with the same cache."""
    device = target.get_input_embeddings().weight.device
    eos = target.generation_config.eos_token_id
    eos = torch.tensor([] if eos is None else eos, dtype=torch.int64, device=device).reshape(-1)
    rows = [torch.tensor(ids) for ids in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left").to(device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left").to(device)
    width, limit = ids.shape[1], ids.shape[1] + max_new_tokens
    running = torch.arange(len(rows), device=device)
    cache = _roomy_cache(target)
    while len(running):
        criterion = _HalfDone(eos, len(running))
        output = target.generate(
            input_ids=ids,
            attention_mask=mask,
            cache_implementation=None,  # the default of some targets, which a cache of ours would contradict
            **{_CACHE: cache},
            max_new_tokens=limit - ids.shape[1],
            stopping_criteria=StoppingCriteriaList([criterion]),
            return_dict_in_generate=True,
            **options,
        )
        ids = output.sequences
        at_limit = ids.shape[1] >= limit
        for row in range(len(running)) if at_limit else criterion.done.nonzero().flatten().tolist():
            answer = ids[row, width:]
            ends = torch.isin(answer, eos).nonzero().flatten().tolist()
            kept = answer[: ends[0] + 1] if ends else answer
            yield int(running[row]), kept.tolist(), bool(ends)
        if at_limit:
            return
        rest = (~criterion.done).nonzero().flatten()
        mask = torch.cat([mask, mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])], dim=1)
        running, ids, mask = running[rest], ids[rest], mask[rest]
        if len(rest):
            cache.reorder_cache(rest)  # selects the rows that go on
