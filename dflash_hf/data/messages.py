"""Chat messages in one form: OpenAI's, with tool calls as chat templates want them."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DatasetError

Messages = list[dict[str, Any]]

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "user": "user",
    "assistant": "assistant",
}


def normalize_messages(messages: Messages) -> Messages:
    """OpenAI form (`role`, `content`) from OpenAI or ShareGPT (`from`, `value`) messages.

    Keys without a value go, since `datasets` fills absent ones with None; `content` stays, as text. The arguments of a
    tool call become a dictionary: templates write them as JSON, and would write JSON text as a quoted string.

    Raises:
        DatasetError: for an unknown ShareGPT role, or a call that is not JSON.
    """
    return [_from_sharegpt(message) if "from" in message else _from_openai(message) for message in messages]


def normalize_tools(tools: Any) -> list[Any] | None:
    """Tool descriptions of a row, a list or JSON text of one; None where there are none."""
    if isinstance(tools, str):
        tools = _json(tools) if tools.strip() else None
    return _without_none(tools) or None


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    role = _SHAREGPT_ROLES.get(message["from"])
    if role is None:
        raise DatasetError(f"Unknown speaker {message['from']!r}; known: {', '.join(sorted(_SHAREGPT_ROLES))}.")
    if message["from"] != "function_call":
        return {"role": role, "content": message["value"]}
    calls = _json(message["value"])
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": role,
        "content": "",
        "tool_calls": [{"type": "function", "function": _with_dictionary(call)} for call in calls],
    }


def _from_openai(message: dict[str, Any]) -> dict[str, Any]:
    message = {"content": "", **_without_none(message)}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
        return message
    calls = [call | {"function": _with_dictionary(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _with_dictionary(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    return function | {"arguments": _json(arguments) if isinstance(arguments, str) else arguments}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"A tool call or description is not JSON ({error}): {text[:200]!r}.") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
