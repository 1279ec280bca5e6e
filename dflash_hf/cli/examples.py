"""Training examples from the command line's options, for the commands that need them, and a look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from ..errors import DFlashError
from .common import console


def load_sources(data: list[str], *, split: str, eval_data: list[str] | None, eval_split: str | None):
    """The rows of `--data` and of `--eval-data` (None where it is not given), as lists of datasets."""
    from ..data.sources import load_rows

    training = [load_rows(name, split=split) for name in data]
    return training, [load_rows(name, split=eval_split or split) for name in eval_data] if eval_data else None


def prepare_examples(
    sources: list[Any], *, tokenizer: Any, max_length: int, enable_thinking: bool | None, num_rows: int | None
):
    """Prepared examples (`input_ids`, `loss_mask`) of several datasets, one after the other.

    Args:
        sources: the datasets.
        tokenizer: the target's.
        max_length: longer examples are cut.
        enable_thinking: given to the chat template, if not None.
        num_rows: rows of the target's embedding, so that larger ids are refused; None where the target is not loaded.
    """
    from datasets import concatenate_datasets

    from ..data.chat import check_token_ids, prepare_dataset

    parts = []
    for rows in sources:
        parts.append(prepare_dataset(rows, tokenizer, max_length=max_length, enable_thinking=enable_thinking))
        if num_rows is not None:
            check_token_ids(parts[-1], num_rows)
    return concatenate_datasets(parts)


def prepare_splits(sources: tuple[list[Any], list[Any] | None], *, eval_examples: int, **how: Any):
    """Training examples, and those to evaluate on or None: of `--eval-data`, or the last `eval_examples` held out.

    Args:
        sources: of `load_sources`.
        eval_examples: used without `--eval-data`.
        how: of `prepare_examples`.
    """
    train = prepare_examples(sources[0], **how)
    if sources[1] is not None:
        return train, prepare_examples(sources[1], **how)
    if eval_examples == 0:
        return train, None
    if eval_examples >= len(train):
        raise DFlashError(f"--eval-examples {eval_examples} leaves nothing of {len(train)} examples to train on.")
    first = len(train) - eval_examples
    return train.select(range(first)), train.select(range(first, len(train)))


def thinking_of(data: list[str], thinking: bool | None) -> bool | None:
    """`--thinking` of this run; where it is not given, that with which `dflash-hf regenerate` made the data.

    Raises:
        DFlashError: if they contradict each other.
    """
    for name in data:
        beside = Path(f"{name}.settings.json")
        if not beside.exists():
            continue
        made_with = json.loads(beside.read_text(encoding="utf-8")).get("thinking")
        if thinking is None:
            thinking = made_with
        elif made_with is not None and made_with != thinking:
            raise DFlashError(
                f"{name} was made with {_option(made_with)}, but this run has {_option(thinking)}. A drafter serves "
                "one of both well; train on data of one kind."
            )
    return thinking


def _option(thinking: bool) -> str:
    return "--thinking" if thinking else "--no-thinking"


def inspect_examples(
    rows: Any, *, tokenizer: Any, max_length: int, enable_thinking: bool | None, count: int = 3
) -> None:
    """Print the first examples of a dataset with supervised tokens in green and the others dimmed."""
    how = {"tokenizer": tokenizer, "max_length": max_length, "enable_thinking": enable_thinking}
    examples = prepare_examples([rows], **how, num_rows=None)
    for number in range(min(count, len(examples))):
        row = examples[number]
        ids, mask = row["input_ids"], row["loss_mask"]
        console.rule(Text(f"example {number}: {sum(mask)} of {len(ids)} tokens supervised"))
        text = Text()
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or bool(mask[end]) != bool(mask[start]):
                # Runs are decoded whole: a token alone may hold half a character.
                text.append(tokenizer.decode(ids[start:end]), style="bold green" if mask[start] else "dim")
                start = end
        console.print(text)
    supervised = sum(map(sum, examples["loss_mask"]))
    total = sum(map(len, examples["input_ids"]))
    console.print(
        f"{len(examples)} examples, {total} tokens, {supervised} supervised; tokenizer "
        f"{escape(str(tokenizer.name_or_path))}",
        highlight=False,
    )
