import json

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
from lightning_fsdp2.data.conversations import tokenize_conversations
from lightning_fsdp2.data.messages import Columns

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
# as that of reasoning models: only the last answer keeps its thoughts
FORGETFUL = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
)
ALTERNATING = "{% if messages[0].role != 'user' %}{{ raise_exception('The user speaks first') }}{% endif %}" + CHATML

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?\n"},
    {"role": "assistant", "content": "2 🎉"},
    {"role": "user", "content": "and 漢字?"},
    {"role": "assistant", "content": "Words, in another script. 🎉"},
]


@pytest.fixture(scope="module")
def merging():
    """A tokenizer with merges, those of newlines in a row among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    text = ["assistant\n\n user system Words, in another script. 漢字 漢字 1 + 1 and? Be brief.\n\n\n"] * 3
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def tokenize(rows, template=CHATML, tokenizer=None, sequence_length=1000, columns=None):
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    dataset = Dataset.from_dict({"location": [f"a.jsonl, line {n}" for n in range(1, len(rows) + 1)], "text": texts})
    return tokenize_conversations(
        dataset,
        tokenizer=tokenizer or build_byte_tokenizer(),
        chat_template=template,
        columns=columns or Columns(),
        sequence_length=sequence_length,
    )


def learned(row):
    """The runs of tokens with labels, which must be the tokens themselves."""
    runs, previous = [], -100
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, -100)
        if label != -100:
            if previous == -100:
                runs.append([])
            runs[-1].append(token)
        previous = label
    return runs


def write(messages):
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


@pytest.mark.guarantees("chat-labels")
@pytest.mark.parametrize("kind", ["bytes", "merging"])
@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_answers_alone_have_labels(merging, kind, template, end):
    tokenizer = merging if kind == "merging" else build_byte_tokenizer()
    (row,) = tokenize([{"messages": TALK}], template, tokenizer)
    assert [tokenizer.decode(run) for run in learned(row)] == ["2 🎉" + end, "Words, in another script. 🎉" + end]
    assert row["length"] == len(row["input_ids"])
    assert row["answer_tokens"] == sum(map(len, learned(row)))


@pytest.mark.guarantees("chat-template")
def test_tokens_are_those_of_the_whole_text(merging):
    for tokenizer in (merging, build_byte_tokenizer()):
        (row,) = tokenize([{"messages": TALK}], tokenizer=tokenizer)
        assert row["input_ids"] == tokenizer(write(TALK))["input_ids"]


@pytest.mark.guarantees("chat-sources")
def test_prompt_and_completion_are_a_user_and_an_assistant(merging):
    texts, lists, renamed = (
        {"prompt": "1 + 1?", "completion": "2"},
        {"prompt": TALK[:2], "completion": TALK[2:3]},
        {"question": "1 + 1?", "answer": "2", "prompt": None},
    )
    (row,) = tokenize([texts], tokenizer=merging)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    assert row == tokenize([{"messages": messages}], tokenizer=merging)[0]
    assert tokenize([lists], tokenizer=merging)[0] == tokenize([{"messages": TALK[:3]}], tokenizer=merging)[0]
    columns = Columns(prompt="question", completion="answer")
    assert tokenize([renamed], tokenizer=merging, columns=columns)[0] == row


@pytest.mark.guarantees("chat-template")
def test_tools_reach_the_template_and_calls_need_no_content():
    template = (
        "{% for tool in tools %}[{{ tool.name }}]{% endfor %}{% for message in messages %}<{{ message.role }}>"
        + (
            "{{ message.content or message.tool_calls[0].name }}{% endfor %}{% if add_generation_prompt %}<assistant>"
            "{% endif %}"
        )
    )
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "It is noon."},
    ]
    (row,) = tokenize([{"messages": messages, "tools": [{"name": "clock"}]}], template)
    assert bytes(row["input_ids"]) == b"[clock]<user>time?<assistant>clock<tool>noon<assistant>It is noon."
    assert [bytes(run) for run in learned(row)] == [b"clock", b"It is noon."]


def test_long_conversations_are_cut_at_their_end():
    whole, cut, lost = (tokenize([{"messages": TALK}], sequence_length=length)[0] for length in (1000, 110, 60))
    assert (len(cut["input_ids"]), cut["length"]) == (110, whole["length"])
    assert cut["labels"] == whole["labels"][:110]
    assert 0 < cut["answer_tokens"] < whole["answer_tokens"]
    assert lost["answer_tokens"] == 0


@pytest.mark.guarantees("chat-labels")
def test_template_that_forgets_is_refused_only_where_it_does():
    thinks = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "<think>hm</think>2"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "3"},
    ]
    (row,) = tokenize([{"messages": thinks[:2]}], FORGETFUL)
    assert [bytes(run) for run in learned(row)] == [b"<think>hm</think>2<|im_end|>\n"]
    with pytest.raises(ValueError, match=r"^a.jsonl, line 2: .* answer 1 change .*marks answers with {% generation %}"):
        tokenize([{"messages": thinks[:2]}, {"messages": thinks}], FORGETFUL)
    marked = MARKED.replace("{{ message.content }}<|im_end|>{% endg", "{{ message.content[-1] }}{% endg")
    (row,) = tokenize([{"messages": thinks}], marked)
    assert [bytes(run) for run in learned(row)] == [b"2", b"3"]


@pytest.mark.guarantees("chat-labels")
def test_answer_that_merges_with_the_prompt_is_refused(merging):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\n\nWords"}]
    with pytest.raises(ValueError, match=r"^a.jsonl, line 1: .*answer 1 change .*strip whitespace"):
        tokenize([{"messages": messages}], tokenizer=merging)


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "is noon.", "image": None}]
    whole = [{"role": "user", "content": "time?"}, {"role": "assistant", "content": "It is noon."}]
    in_parts = [whole[0], {"role": "assistant", "content": parts}]
    assert tokenize([{"messages": in_parts}])[0] == tokenize([{"messages": whole}])[0]


ASK = {"role": "user", "content": "?"}

# as those of Idefics 3 and SmolVLM
IN_PARTS = CHATML.replace(
    "{{ message.content }}",
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
)


@pytest.mark.guarantees("chat-template")
@pytest.mark.parametrize("tokenizer", ["bytes", "merging"])
def test_templates_that_take_content_as_parts_write_the_text(merging, tokenizer):
    tokenizer = merging if tokenizer == "merging" else None
    rows = [{"messages": TALK}, {"prompt": "1 + 1?", "completion": "2"}]
    assert [*tokenize(rows, IN_PARTS, tokenizer)] == [*tokenize(rows, CHATML, tokenizer)]
    marked = MARKED.replace("{{ message.content }}", "{{ message.content[0].text }}")
    assert [*tokenize(rows, marked, tokenizer)] == [*tokenize(rows, MARKED, tokenizer)]


CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
# as most templates of transformers, which expect a mapping
CALLS = (
    "{% for tool in tools %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}{% for call in message.tool_calls %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# as that of DeepSeek V3, which expects a text
CALLS_AS_TEXT = CALLS.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")


def make_call(**call):
    message = {"role": "assistant", "content": None, **call}
    return [ASK, message, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."}]


@pytest.mark.guarantees("chat-template")
@pytest.mark.parametrize("template", [CALLS, CALLS_AS_TEXT])
def test_calls_are_written_once_in_every_form_in_which_people_give_them(template):
    text = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    forms = [
        {"messages": make_call(tool_calls=[{"type": "function", "function": CALL}]), "tools": [TOOL]},
        {"messages": make_call(tool_calls=[{"id": "1", "function": text}]), "tools": json.dumps([TOOL])},
        {"messages": make_call(function_call=text), "tools": [TOOL]},
    ]
    forms[2]["messages"][2] = {"role": "function", "name": "weather", "content": "rain"}
    rows = tokenize(forms, template)
    expected = '<tool>weather<user>?<assistant>weather({"city": "Zürich", "days": 2})<tool>rain<assistant>Rain.'
    assert [bytes(row["input_ids"]).decode() for row in rows] == [expected] * 3
    assert all("weather(" in bytes(learned(row)[0]).decode() for row in rows)


def test_an_answer_of_weight_0_is_not_learned():
    talk = [*TALK[1:3], {**TALK[3], "weight": None}, {**TALK[4], "weight": 1}]
    talk[1] = {**TALK[2], "weight": 0}
    for template, end in ((CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")):
        (row,) = tokenize([{"messages": talk}], template)
        assert [bytes(run).decode() for run in learned(row)] == ["Words, in another script. 🎉" + end]
        assert row["input_ids"] == tokenize([{"messages": TALK[1:]}], template)[0]["input_ids"]


def test_a_column_of_the_system_prompt_comes_first():
    (row,) = tokenize([{"system": "Be brief.", "messages": TALK[1:]}])
    assert row == tokenize([{"messages": TALK}])[0]
    (row,) = tokenize([{"system": None, "messages": TALK}])
    assert row == tokenize([{"messages": TALK}])[0]


@pytest.mark.guarantees("chat-template")
@pytest.mark.parametrize(
    ("row", "template", "missing"),
    [
        ({"messages": TALK}, "{% if message.role != 'system' %}", r"the text of message 1 \(system\)"),
        ({"messages": TALK}, "{% if message.role != 'user' %}", r"message 2 \(user\), the text of message 4 \(user\)"),
        ({"messages": make_call(tool_calls=[CALL])}, "{% if true %}", "the call of 'weather' in message 2"),
        ({"messages": TALK, "tools": [TOOL]}, "{% if true %}", "the tool 'weather'"),
    ],
)
def test_what_a_template_leaves_out_is_named(row, template, missing):
    body = "{{ message.content or '' }}"
    template = CHATML.replace("{{ message.content }}", template + body + "{% endif %}")
    with pytest.raises(ValueError, match=rf"^a.jsonl, line 1: the chat template leaves out .*{missing}, so"):
        tokenize([row], template)


@pytest.mark.guarantees("chat-template")
@pytest.mark.parametrize("content", ['He said "no".\n\tThen:', "  spaces  ", "<think>hm</think>2", "🎉"])
def test_templates_may_quote_and_strip(content):
    messages = [ASK, {"role": "assistant", "content": content}, ASK, {"role": "assistant", "content": "!"}]
    quoting = MARKED.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] | trim | tojson }}")
    (row,) = tokenize([{"messages": messages}], quoting)
    assert row["answer_tokens"] > 0


@pytest.mark.guarantees("rows-that-are-no-conversations")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [', r"the line is not JSON \(Expecting value: .*\); repair the line or delete it"),
        ("[1]", "the row is a list, not an object; write one object per line"),
        (
            {"text": "x"},
            r"the row needs either 'messages', or both 'prompt' and 'completion', but has the columns \['text'\]; set",
        ),
        ({"messages": "x"}, "'messages' is a string, not a list of messages"),
        ({"messages": []}, "the conversation has no assistant message to learn"),
        (
            {"messages": [ASK]},
            "the conversation has no assistant message to learn from; add one or delete the row",
        ),
        (
            {"messages": [{"role": "assistant", "content": "!"}]},
            "the conversation begins with an answer; put a user message",
        ),
        (
            {"messages": [ASK, {"role": "asistant", "content": "!"}]},
            "message 2 has the unknown role 'asistant'; did you",
        ),
        (
            {"messages": [ASK, {"role": "gpt", "content": "!"}]},
            "message 2 has the unknown role 'gpt'; use one of system",
        ),
        ({"messages": [ASK, {"from": "gpt"}]}, "message 2 has no 'role'; write"),
        (
            {"messages": [ASK, {"role": "assistant", "content": 3}]},
            "message 2 has a number as its 'content'; use a str",
        ),
        ({"messages": [ASK, {"role": "assistant"}]}, "message 2 has nothing as its 'content'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "?"}]}
                ]
            },
            "message 1 has a part of the type 'image', but only text is supported; delete the part or the row",
        ),
        ({"messages": [{"role": "user", "content": ["?"]}]}, "message 1 has a part without a 'type'; write"),
        ({"prompt": "x", "completion": 3}, "completion is a number, not a list of messages"),
        ({"messages": TALK, "system": "Be."}, "the row has a column 'system' and a system message; delete one"),
        ({"messages": TALK[1:], "system": 3}, "'system' is a number, not a text"),
        ({"messages": TALK, "tools": "weather"}, r"'tools' are a text that is not JSON \(Expecting value: .*\); write"),
        ({"messages": TALK, "tools": {"name": "x"}}, "'tools' is an object, not a list of objects"),
        ({"messages": make_call(tool_calls=CALL)}, "message 2 has 'tool_calls' that are not a list of objects"),
        (
            {"messages": make_call(function_call={**CALL, "arguments": "{'city': 1}"})},
            r"message 2: the arguments of a call are a text that is not JSON \(.*\); write JSON",
        ),
        (
            {"messages": make_call(function_call={**CALL, "arguments": ["x"]})},
            "message 2 calls a tool with a list as 'arguments'; use an object",
        ),
        ({"messages": [ASK, {**TALK[4], "weight": 0.5}]}, "message 2 has weight=0.5; use 1 to learn from it, or 0"),
        (
            {"messages": [ASK, {**TALK[4], "weight": 0}]},
            "the conversation has no assistant message to learn from with a weight other than 0",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) and value.startswith("it") else "",
)
def test_row_that_is_no_conversation_is_named(row, message):
    with pytest.raises(ValueError, match=f"^a.jsonl, line 2: {message}") as raised:
        tokenize([{"messages": [ASK, {"role": "assistant", "content": "!"}]}, row])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("template", [ALTERNATING, ALTERNATING + "{% generation %}{% endgeneration %}"])
def test_what_the_template_refuses_is_named(template):
    with pytest.raises(
        ValueError, match=r"^a.jsonl, line 1: .* messages of system, user.*: The user speaks first; chan"
    ):
        tokenize([{"messages": TALK}], template)


def test_template_that_fails_is_named():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}
    template = CHATML.replace("{{ message.content }}", "{{ 'says ' + message.tool_calls }}")
    with pytest.raises(
        ValueError, match=r"^a.jsonl, line 1: the chat template cannot render .*can only concatenate str"
    ):
        tokenize([{"messages": [call | {"role": "user", "content": "?"}, call]}], template)


def test_template_that_marks_nothing_is_refused():
    template = MARKED.replace("'assistant'", "'model'")
    with pytest.raises(
        ValueError, match=r"^a.jsonl, line 1: .* marks no text of the conversation with {% generation %}"
    ):
        tokenize([{"messages": TALK}], template)
