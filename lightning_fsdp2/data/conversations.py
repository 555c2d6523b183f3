"""Tokenisation of conversations, with labels on the assistant's answers only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from lightning_fsdp2._suggestions import suggest
from lightning_fsdp2.data.sources import get_bar_options
from lightning_fsdp2.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

# `datasets` caches results by the names and arguments of the functions in this file, not by their code.
# Rename a function in this file if you change its result, so that `datasets` does not use an old result.

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message can have."""

_ANSWERS = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # same as in transformers
_CONVERSATIONS_AT_ONCE = 64

# Special tokens are not added, because the template has already written them.
# `verbose=False` suppresses the warning about texts longer than the model's context, which are truncated later.
_TOKENS_AS_WRITTEN: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}

Messages: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Columns:
    """Names of the columns that contain a row's conversation: either messages, or a prompt and a completion."""

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"


@dataclass(frozen=True)
class _Conversation:
    location: str
    messages: Messages
    tools: list[Any] | None


def tokenize_conversations(
    rows: Dataset | IterableDataset,
    *,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    columns: Columns,
    sequence_length: int,
) -> Dataset | IterableDataset:
    """Turn each row's conversation into text with the chat template, tokenise the text, and label the answers.

    A template with ``{% generation %}`` marks the answers itself. With any other template, an answer is the text that
    the template writes after its generation prompt (https://huggingface.co/docs/transformers/chat_templating), up to
    the end of the answer's turn. The tokens up to the end of the turn must not change when more messages follow. This
    function checks every answer for such changes.

    Args:
        rows: Rows with ``location`` and ``text``, as from :func:`~lightning_fsdp2.data.sources.load_rows`.
        tokenizer: Tokenizer of the model. It does not add special tokens here, since the template writes all of them.
        chat_template: Jinja template in the format of transformers.
        columns: Names of the columns that contain the conversations.
        sequence_length: Maximum number of tokens of a conversation. Longer conversations are truncated.

    Returns:
        Rows with ``input_ids`` and ``labels``, lists of at most ``sequence_length`` integers. Labels are -100 except in
        answers. ``length`` is the number of tokens of the conversation before truncation. ``answer_tokens`` is the
        number of labels other than -100 after truncation. ``is_empty`` says whether all answers of the conversation are
        empty. Such a conversation would only teach the model to end its turn.

    Raises:
        ValueError: When a row is not a conversation with an answer, when the template cannot render the conversation,
            or when it is unclear which tokens belong to its answers. The message names the row.
    """
    from datasets import Features, List, Value

    features = Features(
        {
            "input_ids": List(Value("int32")),
            "labels": List(Value("int32")),
            "length": Value("int32"),
            "answer_tokens": Value("int32"),
            "is_empty": Value("bool"),
        }
    )
    return rows.map(
        _tokenize_batch,
        batched=True,
        batch_size=_CONVERSATIONS_AT_ONCE,
        remove_columns=["location", "text"],
        fn_kwargs={
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "columns": columns,
            "sequence_length": sequence_length,
        },
        features=features,
        **get_bar_options(rows, "Tokenising"),
    )


def _tokenize_batch(
    batch: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    columns: Columns,
    sequence_length: int,
) -> dict[str, list[Any]]:
    conversations = [
        _parse(text, location, columns) for text, location in zip(batch["text"], batch["location"], strict=True)
    ]
    label = _label_generations if _GENERATION.search(chat_template) else _label_behind_prefixes
    examples = label(conversations, tokenizer, chat_template)
    rows = [(ids[:sequence_length], labels[:sequence_length], len(ids)) for ids, labels in examples]
    return {
        "input_ids": [ids for ids, _, _ in rows],
        "labels": [labels for _, labels, _ in rows],
        "length": [length for _, _, length in rows],
        # skip the first label, because a model never predicts the first token of a sequence
        "answer_tokens": [sum(label != IGNORE_INDEX for label in labels[1:]) for _, labels, _ in rows],
        "is_empty": [not any(map(_says_something, conversation.messages)) for conversation in conversations],
    }


# ---------------------------------------------------------------------- rows


def _parse(text: str, location: str, columns: Columns) -> _Conversation:
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
    if not any(message["role"] == _ANSWERS for message in messages):
        raise ValueError(
            f"{location}: the conversation has no {_ANSWERS} message to learn from; add one or delete the row."
        )
    if messages[0]["role"] == _ANSWERS:
        raise ValueError(
            f"{location}: the conversation begins with an answer; put a user message first or delete the row."
        )
    return _Conversation(location, messages, row.get("tools") or None)


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
            [{"role": _ANSWERS, "content": completion}] if isinstance(completion, str) else completion,
            f"{location}: completion",
        ),
    ]


def _to_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_name_type(value)}, not a list of messages; write [{{'role': …}}, …].")
    return value


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"{where} has no 'role'; write {{'role': 'user', 'content': …}}.")
    role = message["role"]
    if role not in ROLES:
        hint = suggest(str(role), ROLES) or f"; use one of {', '.join(ROLES)}."
        raise ValueError(f"{where} has the unknown role {role!r}{hint}")
    # if rows come from a table, every message has all keys, and unused keys are None
    present = {key: value for key, value in message.items() if value is not None}
    if isinstance(present.get("content"), list):
        present["content"] = "".join(_get_text(part, where) for part in present["content"])
    if not isinstance(present.get("content"), str) and not (role == _ANSWERS and present.get("tool_calls")):
        raise ValueError(f"{where} has {_name_type(message.get('content'))} as its 'content'; use a string.")
    return present


def _says_something(message: dict[str, Any]) -> bool:
    """Return whether a message is an answer that contains text, reasoning or a tool call."""
    values = [value for key, value in message.items() if key not in ("role", "name")]
    return message["role"] == _ANSWERS and any(v.strip() if isinstance(v, str) else v for v in values)


def _get_text(part: Any, where: str) -> str:
    """Return the text of one part of a message whose content is a list of parts."""
    if not isinstance(part, dict) or "type" not in part:
        raise ValueError(f"{where} has a part without a 'type'; write {{'type': 'text', 'text': …}}.")
    if part["type"] != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"{where} has a part of the type {part['type']!r}, but only text is supported; delete the part or the row."
        )
    return str(part["text"])


def _name_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


# ---------------------------------------------------------------------- labels


def _label_generations(
    conversations: list[_Conversation], tokenizer: PreTrainedTokenizerBase, chat_template: str
) -> list[tuple[list[int], list[int]]]:
    """Label the tokens of the text between ``{% generation %}`` and ``{% endgeneration %}``.

    ``apply_chat_template(return_assistant_tokens_mask=True)`` of transformers 5.23 is meant to do the same, but has two
    bugs. If a character consists of several tokens, its last token gets no label. If no token contains the last
    character of an answer, everything after the answer gets labels too.
    """
    written = [_write_with_spans(conversation, tokenizer, chat_template) for conversation in conversations]
    encoded = tokenizer([text for text, _ in written], **_TOKENS_AS_WRITTEN, return_offsets_mapping=True)
    examples = []
    for (_, spans), ids, offsets in zip(written, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        is_answer = [any(a < end and b > start for start, end in spans) for a, b in offsets]
        examples.append((ids, [token if learn else IGNORE_INDEX for token, learn in zip(ids, is_answer, strict=True)]))
    return examples


def _write_with_spans(
    conversation: _Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str
) -> tuple[str, list[tuple[int, int]]]:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    special_tokens: dict[str, Any] = tokenizer.special_tokens_map
    rendered: Any  # transformers wrongly annotates the result as a string
    try:
        rendered = render_jinja_template(
            [conversation.messages],
            tools=conversation.tools,
            chat_template=chat_template,
            return_assistant_tokens_mask=True,
            **special_tokens,
        )
    except (TemplateError, TypeError) as error:
        raise _refused_by_template(conversation, error) from error
    (text,), (spans,) = rendered
    if not any(end > start for start, end in spans):
        raise ValueError(
            f"{conversation.location}: the chat template marks no text of the conversation with {{% generation %}}; "
            "mark the answers in this way, or use a different chat_template."
        )
    return text, spans


def _label_behind_prefixes(
    conversations: list[_Conversation], tokenizer: PreTrainedTokenizerBase, chat_template: str
) -> list[tuple[list[int], list[int]]]:
    """Label the tokens of each answer, from the end of the generation prompt to the end of the turn."""
    written = [_write_prefixes(conversation, tokenizer, chat_template) for conversation in conversations]
    tokens = iter(tokenizer([text for texts in written for text in texts], **_TOKENS_AS_WRITTEN)["input_ids"])
    examples = []
    for conversation, texts in zip(conversations, written, strict=True):
        *prefixes, ids = [next(tokens) for _ in texts]
        labels = [IGNORE_INDEX] * len(ids)
        for number, (prompt, turn) in enumerate(zip(prefixes[::2], prefixes[1::2], strict=True), 1):
            if ids[: len(prompt)] != prompt or ids[: len(turn)] != turn:
                raise ValueError(
                    f"{conversation.location}: with this chat template, the tokens up to the end of answer {number} "
                    "change when later text follows, so the answer cannot be labelled; strip whitespace "
                    "around the answer, or use a chat_template that marks answers with {% generation %}."
                )
            labels[len(prompt) : len(turn)] = ids[len(prompt) : len(turn)]
        examples.append((ids, labels))
    return examples


def _write_prefixes(conversation: _Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str) -> list[str]:
    """Render prefixes of a conversation, whose tokens show where the answers start and end.

    The first two texts end at the start and at the end of the first answer, the next two at the start and at the end of
    the second answer, and so on. The last text is the whole conversation.
    """
    from jinja2 import TemplateError

    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == _ANSWERS]
    parts = [(messages[:end], is_prompt) for index in answers for end, is_prompt in ((index, True), (index + 1, False))]
    try:
        texts = [
            tokenizer.apply_chat_template(
                part,
                tools=conversation.tools,
                chat_template=chat_template,
                add_generation_prompt=is_prompt,
                tokenize=False,
            )
            for part, is_prompt in [*parts, (messages, False)]
        ]
    except (TemplateError, TypeError) as error:
        raise _refused_by_template(conversation, error) from error
    return cast(list[str], texts)


def _refused_by_template(conversation: _Conversation, error: Exception) -> ValueError:
    roles = ", ".join(message["role"] for message in conversation.messages)
    return ValueError(
        f"{conversation.location}: the chat template cannot render the messages of {roles}: {error}; change the "
        "conversation or use a different chat_template."
    )
