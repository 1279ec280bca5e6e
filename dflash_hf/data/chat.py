"""Training examples: chat messages or token ids -> `input_ids` and a `loss_mask` over assistant tokens."""

from __future__ import annotations

import re
from typing import Any

from datasets import Dataset
from jinja2.exceptions import TemplateError

from ..errors import DatasetError
from .messages import Messages, normalize_messages, normalize_tools

Example = tuple[list[int], list[int]]

_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\b")


def prepare_dataset(
    dataset: Dataset, tokenizer: Any = None, *, max_length: int | None = None, enable_thinking: bool | None = None
) -> Dataset:
    """A dataset with exactly `input_ids` and `loss_mask` (lists of equal length), from one of these column sets:

    * `input_ids` and `loss_mask`: taken as they are;
    * `prompt_ids` and `response_ids`: joined, loss on the response;
    * `messages` (OpenAI form) or `conversations` (ShareGPT form), with `tools` where there are some: rendered by the
      tokenizer's chat template, loss on assistant tokens only. A conversation gives several examples where the
      template renders earlier turns differently (see `encode_conversation`).

    Args:
        dataset: a `datasets.Dataset`.
        tokenizer: needed for messages only.
        max_length: longer examples are cut at the end.
        enable_thinking: given to the chat template, if not None.

    Raises:
        DatasetError: unknown columns, lengths that differ, a template that cannot mark the response, or a dataset in
            which no example has two neighbouring supervised tokens.
    """
    if not isinstance(dataset, Dataset):
        raise DatasetError(
            f"The data is a {type(dataset).__name__}; it must be a `datasets.Dataset` (Dataset.from_list makes one of "
            "a list, Dataset.from_generator of a stream)."
        )
    columns = set(dataset.column_names)
    if {"input_ids", "loss_mask"} <= columns:
        convert = _from_ids
    elif {"prompt_ids", "response_ids"} <= columns:
        convert = _from_prompt_and_response
    elif columns & {"messages", "conversations"}:
        if tokenizer is None:
            raise DatasetError("The dataset holds chat messages, which need a tokenizer: pass `processing_class`.")
        if not getattr(tokenizer, "chat_template", None):
            raise DatasetError(
                f"{type(tokenizer).__name__} has no chat template, so messages cannot be rendered. Set "
                "`tokenizer.chat_template`, or give the dataset as `input_ids` and `loss_mask`."
            )

        def convert(row):
            messages = normalize_messages(row.get("messages") or row["conversations"])
            tools = normalize_tools(row.get("tools"))
            return encode_conversation(messages, tokenizer, tools=tools, enable_thinking=enable_thinking)
    else:
        raise DatasetError(
            f"The dataset has the columns {sorted(columns)}. It needs `messages`, or `conversations`, or `input_ids` "
            "with `loss_mask`, or `prompt_ids` with `response_ids`."
        )

    def rows_to_examples(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        prepared: dict[str, list[list[int]]] = {"input_ids": [], "loss_mask": []}
        for values in zip(*batch.values()):
            for ids, mask in convert(dict(zip(batch, values))):
                if len(ids) != len(mask):
                    raise DatasetError(f"An example has {len(ids)} input_ids but {len(mask)} loss_mask entries.")
                prepared["input_ids"].append(list(ids)[:max_length])
                prepared["loss_mask"].append([int(value) for value in mask][:max_length])
        return prepared

    prepared = dataset.map(
        rows_to_examples, batched=True, remove_columns=dataset.column_names, desc="Preparing examples"
    )
    usable = prepared.filter(lambda row: has_anchor(row["loss_mask"]), desc="Dropping examples without anchors")
    if len(usable) == 0:
        template = "" if tokenizer is None or convert is _from_ids else f" The tokenizer: {_name_template(tokenizer)}."
        raise DatasetError(
            f"None of the {len(prepared)} examples has two neighbouring supervised tokens, so there is nothing to "
            "train on. Check that the chat template marks assistant turns, that loss_mask is 1 on the response, and "
            f"that max_length ({max_length}) does not cut the responses off.{template}"
        )
    return usable


def check_token_ids(dataset: Dataset, num_rows: int) -> None:
    """Check that every token id of prepared examples is a row of the target's embedding.

    Raises:
        DatasetError: naming the first that is not.
    """
    for number, ids in enumerate(dataset["input_ids"]):
        if min(ids) < 0 or max(ids) >= num_rows:
            wrong = next(token for token in ids if not 0 <= token < num_rows)
            raise DatasetError(
                f"Example {number} holds token id {wrong}, but the target's embedding has {num_rows} rows. The data "
                "was tokenised for another model; tokenise it with the target's tokenizer."
            )


def has_anchor(loss_mask: list[int]) -> bool:
    """Whether any position i has i and i + 1 supervised."""
    return any(first and second for first, second in zip(loss_mask, loss_mask[1:]))


def encode_conversation(
    messages: Messages, tokenizer: Any, *, tools: list[Any] | None = None, enable_thinking: bool | None = None
) -> list[Example]:
    """Token ids of a rendered conversation and the mask of its assistant tokens: one example, or one an answer.

    The template's `{% generation %}` marks are used where it has them. Otherwise the text up to each assistant turn,
    rendered with the generation prompt, must be a prefix of the text that includes the turn; what it adds is the
    response. Where the whole text does not begin with these texts, because the template strips thinking from earlier
    turns, every answer becomes an example of its own, rendered as the target sees it when it answers.

    Args:
        messages: in OpenAI form.
        tokenizer: with a chat template.
        tools: descriptions for the template.
        enable_thinking: given to the template, if not None.

    Raises:
        DatasetError: if neither way works with this template, or it leaves every token of the answers unmarked.
    """
    template = tokenizer.get_chat_template(tools=tools)
    options = {"tools": tools} | ({} if enable_thinking is None else {"enable_thinking": enable_thinking})
    try:
        if _GENERATION_MARK.search(template):
            encoded = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **options
            )
            examples = [(list(encoded["input_ids"]), list(encoded["assistant_masks"]))]
        else:
            examples = _encode_by_prefixes(messages, tokenizer, options)
    except TemplateError as error:
        raise DatasetError(
            f"The chat template refuses a conversation of {[message['role'] for message in messages]}: {error}. "
            f"The tokenizer: {_name_template(tokenizer)}."
        ) from error
    answered = any(message["role"] == "assistant" and message["content"] for message in messages)
    if answered and not any(any(mask) for _, mask in examples):
        raise DatasetError(
            "The chat template marks no token of the assistant's answers, so the loss mask is all zero. Mend its "
            "{% generation %} marks, or take them out (the answers are then found by rendering prefixes). The "
            f"tokenizer: {_name_template(tokenizer)}."
        )
    return examples


def _encode_by_prefixes(messages: Messages, tokenizer: Any, options: dict[str, Any]) -> list[Example]:
    if not tokenizer.is_fast:
        raise DatasetError(
            f"The chat template has no generation marks and {type(tokenizer).__name__} gives no character offsets, so "
            "the response cannot be marked. Use a fast tokenizer, or give `input_ids` and `loss_mask`."
        )

    def render(part: Messages, *, add_generation_prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            part, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )

    spans, texts = [], []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], add_generation_prompt=True)
        through = render(messages[: index + 1])
        if not through.startswith(before):
            raise DatasetError(
                "The chat template renders an answer differently from the prompt that asks for it, so the response of "
                f"turn {index} cannot be found in the text. Add {{% generation %}} marks to the template, or give the "
                f"dataset as `input_ids` and `loss_mask`. The tokenizer: {_name_template(tokenizer)}."
            )
        spans.append((len(before), len(through.rstrip())))
        texts.append(through)
    whole = render(messages)
    if all(whole.startswith(text) for text in texts):
        return [_mark(whole, spans, tokenizer)]
    return [_mark(text, [span], tokenizer) for text, span in zip(texts, spans)]


def _mark(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> Example:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        int(end > start and any(first <= start and end <= last for first, last in spans))
        for start, end in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), mask


def _name_template(tokenizer: Any) -> str:
    """Whose template it is, and how it begins."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    template = tokenizer.chat_template
    return f"{name}, its chat template: {str(template)[:120]!r}" if template else name


def _from_ids(row: dict[str, Any]) -> list[Example]:
    return [(row["input_ids"], row["loss_mask"])]


def _from_prompt_and_response(row: dict[str, Any]) -> list[Example]:
    prompt, response = row["prompt_ids"], row["response_ids"]
    return [([*prompt, *response], [0] * len(prompt) + [1] * len(response))]
