"""Training examples: chat messages or token ids -> `input_ids` and a `loss_mask` over assistant tokens."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from ..errors import DatasetError

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "tool": "tool",
    "user": "user",
    "assistant": "assistant",
}


def prepare_dataset(dataset: Dataset, tokenizer: Any = None, *, max_length: int | None = None) -> Dataset:
    """A dataset with exactly `input_ids` and `loss_mask` (lists of equal length), from one of these column sets:

    * `input_ids` and `loss_mask`: taken as they are;
    * `prompt_ids` and `response_ids`: joined, loss on the response;
    * `messages` (OpenAI form) or `conversations` (ShareGPT form): rendered by the tokenizer's chat template, loss on
      assistant tokens only.

    Args:
        dataset: a `datasets.Dataset`.
        tokenizer: needed for messages only.
        max_length: longer examples are cut at the end.

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
            return encode_messages(normalize_messages(row.get("messages") or row["conversations"]), tokenizer)
    else:
        raise DatasetError(
            f"The dataset has the columns {sorted(columns)}. It needs `messages`, or `conversations`, or `input_ids` "
            "with `loss_mask`, or `prompt_ids` with `response_ids`."
        )

    def row_to_example(row: dict[str, Any]) -> dict[str, list[int]]:
        ids, mask = convert(row)
        if len(ids) != len(mask):
            raise DatasetError(f"An example has {len(ids)} input_ids but {len(mask)} loss_mask entries.")
        return {"input_ids": list(ids)[:max_length], "loss_mask": [int(value) for value in mask][:max_length]}

    prepared = dataset.map(row_to_example, remove_columns=dataset.column_names, desc="Preparing examples")
    usable = prepared.filter(lambda row: has_anchor(row["loss_mask"]), desc="Dropping examples without anchors")
    if len(usable) == 0:
        raise DatasetError(
            f"None of the {len(prepared)} examples has two neighbouring supervised tokens, so there is nothing to "
            "train on. Check that the chat template marks assistant turns, that loss_mask is 1 on the response, and "
            f"that max_length ({max_length}) does not cut the responses off."
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


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI form (`role`, `content`) from OpenAI or ShareGPT (`from`, `value`) messages.

    Raises:
        DatasetError: for an unknown ShareGPT role.
    """
    out = []
    for message in messages:
        if "from" not in message:
            out.append({key: value for key, value in message.items() if value is not None})
            continue
        role = _SHAREGPT_ROLES.get(message["from"])
        if role is None:
            raise DatasetError(f"Unknown speaker {message['from']!r}; known: {', '.join(sorted(_SHAREGPT_ROLES))}.")
        out.append({"role": role, "content": message["value"]})
    return out


def encode_messages(messages: list[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of a rendered conversation and the mask of its assistant tokens.

    The template's `{% generation %}` marks are used where it has them. Otherwise the text up to each assistant turn,
    rendered with the generation prompt, must be a prefix of the text that includes the turn; what it adds is the
    response.

    Raises:
        DatasetError: if neither way works with this template.
    """
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])
    if not tokenizer.is_fast:
        raise DatasetError(
            f"The chat template has no generation marks and {type(tokenizer).__name__} gives no character offsets, so "
            "the response cannot be marked. Use a fast tokenizer, or give `input_ids` and `loss_mask`."
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        through = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if not (through.startswith(before) and text.startswith(through)):
            raise DatasetError(
                "The chat template rewrites earlier turns, so the response of turn "
                f"{index} cannot be found in the rendered text. Add {{% generation %}} marks to the template, or give "
                "the dataset as `input_ids` and `loss_mask`."
            )
        spans.append((len(before), len(through.rstrip())))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        int(end > start and any(first <= start and end <= last for first, last in spans))
        for start, end in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), mask


def _from_ids(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    return row["input_ids"], row["loss_mask"]


def _from_prompt_and_response(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    prompt, response = row["prompt_ids"], row["response_ids"]
    return [*prompt, *response], [0] * len(prompt) + [1] * len(response)
