import csv
import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path

import datasets
import lightning.pytorch as L
import pytest
import torch
from helpers.models import LLAMA, make_causal_lm
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.user_modules import RowRecorder, make_trainer
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import PreTrainedTokenizerBase

from lightning_fsdp2 import CausalLM, ChatDataModule
from lightning_fsdp2.data import build_byte_tokenizer

END = 256
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TALKS = [(f"what is {n} squared?", f"{n * n}. " * (n % 7 + 1)) for n in range(60)]


def to_row(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path, talks):
    path.write_text("\n".join(json.dumps(to_row(*talk)) for talk in talks))
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A file of 60 conversations."""
    return write(tmp_path_factory.mktemp("corpus") / "chat.jsonl", TALKS)


@pytest.fixture
def build(corpus, cache):
    """Build a data module, on the corpus unless told otherwise."""

    def build(**settings):
        options = {"chat_template": TEMPLATE, "cache_dir": cache, "sequence_length": 96, "batch_size": 2}
        source = {} if "dataset" in settings else {"path": corpus}
        return ChatDataModule(**(options | source | settings))

    return build


@pytest.fixture
def set_up(build):
    """Build a data module that is set up."""

    def set_up(**settings):
        data = build(**({"validation_fraction": 0} | settings))
        data.prepare_data()
        for stage in ("fit", "test"):
            data.setup(stage)
        return data

    return set_up


def encode(question, answer):
    """The tokens of a conversation, and where it is learned."""
    asked, said = [*f"u:{question}".encode(), END, *b"a:"], [*answer.encode(), END]
    return asked + said, [-100] * len(asked) + said


def take_apart(batches):
    """The conversations in packed batches: (tokens, labels) of each, without padding."""
    found = []
    for batch in batches:
        rows = (batch[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        for ids, labels, positions in zip(*rows, strict=True):
            starts = [index for index, position in enumerate(positions) if position == 0]
            for start, end in itertools.pairwise([*starts, len(ids)]):
                assert positions[start:end] == list(range(end - start))
                if end - start > 1:
                    found.append((ids[start:end], labels[start:end]))
                else:
                    assert (ids[start], labels[start]) == (END, -100)
    return found


@pytest.mark.guarantees("chat-packing")
def test_packed_batches_hold_every_conversation_once_and_whole(set_up):
    batches = list(set_up(batch_size=1).train_dataloader())
    for batch in batches:
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), ((1, 96), torch.int64)
        )
    assert sorted(take_apart(batches)) == sorted(encode(*talk) for talk in TALKS)
    assert len(batches) < len(TALKS) * 0.8


def test_without_packing_a_sequence_is_a_conversation(set_up):
    data = set_up(pack=False, shuffle=False, pad_to_multiple_of=8, batch_size=3)
    rows = []
    for batch in data.train_dataloader():
        assert set(batch) == {"input_ids", "labels"}
        longest = max(len(encode(*talk)[0]) for talk in TALKS[len(rows) : len(rows) + 3])
        assert batch["input_ids"].shape == batch["labels"].shape == (3, longest + -longest % 8)
        rows += zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    for (ids, labels), talk in zip(rows, TALKS, strict=True):
        expected_ids, expected_labels = encode(*talk)
        padding = len(ids) - len(expected_ids)
        assert ids == expected_ids + [END] * padding
        assert labels == expected_labels + [-100] * padding


def test_lengths_are_measured_and_logged_once(set_up, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        data = set_up()
        data.setup("fit")
    tokens, labels = zip(*(encode(*talk) for talk in TALKS), strict=True)
    lengths = sorted(map(len, tokens))
    statistics = data.statistics["training"]
    assert statistics.conversations == 60
    assert statistics.tokens == sum(lengths)
    assert statistics.answer_tokens == sum(label != -100 for row in labels for label in row)
    assert (statistics.median, statistics.longest) == (lengths[29], lengths[-1])
    assert (statistics.cut, statistics.left_out) == (0, 0)
    assert statistics.sequences == len(data.train_dataset)
    assert statistics.fill == pytest.approx(sum(lengths) / (96 * len(data.train_dataset)))
    assert caplog.text.count("training: 60 conversations of") == 1


def test_cut_conversations_are_counted_in_a_warning(set_up):
    tokens, labels = zip(*(encode(*talk) for talk in TALKS), strict=True)
    cut = sum(len(row) > 24 for row in tokens)
    lost = sum(set(row[:24]) == {-100} for row in labels)
    assert 0 < lost < cut
    message = (
        rf"training: {cut} of 60 conversations are longer than sequence_length=24 and are cut at their end; "
        rf"{lost} have no answer left"
    )
    with pytest.warns(UserWarning, match=message):
        data = set_up(sequence_length=24, batch_size=1)
    found = take_apart(data.train_dataloader())
    expected = [(ids[:24], labels[:24]) for ids, labels in (encode(*talk) for talk in TALKS)]
    assert sorted(found) == sorted(row for row in expected if set(row[1]) != {-100})


def test_nothing_is_left_of_too_short_sequences(set_up):
    with pytest.raises(
        ValueError,
        match=r"60 training conversation\(s\) have no answer within the first sequence_length=4 tokens; use lo",
    ):
        set_up(sequence_length=4)


def test_validation_is_a_part_by_content_a_file_or_a_split(set_up, tmp_path):
    def read(dataset):
        return {bytes(token for token in ids if token != END) for ids, _ in take_apart([dataset[:]])}

    data = set_up(validation_fraction=0.3)
    train, validation = read(data.train_dataset), read(data.validation_dataset)
    assert not train & validation
    assert len(train) + len(validation) == 60
    assert 5 < len(validation) < 35
    others = write(tmp_path / "others.jsonl", [("me?", "you.")])
    data = set_up(validation_path=others, test_path=others, validation_fraction=None)
    assert read(data.validation_dataset) == read(data.test_dataset) == {b"u:me?a:you."}
    assert set(data.statistics) == {"training", "validation", "test"}


@pytest.mark.guarantees("chat-sources")
@pytest.mark.parametrize(
    ("form", "streaming"),
    [
        *((form, False) for form in ("jsonl", "json", "csv", "parquet", "saved", "folder")),
        *(pytest.param(form, True, marks=pytest.mark.slow) for form in ("jsonl", "json", "csv", "parquet")),
        ("saved", True),
        ("folder", True),
    ],
)
def test_every_form_of_data_gives_the_same_batches(set_up, tmp_path, form, streaming):
    rows = [to_row(*talk) for talk in TALKS]
    settings = {"path": str(tmp_path / f"a.{form}")}
    table = datasets.Dataset.from_list(rows)
    if form == "jsonl":
        write(Path(settings["path"]), TALKS)
    elif form == "json":
        Path(settings["path"]).write_text(json.dumps(rows, indent=2))
    elif form == "csv":
        with Path(settings["path"]).open("w", newline="") as file:
            csv.writer(file).writerows([("prompt", "completion"), *TALKS])
    elif form == "parquet":
        table.to_parquet(settings["path"])
    elif form == "saved":
        datasets.DatasetDict({"tuning": table}).save_to_disk(tmp_path / "saved")
        settings = {"dataset": str(tmp_path / "saved"), "split": "tuning"}
    else:
        (tmp_path / "folder").mkdir()
        table.to_json(tmp_path / "folder" / "train.jsonl")
        settings = {"dataset": str(tmp_path / "folder")}
    expected = list(set_up(shuffle=False).train_dataloader())
    batches = list(set_up(shuffle=False, streaming=streaming, **settings).train_dataloader())
    assert len(batches) == len(expected) > 5
    for batch, other in zip(batches, expected, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in other)


def test_first_conversations_only(set_up):
    for streaming in (False, True):
        data = set_up(max_conversations=5, streaming=streaming, batch_size=1)
        assert len(take_apart(data.train_dataloader())) == 5


def test_the_other_ranks_find_the_tokens_of_the_first(set_up, monkeypatch):
    options = {"sequence_length": 99, "validation_fraction": 0.2}
    data = set_up(**options)
    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", None)

    def set_up_without_tokenising():
        data = set_up(**options)
        return data.train_dataset._fingerprint, data.validation_dataset._fingerprint

    fingerprints = (data.train_dataset._fingerprint, data.validation_dataset._fingerprint)
    assert run_ranks(set_up_without_tokenising, 2, group=False) == [fingerprints] * 2
    changes = {"sequence_length": 98, "chat_template": TEMPLATE + " ", "prompt_column": "question", "seed": 1}
    for option, value in changes.items():
        with pytest.raises(TypeError, match="not callable"):
            set_up(**(options | {option: value}))


@pytest.mark.slow
def test_other_processes_find_the_tokens(set_up, corpus, cache, tmp_path):
    tokenizer = build_byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(9)  # its first call takes this back
    tokenizer.save_pretrained(tmp_path)
    options = {"tokenizer": str(tmp_path), "validation_fraction": 0.2, "sequence_length": 99}
    data = set_up(**options)
    script = f"""
from lightning_fsdp2 import ChatDataModule
data = ChatDataModule(path={corpus!r}, chat_template={TEMPLATE!r}, cache_dir={cache!r}, **{options!r})
type(data.tokenizer).__call__ = None  # any call is an error
data.setup("fit")
print(data.train_dataset._fingerprint, data.validation_dataset._fingerprint)
"""
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert other.returncode == 0, other.stderr
    assert other.stdout.split() == [data.train_dataset._fingerprint, data.validation_dataset._fingerprint]


def test_changed_file_is_read_again(set_up, tmp_path):
    for answer in ("before", "behind"):
        path = write(tmp_path / "a.jsonl", [("when?", answer)])
        assert take_apart(set_up(path=path, batch_size=1).train_dataloader()) == [encode("when?", answer)]


SIZES = [{"batch_size": 8}, {"batch_size": 2, "global_batch_size": 40}]


def read_stream(data, epoch=0):
    loader = data.train_dataloader()
    loader.load_state_dict({"epoch": epoch, "samples": 0})
    return [tuple(row) for batch in loader for row in batch["input_ids"].tolist()]


def test_stream_is_shuffled_by_seed_and_epoch(set_up):
    data, other = (set_up(streaming=True, seed=seed, batch_size=1) for seed in (0, 1))
    assert read_stream(data) == read_stream(data)
    assert len({tuple(one) for one in (read_stream(data), read_stream(data, 1), read_stream(other))}) == 3
    loader = data.train_dataloader()
    first, second = ([tuple(batch["input_ids"][0].tolist()) for batch in loader] for _ in range(2))
    assert (first, second) == (read_stream(data), read_stream(data, 1))


def sum_losses(model, conversations):
    """Loss sum and number of learned tokens of conversations, run one by one."""
    total = count = 0
    for ids, labels in conversations:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
        count += sum(label != -100 for label in labels[1:])
    return total, count


def check_losses(corpus, cache, settings):
    """The logged losses of packed conversations on two ranks, and of the same conversations one by one."""
    config = {**LLAMA, "vocab_size": 257, "eos_token_id": END}
    module = CausalLM(config=config, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    options = {"chat_template": TEMPLATE, "cache_dir": cache, "sequence_length": 96, "shuffle": False}
    data = ChatDataModule(path=corpus, validation_path=corpus, batch_size=2, **options, **settings)
    trainer = make_trainer(max_steps=1, log_every_n_steps=1, num_sanity_val_steps=0)
    validated = trainer.validate(module, data, verbose=False)[0]["val/loss"]
    model = make_causal_lm(config)
    model.load_state_dict(whole(module.model.state_dict()))
    trainer.fit(module, data)
    total, count = sum_losses(model, [encode(*talk) for talk in TALKS])
    assert validated == pytest.approx(total / count, abs=1e-5)

    alone = ChatDataModule(path=corpus, validation_fraction=0, batch_size=4, **options)
    alone.setup("fit")
    first = next(iter(alone.train_dataloader()))
    total, count = sum_losses(model, take_apart([first]))
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(total / count, abs=1e-5)


@pytest.mark.guarantees("chat-packing")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, pytest.param({"streaming": True}, marks=pytest.mark.slow)])
def test_losses_are_those_of_the_answers_of_each_conversation_alone(corpus, cache, settings):
    run_ranks(check_losses, 2, corpus, cache, settings)


class RecordsSteps(RowRecorder):
    """Keeps the sequences of each step together."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(list(itertools.chain(*self.trained)))
        self.trained.clear()


def fit(corpus, cache, folder, ranks, ckpt_path=None, every=3, **settings):
    """Train on ranks; return the sequences of each step, sorted."""

    def run():
        options = {"chat_template": TEMPLATE, "cache_dir": cache, "sequence_length": 96, "validation_fraction": None}
        data = ChatDataModule(path=corpus, batch_size=1, global_batch_size=4, **(options | settings))
        save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
        trainer = make_trainer(max_epochs=2, callbacks=[save], enable_checkpointing=True)
        module = RecordsSteps()
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return module.steps

    of_ranks = run_ranks(run, ranks, group=False)
    return [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]


@pytest.mark.guarantees("same-steps")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "ranks", "resumed_ranks"),
    [
        ({}, 2, 1),
        ({"streaming": True}, 1, 2),
        ({"streaming": True}, 2, 1),
        ({"streaming": True, "num_workers": 1}, 1, 1),
        ({"pack": False}, 1, 2),
    ],
)
def test_resumed_fit_on_another_number_of_ranks_takes_the_same_steps(
    corpus, cache, tmp_path, settings, ranks, resumed_ranks
):
    steps = fit(corpus, cache, tmp_path / "whole", ranks, **settings)
    assert all(len(set(step)) == 4 for step in steps[:5])
    checkpoints = sorted((tmp_path / "whole").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert len(checkpoints) >= 3
    for path in (checkpoints[0], checkpoints[-1]):
        done = int(path.stem.partition("=")[2])
        rest = fit(corpus, cache, tmp_path / "rest", resumed_ranks, ckpt_path=path, **settings)
        assert rest == steps[done:], path.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_fit_resumed_behind_an_epoch_takes_the_next_one(corpus, cache, tmp_path, ranks, streaming):
    settings = {"streaming": streaming, "validation_fraction": 0, "every": 7}  # 30 sequences are 7 steps of 4
    steps = fit(corpus, cache, tmp_path, ranks, **settings)
    assert len(steps) == 14
    assert steps[:7] != steps[7:]
    assert fit(corpus, cache, tmp_path, ranks, tmp_path / "step=7.ckpt", **settings) == steps[7:]


YAML = """
class_path: lightning_fsdp2.ChatDataModule
init_args:
  path: {corpus}
  chat_template: {template}
  sequence_length: 64
  batch_size: 2
  global_batch_size: 4
  validation_fraction: 0.25
  cache_dir: {cache}
"""


@pytest.mark.filterwarnings("ignore")
def test_yaml(corpus, cache, tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    parser = ArgumentParser()
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    text = YAML.format(corpus=corpus, cache=cache, template=tmp_path / "chat.jinja")
    data = parser.instantiate(parser.parse_string("data:\n" + text.replace("\n", "\n  "))).data
    data.setup("fit")
    assert data.tokenizer.chat_template == TEMPLATE
    assert next(iter(data.train_dataloader()))["labels"].shape == (2, 64)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dataset": "a/b", "path": "x"}, ValueError, "path='x' and dataset='a/b': give exactly one of them"),
        ({"path": None}, ValueError, "path=None and dataset=None: give exactly one of them"),
        ({"path": "/no/such"}, FileNotFoundError, "path='/no/such' is neither a file nor a directory"),
        (
            {"validation_path": "/no/such"},
            FileNotFoundError,
            "validation_path='/no/such' is neither a file nor a directory",
        ),
        ({"chat_template": "chat.jinja"}, FileNotFoundError, "chat_template='chat.jinja' is neither a file"),
        (
            {"test_split": "test"},
            ValueError,
            "test_split='test' names a split of `dataset`, which is not given; use test_p",
        ),
        (
            {"dataset": "a/b", "validation_split": "v", "validation_path": "x"},
            ValueError,
            "validation_path='x' and validation_split='v' cannot be used together",
        ),
        (
            {"dataset": "a/b", "validation_split": "v", "validation_fraction": 0.1},
            ValueError,
            "validation_fraction=0.1 and validation_split='v' both choose the validation data",
        ),
        ({"streaming": True, "validation_fraction": 0.1}, ValueError, "validation_fraction=0.1 with streaming=True"),
        ({"streaming": True, "num_workers": 2}, ValueError, "num_workers=2 with streaming=True.*use 0 or 1"),
        ({"max_conversations": 0}, ValueError, "max_conversations=0 is less than 1"),
        ({"shuffle_buffer": 0}, ValueError, "shuffle_buffer=0 is less than 1"),
    ],
)
def test_wrong_settings(build, settings, error, message):
    with pytest.raises(error, match=message):
        build(**settings)


def test_tokenizer_without_a_template(set_up, tmp_path):
    build_byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer='.*' has no chat template; set chat_template"):
        set_up(tokenizer=str(tmp_path), chat_template=None)


@pytest.mark.parametrize("streaming", [False, True])
def test_broken_line_is_named(set_up, corpus, tmp_path, streaming):
    for line, message in ((b'{"messages": [', "the line is not JSON"), (b"\xff", "the line is not UTF-8")):
        path = tmp_path / "a.jsonl"
        path.write_bytes(Path(corpus).read_bytes() + b"\n\n" + line)
        with pytest.raises(ValueError, match=rf"^{path}, line 62: {message}"):
            next(iter(set_up(path=str(path), streaming=streaming).train_dataloader()))


@pytest.mark.parametrize("streaming", [False, True])
def test_empty_file_is_named(set_up, tmp_path, streaming):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(
        ValueError, match=r"path contains no rows: the 1 file\(s\) \(the first is '.*empty.jsonl'\) are empty"
    ):
        set_up(path=str(tmp_path / "empty.jsonl"), streaming=streaming)


def test_stream_that_fills_no_step_is_an_error_and_no_endless_loop(set_up):
    for loader in (set_up(streaming=True, max_conversations=2, **size).train_dataloader() for size in SIZES):
        with pytest.raises(ValueError, match="The stream does not have a batch for every rank"):
            next(iter(loader))


def test_dataset_and_split_that_there_are_not(set_up, tmp_path):
    datasets.DatasetDict({"tuning": datasets.Dataset.from_list([to_row("a", "b")])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"split='train' is not in dataset='.*'; use one of \['tuning'\]"):
        set_up(dataset=str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", TALKS)
    with pytest.raises(ValueError, match=r"dataset='.*', subset=None, split='trian': Unknown split"):
        set_up(dataset=str(tmp_path / "folder"), split="trian")


def test_lone_conversation_is_not_split(set_up, tmp_path):
    path = write(tmp_path / "a.jsonl", [("a", "b")])
    with pytest.raises(ValueError, match=r"validation_fraction=0.05 leaves nothing to train on"):
        set_up(path=path, validation_fraction=None)


@pytest.mark.guarantees("rows-that-are-no-conversations")
@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_are_no_conversations_are_told_before_the_split(set_up, tmp_path, count):
    path = tmp_path / "alpaca.jsonl"
    path.write_text("\n".join([json.dumps({"instruction": "say something", "output": "something"})] * count))
    with pytest.raises(
        ValueError, match=r"line 1: the row needs either 'messages', or both 'prompt' and 'completion', but has"
    ):
        set_up(path=str(path), validation_fraction=None)


@pytest.mark.guarantees("empty-answers")
def test_empty_answers_are_counted_and_refused_where_there_is_nothing_else(set_up, tmp_path):
    called = {**to_row("a", ""), "tools": None}
    called["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    (tmp_path / "some.jsonl").write_text(
        "\n".join(map(json.dumps, [to_row("a", ""), to_row("b", " \n"), to_row("c", "said"), called]))
    )
    writes_calls = TEMPLATE.replace("{{ message.content }}", "{{ message.content or message.tool_calls }}")
    with pytest.warns(UserWarning, match="training: 2 of 4 conversations have only empty answers"):
        set_up(path=str(tmp_path / "some.jsonl"), chat_template=writes_calls)
    path = write(tmp_path / "none.jsonl", [("a", ""), ("b", "")])
    with pytest.raises(ValueError, match=r"All 2 training conversation\(s\) have only empty answers.*messages_column"):
        set_up(path=path)
