"""Conversations as rows of data have them: messages, or a prompt and a completion, with tools and calls of tools."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightning_fsdp2._suggestions import suggest

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message can have."""

ANSWERS = "assistant"
"""Role of the messages that are learned."""

Messages: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Columns:
    """Names of the columns that contain a row's conversation: either messages, or a prompt and a completion."""

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"


@dataclass(frozen=True)
class Conversation:
    """The messages of one row, as chat templates expect them."""

    location: str
    """Where the row is, for error messages: its file and line."""

    messages: Messages
    """Messages with a ``role``, a text as ``content`` unless they call a tool, and arguments of calls as mappings."""

    is_learned: list[bool]
    """Whether each message is an answer to learn from."""

    tools: list[Any] | None = None
    """Descriptions of the tools that the assistant may call."""

    @property
    def has_calls(self) -> bool:
        """Whether a message calls a tool."""
        return any(message.get("tool_calls") for message in self.messages)

    def write_arguments_as_text(self) -> Conversation:
        """Return a copy in which arguments of calls are JSON texts, as a few chat templates expect them."""
        return replace(self, messages=[_change_arguments(message, _to_json) for message in self.messages])

    def write_content_as_parts(self) -> Conversation:
        """Return a copy in which contents are lists of parts, as chat templates of models with images expect them."""

        def change(message: dict[str, Any]) -> dict[str, Any]:
            text = message.get("content")
            return message if text is None else {**message, "content": [{"type": "text", "text": text}]}

        return replace(self, messages=[change(message) for message in self.messages])

    def says_something(self) -> bool:
        """Return whether an answer to learn from contains text, reasoning or a call of a tool."""
        return any(
            is_learned and any(v.strip() if isinstance(v, str) else v for k, v in message.items() if k not in _NO_WORDS)
            for message, is_learned in zip(self.messages, self.is_learned, strict=True)
        )


_NO_WORDS = ("role", "name")


def parse_conversation(text: str, location: str, columns: Columns) -> Conversation:
    """Read the conversation of a row.

    Args:
        text: The row as JSON.
        location: Where the row is.
        columns: Names of the columns that contain the conversation. Further columns that count are ``tools`` and
            ``system``, a text that comes before the messages.

    Raises:
        ValueError: When the row is not a conversation with an answer. The message names the row.
    """
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{location}: the line is not JSON ({error}); repair the line or delete it.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{location}: the row is {_name_type(row)}, not an object; write one object per line.")
    messages = [
        _check_message(message, f"{location}: message {number}")
        for number, message in enumerate(_get_messages(row, location, columns), 1)
    ]
    messages = _add_system(messages, row.get("system"), location)
    is_learned = [_pop_weight(message, f"{location}: message {n}") for n, message in enumerate(messages, 1)]
    if not any(is_learned):
        cause = " with a weight other than 0" if any(message["role"] == ANSWERS for message in messages) else ""
        raise ValueError(
            f"{location}: the conversation has no {ANSWERS} message to learn from{cause}; add one or delete the row."
        )
    if messages[0]["role"] == ANSWERS:
        raise ValueError(
            f"{location}: the conversation begins with an answer; put a user message first or delete the row."
        )
    return Conversation(location, messages, is_learned, _get_tools(row.get("tools"), location))


def _get_messages(row: dict[str, Any], location: str, columns: Columns) -> list[Any]:
    if row.get(columns.messages) is not None:
        return _to_list(row[columns.messages], f"{location}: {columns.messages!r}")
    prompt, completion = row.get(columns.prompt), row.get(columns.completion)
    if prompt is None or completion is None:
        if isinstance(row.get("conversations"), list):
            raise ValueError(
                f"{location}: this is the format of ShareGPT; rename 'conversations' to 'messages', 'from' to 'role'"
                " ('human' to 'user', 'gpt' to 'assistant') and 'value' to 'content'."
            )
        raise ValueError(
            f"{location}: the row needs either {columns.messages!r}, or both {columns.prompt!r} and"
            f" {columns.completion!r}, but has the columns {list(row)}; set messages_column, or prompt_column and"
            " completion_column."
        )
    return [
        *_to_list([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, f"{location}: prompt"),
        *_to_list(
            [{"role": ANSWERS, "content": completion}] if isinstance(completion, str) else completion,
            f"{location}: completion",
        ),
    ]


def _to_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_name_type(value)}, not a list of messages; write [{{'role': …}}, …].")
    return value


def _add_system(messages: Messages, system: Any, location: str) -> Messages:
    """Put the text of a column ``system`` before the messages."""
    if not system:
        return messages
    if not isinstance(system, str):
        raise ValueError(f"{location}: 'system' is {_name_type(system)}, not a text; use a string.")
    if any(message["role"] == "system" for message in messages):
        raise ValueError(f"{location}: the row has a column 'system' and a system message; delete one of the two.")
    return [{"role": "system", "content": system}, *messages]


def _get_tools(tools: Any, location: str) -> list[Any] | None:
    if isinstance(tools, str):
        tools = _from_json(tools, f"{location}: 'tools'") if tools.strip() else None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{location}: 'tools' is {_name_type(tools)}, not a list of objects, one for each tool.")
    return tools or None


# ---------------------------------------------------------------------- messages


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"{where} has no 'role'; write {{'role': 'user', 'content': …}}.")
    # if rows come from a table, every message has all keys, and unused keys are None
    present = {key: value for key, value in message.items() if value is not None}
    if present["role"] == "function":  # OpenAI's name for it before there were tools
        present["role"] = "tool"
    role = present["role"]
    if role not in ROLES:
        hint = suggest(str(role), ROLES) or f"; use one of {', '.join(ROLES)}."
        raise ValueError(f"{where} has the unknown role {role!r}{hint}")
    if (call := present.pop("function_call", None)) is not None:
        present["tool_calls"] = [{"type": "function", "function": call}]
    if "tool_calls" in present:
        present["tool_calls"] = _check_calls(present["tool_calls"], where)
        present = _change_arguments(present, lambda arguments: _to_mapping(arguments, where))
    if isinstance(present.get("content"), list):
        present["content"] = "".join(_get_text(part, where) for part in present["content"])
    if not isinstance(present.get("content"), str) and not (role == ANSWERS and present.get("tool_calls")):
        raise ValueError(f"{where} has {_name_type(message.get('content'))} as its 'content'; use a string.")
    return present


def _pop_weight(message: dict[str, Any], where: str) -> bool:
    """Remove OpenAI's ``weight`` of a message, and return whether the message is an answer to learn from."""
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{where} has weight={weight!r}; use 1 to learn from it, or 0.")
    return bool(message["role"] == ANSWERS and weight)


def _get_text(part: Any, where: str) -> str:
    """Return the text of one part of a message whose content is a list of parts."""
    if not isinstance(part, dict) or "type" not in part:
        raise ValueError(f"{where} has a part without a 'type'; write {{'type': 'text', 'text': …}}.")
    if part["type"] != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"{where} has a part of the type {part['type']!r}, but only text is supported; delete the part or the row."
        )
    return str(part["text"])


# ---------------------------------------------------------------------- calls of tools


def get_function(call: dict[str, Any]) -> dict[str, Any]:
    """Return what describes the function in a tool or a call, with its ``name``: the object itself, or one inside."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def _check_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} has 'tool_calls' that are not a list of objects; write [{{'function': …}}, …].")
    return calls


def _change_arguments(message: dict[str, Any], change: Any) -> dict[str, Any]:
    """Return a copy of ``message`` with the result of ``change`` for the arguments of each call of a tool."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = get_function(call)
        if "arguments" in function:
            changed = {**function, "arguments": change(function["arguments"])}
            call = changed if function is call else {**call, "function": changed}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _to_mapping(arguments: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a call as a mapping. OpenAI writes them as a JSON text."""
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"{where}: the arguments of a call") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} calls a tool with {_name_type(arguments)} as 'arguments'; use an object.")
    return arguments


def _to_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} are a text that is not JSON ({error}); write JSON.") from error


def _name_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
