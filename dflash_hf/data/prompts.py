"""Prompts of a dataset, for a target to answer: chat messages, or plain text columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Any

from datasets import Dataset

from ..errors import DatasetError
from .messages import Messages, normalize_messages, normalize_tools


@dataclass(frozen=True)
class Conversation:
    """What is said to the target, without its answers.

    Attributes:
        index: row of the dataset.
        turns: the messages before the first answer, before the second, and so on; each ends with the user's.
        tools: tool descriptions for the chat template, or None.
    """

    index: int
    turns: list[Messages]
    tools: list[Any] | None = None


def read_conversations(
    rows: Dataset,
    *,
    prompt_column: str | None = None,
    prompt_template: str | None = None,
    system: str | None = None,
    max_turns: int | None = None,
) -> Iterator[Conversation]:
    """The conversations of a dataset, one a row, in order.

    A row with `messages` or `conversations` gives its system and user messages; its answers are left out. It ends
    before the first tool call, since what a tool said belongs to a call that the target may not make.

    Args:
        rows: the dataset.
        prompt_column: column with the user's message, or with a list of them for several turns.
        prompt_template: text with column names in braces, such as `"{question}\\nThink step by step."`. With
            `prompt_column` it is filled for every message of a list.
        system: a system message before conversations that bring none.
        max_turns: at most this many answers a conversation.

    Raises:
        DatasetError: columns that are not there, or rows without a user message.
    """
    columns = set(rows.column_names)
    chat = next((name for name in ("messages", "conversations") if name in columns), None)
    plain = prompt_column is not None or prompt_template is not None
    if not plain and chat is None:
        raise DatasetError(
            f"The dataset has the columns {sorted(columns)}, but no `messages` or `conversations`. Name the column "
            "with the user's message (prompt column), or give a prompt template such as '{question}'."
        )
    named = {prompt_column} if prompt_column is not None else set()
    if prompt_template is not None:
        named |= {field for _, field, _, _ in Formatter().parse(prompt_template) if field is not None}
        if not named:
            raise DatasetError(f"The prompt template {prompt_template!r} names no column, such as '{{question}}'.")
    if named - columns:
        raise DatasetError(f"There is no column {sorted(named - columns)[0]!r}; the columns are {sorted(columns)}.")
    for index, row in enumerate(rows):
        turns = (
            _plain_turns(row, column=prompt_column, template=prompt_template)
            if plain
            else _chat_turns(normalize_messages(row[chat] or []))
        )
        if not turns:
            raise DatasetError(f"Row {index} has no message of a user to answer.")
        if system is not None and turns[0][0]["role"] != "system":
            turns[0] = [{"role": "system", "content": system}, *turns[0]]
        yield Conversation(index, turns[:max_turns], normalize_tools(row.get("tools")))


def _plain_turns(row: dict[str, Any], *, column: str | None, template: str | None) -> list[Messages]:
    values: list[Any] = [None] if column is None else row[column] if isinstance(row[column], list) else [row[column]]
    texts = []
    for value in values:
        fields = row if column is None else row | {column: value}
        texts.append(value if template is None else template.format(**fields))
    return [[{"role": "user", "content": text}] for text in texts]


def _chat_turns(messages: Messages) -> list[Messages]:
    turns: list[Messages] = []
    said: Messages = []
    for message in messages:
        if message["role"] == "tool" or message.get("tool_calls"):
            break
        if message["role"] == "assistant":
            if said and said[-1]["role"] == "user":
                turns.append(said)
                said = []
        else:
            said.append(message)
    if said and said[-1]["role"] == "user":
        turns.append(said)
    return turns
