"""Which tokens a target says most often: the index that a drafter may draw its proposals from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from datasets import Dataset

from ..errors import DatasetError
from .chat import prepare_dataset


def count_tokens(examples: Dataset) -> Counter[int]:
    """How often each token is supervised in prepared examples (`input_ids`, `loss_mask`)."""
    counter: Counter[int] = Counter()
    for ids, mask in zip(examples["input_ids"], examples["loss_mask"]):
        counter.update(token for token, supervised in zip(ids, mask) if supervised)
    return counter


def most_frequent(counter: Counter[int], size: int) -> torch.LongTensor:
    """The `size` most frequent tokens of a count, most frequent first; int64 `[<= size]`."""
    # Ties go to the smaller id, so that the set does not depend on the order of the data.
    ordered = sorted(counter, key=lambda token: (-counter[token], token))
    return torch.tensor(ordered[:size], dtype=torch.int64)


def frequent_tokens(
    dataset: Dataset,
    *,
    size: int = 8192,
    tokenizer: Any = None,
    max_length: int | None = None,
    enable_thinking: bool | None = None,
) -> torch.LongTensor:
    """The most frequent tokens of the responses in a dataset, for `DFlashDraftModel.frequent_token_ids`.

    Use the data that the drafter was trained on, or other responses of its target.

    Args:
        dataset: in a form that `DFlashTrainer` takes: `messages`, `conversations`, `prompt_ids` and `response_ids`, or
            `input_ids` and `loss_mask`.
        size: tokens in the index; a response that uses fewer gives fewer.
        tokenizer: the target's, needed for messages.
        max_length: longer examples are cut.
        enable_thinking: given to the chat template, if not None.

    Returns:
        int64 `[<= size]`, most frequent first.

    Raises:
        DatasetError: if `size` is below 1, or as `prepare_dataset` does.
    """
    if size < 1:
        raise DatasetError(f"size is {size}; an index holds at least 1 token. A few thousand are usual.")
    prepared = prepare_dataset(dataset, tokenizer, max_length=max_length, enable_thinking=enable_thinking)
    return most_frequent(count_tokens(prepared), size)
