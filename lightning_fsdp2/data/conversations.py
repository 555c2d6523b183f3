"""Tokenisation of conversations, with labels on the assistant's answers only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lightning_fsdp2.data.messages import ANSWERS, Columns, Conversation, get_function, parse_conversation
from lightning_fsdp2.data.sources import get_bar_options
from lightning_fsdp2.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

# `datasets` caches results by the names and arguments of the functions in this file, not by their code.
# Rename a function in this file if you change its result, so that `datasets` does not use an old result.

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # same as in transformers
_OTHER_THAN_LETTERS = re.compile(r"[\W_]+")
_PROBE = "words"
_CONVERSATIONS_AT_ONCE = 64

# Special tokens are not added, because the template has already written them.
# `verbose=False` suppresses the warning about texts longer than the model's context, which are truncated later.
_TOKENS_AS_WRITTEN: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}

_Rendered = TypeVar("_Rendered")


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
        ValueError: When a row is not a conversation with an answer, when the template cannot render the conversation or
            leaves out a part of it, or when it is unclear which tokens belong to its answers. The message names the
            row.
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
        _tokenize_conversations,
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


def _tokenize_conversations(
    batch: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    columns: Columns,
    sequence_length: int,
) -> dict[str, list[Any]]:
    conversations = [
        parse_conversation(text, location, columns)
        for text, location in zip(batch["text"], batch["location"], strict=True)
    ]
    is_empty = [not conversation.says_something() for conversation in conversations]
    if _takes_parts(tokenizer, chat_template):
        conversations = [conversation.write_content_as_parts() for conversation in conversations]
    label = _label_generations if _GENERATION.search(chat_template) else _label_behind_prefixes
    examples = label(conversations, tokenizer, chat_template)
    rows = [(ids[:sequence_length], labels[:sequence_length], len(ids)) for ids, labels in examples]
    return {
        "input_ids": [ids for ids, _, _ in rows],
        "labels": [labels for _, labels, _ in rows],
        "length": [length for _, _, length in rows],
        # skip the first label, because a model never predicts the first token of a sequence
        "answer_tokens": [sum(label != IGNORE_INDEX for label in labels[1:]) for _, labels, _ in rows],
        "is_empty": is_empty,
    }


# ---------------------------------------------------------------------- labels


def _label_generations(
    conversations: list[Conversation], tokenizer: PreTrainedTokenizerBase, chat_template: str
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
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation. Return the text, and the start and end of each answer to learn from."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special_tokens: dict[str, Any] = tokenizer.special_tokens_map

    def render(conversation: Conversation) -> Any:
        return render_jinja_template(
            [conversation.messages],
            tools=conversation.tools,
            chat_template=chat_template,
            return_assistant_tokens_mask=True,
            **special_tokens,
        )

    (text,), (spans,) = _render(conversation, render)
    _check_nothing_is_left_out(conversation, text)
    if not any(end > start for start, end in spans):
        raise ValueError(
            f"{conversation.location}: the chat template marks no text of the conversation with {{% generation %}}; "
            "mark the answers in this way, or use a different chat_template."
        )
    is_learned = _get_learned_answers(conversation)
    if all(is_learned):
        return text, spans
    if len(spans) != len(is_learned):
        raise ValueError(
            f"{conversation.location}: an answer has the weight 0, but the chat template marks {len(spans)} answers of"
            f" {len(is_learned)} with {{% generation %}}; mark each answer once, or delete the weights."
        )
    return text, [span for span, learned in zip(spans, is_learned, strict=True) if learned]


def _label_behind_prefixes(
    conversations: list[Conversation], tokenizer: PreTrainedTokenizerBase, chat_template: str
) -> list[tuple[list[int], list[int]]]:
    """Label the tokens of each answer, from the end of the generation prompt to the end of the turn."""
    written = [_write_prefixes(conversation, tokenizer, chat_template) for conversation in conversations]
    tokens = iter(tokenizer([text for texts in written for text in texts], **_TOKENS_AS_WRITTEN)["input_ids"])
    examples = []
    for conversation, texts in zip(conversations, written, strict=True):
        *prefixes, ids = [next(tokens) for _ in texts]
        labels = [IGNORE_INDEX] * len(ids)
        answers = zip(prefixes[::2], prefixes[1::2], _get_learned_answers(conversation), strict=True)
        for number, (prompt, turn, is_learned) in enumerate(answers, 1):
            if ids[: len(prompt)] != prompt or ids[: len(turn)] != turn:
                raise ValueError(
                    f"{conversation.location}: with this chat template, the tokens up to the end of answer {number} "
                    "change when later text follows, so the answer cannot be labelled; strip whitespace "
                    "around the answer, or use a chat_template that marks answers with {% generation %}."
                )
            if is_learned:
                labels[len(prompt) : len(turn)] = ids[len(prompt) : len(turn)]
        examples.append((ids, labels))
    return examples


def _write_prefixes(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str) -> list[str]:
    """Render prefixes of a conversation, whose tokens show where the answers start and end.

    The first two texts end at the start and at the end of the first answer, the next two at the start and at the end of
    the second answer, and so on. The last text is the whole conversation.
    """

    def render(conversation: Conversation) -> list[str]:
        messages = conversation.messages
        answers = [index for index, message in enumerate(messages) if message["role"] == ANSWERS]
        ends = [(end, is_prompt) for index in answers for end, is_prompt in ((index, True), (index + 1, False))]
        texts = [
            tokenizer.apply_chat_template(
                messages[:end],
                tools=conversation.tools,
                chat_template=chat_template,
                add_generation_prompt=is_prompt,
                tokenize=False,
            )
            for end, is_prompt in [*ends, (len(messages), False)]
        ]
        return cast(list[str], texts)

    texts = _render(conversation, render)
    _check_nothing_is_left_out(conversation, texts[-1])
    return texts


def _get_learned_answers(conversation: Conversation) -> list[bool]:
    """Return for each answer of the assistant whether to learn from it."""
    both = zip(conversation.messages, conversation.is_learned, strict=True)
    return [is_learned for message, is_learned in both if message["role"] == ANSWERS]


# ---------------------------------------------------------------------- templates


def _render(conversation: Conversation, render: Callable[[Conversation], _Rendered]) -> _Rendered:
    """Render a conversation with a chat template.

    Most templates expect arguments of calls as mappings. A few fail on these, and expect JSON texts.

    Raises:
        ValueError: When the template cannot render the conversation.
    """
    from jinja2 import TemplateError

    try:
        return render(conversation)
    except (TemplateError, TypeError) as error:
        if conversation.has_calls:
            with suppress(TemplateError, TypeError):
                return render(conversation.write_arguments_as_text())
        roles = ", ".join(message["role"] for message in conversation.messages)
        raise ValueError(
            f"{conversation.location}: the chat template cannot render the messages of {roles}: {error}; change the "
            "conversation or use a different chat_template."
        ) from error


def _takes_parts(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> bool:
    """Return whether a chat template writes the text of a message only if its content is a list of parts.

    So do the templates of many models with images.
    """
    from jinja2 import TemplateError

    def shows(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
        except (TemplateError, TypeError):
            return False
        return _PROBE in cast(str, text)

    return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def _check_nothing_is_left_out(conversation: Conversation, text: str) -> None:
    """Refuse a chat template that does not write all messages, calls and tools of a conversation.

    Only letters and digits are compared, because templates strip spaces and quote texts. Thoughts may be left out, as
    the templates of reasoning models leave those of earlier answers out.

    Raises:
        ValueError: When something is missing in ``text``. The message names it.
    """
    written = _keep_letters(text)
    missing = [name for name, part in _list_parts(conversation) if not _is_in(part, written)]
    if missing:
        raise ValueError(
            f"{conversation.location}: the chat template leaves out {', '.join(missing)}, so a model would not learn"
            " from it; use a chat_template that writes it, or delete it."
        )


def _list_parts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield the texts that a chat template has to write, each after its description."""
    for number, message in enumerate(conversation.messages, 1):
        content = message.get("content", "")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        yield f"the text of message {number} ({message['role']})", text.rpartition("</think>")[2]
        for call in message.get("tool_calls", ()):
            name = str(get_function(call).get("name", ""))
            yield f"the call of {name!r} in message {number}", name
    for tool in conversation.tools or ():
        name = str(get_function(tool).get("name", ""))
        yield f"the tool {name!r}", name


def _is_in(part: str, written: str) -> bool:
    return any(
        _keep_letters(form) in written for form in (part, json.dumps(part, ensure_ascii=False), json.dumps(part))
    )


def _keep_letters(text: str) -> str:
    return _OTHER_THAN_LETTERS.sub("", text)
