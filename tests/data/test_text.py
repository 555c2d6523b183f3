import itertools
import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from datasets import Dataset, DatasetDict
from helpers import user_modules
from helpers.models import LLAMA, make_causal_lm
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.user_modules import RowRecorder
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_fsdp2 import CausalLM, FSDP2Strategy
from lightning_fsdp2.data import TextDataModule, build_byte_tokenizer

END = 256
TEXTS = [f"document {number} says {number * number}. " * (number % 4 + 1) for number in range(40)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A directory of 40 text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    return str(folder)


@pytest.fixture
def build(corpus, cache):
    """Build a data module that is set up, on the corpus unless told otherwise."""

    def build(*, rank=0, ranks=None, **settings):
        data = TextDataModule(
            **({"path": corpus, "cache_dir": cache, "sequence_length": 16, "batch_size": 4} | settings)
        )
        if ranks is not None:
            strategy = SimpleNamespace(root_device=torch.device("cpu"))
            sampler_settings = {"num_replicas": ranks, "rank": rank}
            data.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler_settings, strategy=strategy)
        data.prepare_data()
        for stage in ("fit", "test"):
            data.setup(stage)
        return data

    return build


def cut(texts, sequence_length):
    stream = [token for text in texts for token in [*text.encode(), END]]
    whole = len(stream) - len(stream) % sequence_length
    return [tuple(stream[start : start + sequence_length]) for start in range(0, whole, sequence_length)]


def rows(loader):
    return [tuple(row) for batch in loader for row in batch["input_ids"].tolist()]


def test_batches_hold_every_sequence_of_the_corpus_but_the_last_few(build):
    data = build(validation_fraction=0)
    expected = cut(TEXTS, 16)
    read = rows(data.train_dataloader())
    assert len(read) == len(expected) // 4 * 4 > 0
    assert len(set(read)) == len(read)
    assert set(read) <= set(expected)
    assert read != expected[: len(read)]


def test_batch_is_two_equal_int64_tensors(build):
    batch = next(iter(build().train_dataloader()))
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (4, 16)


def test_sequences_can_be_padded(build):
    plain, padded = (build(pad_to_multiple_of=multiple, shuffle=False).train_dataloader() for multiple in (None, 12))
    for batch, expected in zip(padded, plain, strict=True):
        assert torch.equal(batch["input_ids"][:, :16], expected["input_ids"])
        assert torch.equal(batch["labels"][:, :16], expected["labels"])
        assert batch["input_ids"][:, 16:].tolist() == [[END] * 8] * 4
        assert batch["labels"][:, 16:].tolist() == [[-100] * 8] * 4


def test_documents_can_be_separate(build):
    for batch in build(separate_documents=True, pad_to_multiple_of=3).train_dataloader():
        assert set(batch) == {"input_ids", "labels", "position_ids"}
        begins = torch.ones(4, 18, dtype=torch.bool)
        begins[:, 1:] = batch["input_ids"][:, :-1] == END
        assert torch.equal(batch["position_ids"][:, :16] == 0, begins[:, :16])
        begins[:, 16:] = True
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(begins, -100))


def test_shuffle_can_be_off(build):
    data = build(validation_fraction=0, shuffle=False)
    read = rows(data.train_dataloader())
    assert read == cut(TEXTS, 16)[: len(read)]


def test_order_changes_with_seed_and_epoch_only(build):
    def read(epoch, seed):
        loader = build(validation_fraction=0, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return rows(loader)

    assert read(0, 0) == read(0, 0)
    assert len({tuple(read(epoch, seed)) for epoch, seed in [(0, 0), (1, 0), (0, 7), (1, 7)]}) == 4


def test_validation_is_in_order_complete_and_disjoint_from_training(build):
    data = build(validation_fraction=0.3)
    train, validation = data.train_dataset["input_ids"], data.validation_dataset["input_ids"]
    assert rows(data.val_dataloader()) == [tuple(row.tolist()) for row in validation]
    in_train, in_validation = (
        [text for text in TEXTS if text[:20] in data.tokenizer.decode(torch.cat(list(split)))]
        for split in (train, validation)
    )
    # what is cut off at the end is less than a sequence
    assert len(TEXTS) - 2 <= len(in_train) + len(in_validation) <= len(TEXTS)
    assert not set(in_train) & set(in_validation)
    assert len(in_validation) > 3


def test_validation_path(build, tmp_path):
    (tmp_path / "validation.txt").write_text("to validate on, only")
    data = build(validation_path=str(tmp_path / "validation.txt"))
    assert rows(data.val_dataloader()) == cut(["to validate on, only"], 16)
    assert len(data.train_dataset) == len(cut(TEXTS, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"validation_fraction": 0},
            "validation_fraction=0 leaves nothing to validate on; give a validation_path",
        ),
        (
            {"streaming": True},
            "streaming=True keeps no rows to validate on; give a validation_path or validation_split",
        ),
    ],
)
def test_nothing_to_validate_on(build, options, message):
    data = build(**options)
    assert data.val_dataloader() == []
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn="validate"))
    with pytest.raises(ValueError, match=message):
        data.val_dataloader()


def test_test_path(build, tmp_path):
    (tmp_path / "test.txt").write_text("to test on, only, and no more than that")
    data = build(test_path=str(tmp_path / "test.txt"), batch_size=1)
    assert rows(data.test_dataloader()) == cut(["to test on, only, and no more than that"], 16)
    with pytest.raises(ValueError, match="test_path=None gives no documents to test on; set it, or use `validate`"):
        build().test_dataloader()


def test_predictions_take_each_test_sequence_once(build, tmp_path):
    (tmp_path / "test.txt").write_text("to test on, only, and no more than that")
    path = str(tmp_path / "test.txt")
    parts = [rows(build(test_path=path, batch_size=1, rank=rank, ranks=3).predict_dataloader()) for rank in range(3)]
    expected = cut(["to test on, only, and no more than that"], 16)
    assert len(expected) % 3
    assert sorted(itertools.chain(*parts)) == sorted(expected)


def test_one_file_is_enough(build, tmp_path):
    (tmp_path / "book.txt").write_text("".join(TEXTS))
    data = build(path=str(tmp_path / "book.txt"), validation_fraction=0.1)
    text = "".join(TEXTS)
    end = round(len(text) * 0.9)
    assert rows(data.val_dataloader()) == cut([text[end:]], 16)
    assert len(data.train_dataset) == len(cut([text[:end]], 16))


def test_max_documents_takes_the_first_ones(build):
    data = build(max_documents=3, validation_fraction=0, shuffle=False, batch_size=1)
    assert rows(data.train_dataloader()) == cut(TEXTS[:3], 16)


@pytest.mark.parametrize("form", ["files", "jsonl", "parquet", "saved", "folder"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_form_of_data_gives_the_same_batches(build, tmp_path, form, streaming):
    table = Dataset.from_dict({"id": range(len(TEXTS)), "body": TEXTS})
    settings = {"path": str(tmp_path / f"rows.{form}"), "text_column": "body"}
    if form == "files":
        settings = {}
    elif form == "jsonl":
        table.to_json(settings["path"])
    elif form == "parquet":
        table.to_parquet(settings["path"])
    elif form == "saved":
        DatasetDict({"texts": table}).save_to_disk(tmp_path / "saved")
        settings |= {"path": None, "dataset": str(tmp_path / "saved"), "split": "texts"}
    else:
        (tmp_path / "folder").mkdir()
        table.to_parquet(tmp_path / "folder" / "validation.parquet")
        settings |= {"path": None, "dataset": str(tmp_path / "folder"), "split": "validation"}
    data = build(shuffle=False, streaming=streaming, validation_fraction=0, separate_documents=True, **settings)
    expected = cut(TEXTS, 16)
    batches = list(data.train_dataloader())
    assert rows(batches) == expected[: len(expected) // 4 * 4]
    assert all(tensor.dtype == torch.int64 and tensor.shape == (4, 16) for one in batches for tensor in one.values())
    starts = [[index == 0 or row[index - 1] == END for index in range(16)] for row in rows(batches)]
    assert [row for batch in batches for row in (batch["position_ids"] == 0).tolist()] == starts


def test_split_of_a_dataset_to_validate_and_to_test_on(build, tmp_path):
    splits = {"train": TEXTS[:20], "held_out": TEXTS[20:30], "test": TEXTS[30:]}
    DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()}).save_to_disk(tmp_path)
    settings = {"path": None, "dataset": str(tmp_path), "validation_split": "held_out", "test_split": "test"}
    for streaming in (False, True):
        data = build(streaming=streaming, **settings)
        assert rows(data.val_dataloader()) == cut(TEXTS[20:30], 16)
        assert rows(data.test_dataloader()) == cut(TEXTS[30:], 16)


def test_stream_is_shuffled_by_seed_and_epoch_and_each_pass_begins_anew(build):
    def read(data, epoch):
        loader = data.train_dataloader()
        loader.load_state_dict({"epoch": epoch, "samples": 0})
        return rows(loader)

    data, other = (build(streaming=True, seed=seed, batch_size=1) for seed in (0, 1))
    first, second = read(data, 0), read(data, 1)
    assert sum(row.count(END) for row in first) >= len(TEXTS) - 1
    assert first != second != read(other, 0) != first
    loader = data.train_dataloader()
    assert (rows(loader), rows(loader)) == (first, second)


@pytest.mark.parametrize("ranks", [1, 3])
def test_stream_goes_on_on_another_number_of_ranks(build, ranks):
    whole = build(streaming=True, batch_size=6)
    loader = whole.train_dataloader()
    batches = iter(loader)
    trained = [next(batches)["input_ids"] for _ in range(3)]
    position = loader.state_dict()
    assert position["samples"] == 2 * 6  # Lightning has read one ahead
    rest = [tuple(row) for batch in (trained[-1], *(one["input_ids"] for one in batches)) for row in batch.tolist()]
    shares = []
    for rank in range(ranks):
        share = build(streaming=True, batch_size=6 // ranks, rank=rank, ranks=ranks)
        share.trainer.current_epoch = 0
        loader = share.train_dataloader()
        loader.load_state_dict(position)
        shares.append(rows(loader))
    assert sorted(itertools.chain(*shares)) == sorted(rest)


def test_stream_of_files_warns_of_what_is_not_utf8(build, tmp_path, caplog):
    (tmp_path / "latin.txt").write_bytes("café at noon".encode("latin-1"))
    (tmp_path / "utf8.txt").write_text("a café of more than one sequence")
    with caplog.at_level(logging.WARNING, "lightning_fsdp2"):
        batches = rows(build(path=str(tmp_path), streaming=True, batch_size=1).train_dataloader())
    assert batches == cut(["a café of more than one sequence"], 16)
    assert "A text file that is not UTF-8 is left out; it begins with 'caf\ufffd at noon'" in caplog.text


def test_two_ranks_see_other_samples_and_together_those_of_one(build):
    of_one = rows(build(batch_size=8).train_dataloader())
    first, second = (rows(build(ranks=2, rank=rank).train_dataloader()) for rank in (0, 1))
    assert len(first) == len(second) > 0
    assert not set(first) & set(second)
    assert set(first) | set(second) == set(of_one)


def test_ranks_validate_as_many_batches_and_miss_no_sequence(build):
    data = [build(ranks=3, rank=rank, validation_fraction=0.3) for rank in range(3)]
    loaders = [one.val_dataloader() for one in data]
    assert len(data[0].validation_dataset) % 3  # else there is nothing to pad
    assert len({len(rows(loader)) for loader in loaders}) == 1
    labels = [tuple(row) for loader in loaders for batch in loader for row in batch["labels"].tolist()]
    with_labels = [row for row in labels if set(row) != {-100}]
    assert sorted(with_labels) == sorted(tuple(row.tolist()) for row in data[0].validation_dataset["input_ids"])


def test_python_stdlib(build):
    data = build(path="python-stdlib", max_documents=3, validation_fraction=0, batch_size=1, sequence_length=64)
    assert "import" in data.tokenizer.decode(data.train_dataset[:]["input_ids"].flatten())


def test_tokenizer_of_a_directory(build, tmp_path):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(["document"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = build(tokenizer=str(tmp_path / "tokenizer"))
    assert data.vocab_size == len(data.tokenizer) == 258
    assert (data.train_dataset[:]["input_ids"] == 257).sum() > 10
    assert build().vocab_size == 257


@pytest.mark.parametrize("separate_documents", [False, True])
def test_the_other_ranks_find_the_tokens_of_the_first(build, monkeypatch, separate_documents):
    options = {"sequence_length": 24, "separate_documents": separate_documents}
    data = build(**options)

    def build_without_tokenising(**settings):
        monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", None)
        data = build(**options, **settings)
        return data.train_dataset._fingerprint, data.validation_dataset._fingerprint

    fingerprints = (data.train_dataset._fingerprint, data.validation_dataset._fingerprint)
    assert run_ranks(build_without_tokenising, 2, group=False) == [fingerprints] * 2
    with pytest.raises(TypeError, match="not callable"):
        build_without_tokenising(max_documents=21)  # other documents, so the cache does not have them


@pytest.mark.slow
def test_another_run_finds_the_tokens(build, corpus, cache):
    data = build(sequence_length=24)
    script = f"""
import sys
from lightning_fsdp2.data import TextDataModule
assert "datasets" not in sys.modules, "importing the data module must stay light"
data = TextDataModule(path={corpus!r}, cache_dir={cache!r}, sequence_length=24)
type(data.tokenizer).__call__ = None  # any call is an error
data.setup("fit")
print(data.train_dataset._fingerprint, data.validation_dataset._fingerprint)
"""
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert other.returncode == 0, other.stderr
    assert other.stdout.split() == [data.train_dataset._fingerprint, data.validation_dataset._fingerprint]


def test_loaders_leave_the_global_random_numbers_alone(build):
    data = build()
    state = torch.get_rng_state()
    rows(data.train_dataloader())
    rows(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), state)


make_trainer = partial(user_modules.make_trainer, strategy="auto", num_sanity_val_steps=0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"num_workers": 1}, {"separate_documents": True, "pad_to_multiple_of": 12}],
    ids=["alone", "workers", "separate-and-padded"],
)
def test_fit_validates_and_a_resumed_fit_trains_on_the_rest(corpus, cache, tmp_path, options):
    def fit(ckpt_path=None, **settings):
        module = RowRecorder()
        data = TextDataModule(path=corpus, cache_dir=cache, sequence_length=16, batch_size=8, **options)
        make_trainer(max_epochs=2, **settings).fit(module, data, ckpt_path=ckpt_path)
        return list(itertools.chain(*module.trained)), list(itertools.chain(*module.validated)), data

    save = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=7, save_top_k=-1)
    trained, validated, data = fit(callbacks=[save], enable_checkpointing=True)
    assert len(trained) == 2 * (len(data.train_dataset) // 8 * 8)
    assert len(validated) == 2 * len(data.validation_dataset) > 0
    assert sorted(trained[: len(trained) // 2]) != sorted(trained[len(trained) // 2 :])
    paths = sorted((tmp_path / "saved").glob("*.ckpt"))
    assert len(paths) >= 2
    for path in paths:
        step = torch.load(path, weights_only=False)["global_step"]
        assert fit(ckpt_path=path)[0] == trained[step * 8 :]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fit_without_validation(corpus, cache):
    module = RowRecorder()
    data = TextDataModule(path=corpus, cache_dir=cache, sequence_length=16, validation_fraction=0)
    make_trainer(max_steps=2).fit(module, data)
    assert len(list(itertools.chain(*module.trained))) == 16
    assert module.validated == []


def test_fit_on_two_processes(corpus, cache):
    def fit():
        module = RowRecorder()
        data = TextDataModule(path=corpus, cache_dir=cache, sequence_length=16, batch_size=4)
        make_trainer(strategy="ddp", max_epochs=1).fit(module, data)
        return itertools.chain(*module.trained)

    first, second = run_ranks(fit, 2, group=False)
    data = TextDataModule(path=corpus, cache_dir=cache, sequence_length=16, batch_size=8)
    data.setup("fit")
    of_one = rows(data.train_dataloader())
    assert list(itertools.chain(*zip(first, second, strict=True))) == of_one


MODEL = {**LLAMA, "vocab_size": 257, "eos_token_id": END}


def sum_losses(model, pieces):
    """Loss sum and number of predictions of token sequences, run one by one."""
    total = tokens = 0
    for piece in pieces:
        input_ids = torch.tensor(piece)
        logits = model(input_ids=input_ids[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, input_ids[1:], reduction="sum").item()
        tokens += len(piece) - 1
    return total, tokens


def copy_model(module):
    model = make_causal_lm(MODEL)
    model.load_state_dict(whole(module.model.state_dict()))
    return model.requires_grad_(False)


def check_evaluation(corpus, cache, folder, loss, cases):
    """The logged loss of the first sequences of a file, on this rank's mesh and one by one."""
    module = CausalLM(config=MODEL, loss=loss)
    trainer = make_trainer(strategy=FSDP2Strategy())
    for sequences, batch_size in cases:
        path = str(folder / f"{sequences}.txt")
        data = TextDataModule(
            path=corpus,
            validation_path=path,
            test_path=path,
            cache_dir=cache,
            sequence_length=16,
            batch_size=batch_size,
        )
        validated = trainer.validate(module, data, verbose=False)[0]["val/loss"]
        tested = trainer.test(module, data, verbose=False)[0]["test/loss"]
        pieces = cut([Path(path).read_text()], 16)
        assert len(pieces) == sequences
        total, tokens = sum_losses(copy_model(module), pieces)
        assert validated == tested == pytest.approx(total / tokens, abs=1e-5)


@pytest.mark.guarantees("token-mean-in-validation")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "loss", "cases"),
    [
        (2, "full", [(3, 1), (5, 2)]),  # (3, 1): a rank has a batch without a label
        pytest.param(2, "chunked", [(3, 1), (4, 2)], marks=pytest.mark.slow),
        pytest.param(3, "full", [(4, 1), (7, 2), (1, 2)], marks=pytest.mark.slow),
        pytest.param(3, "chunked", [(4, 1), (1, 2)], marks=pytest.mark.slow),
        pytest.param(1, "full", [(5, 2)], marks=pytest.mark.slow),
    ],
)
def test_evaluation_counts_every_token_once_on_ranks_that_do_not_divide_the_sequences(
    corpus, cache, tmp_path, ranks, loss, cases
):
    text = "".join(TEXTS)
    for sequences, _ in cases:
        (tmp_path / f"{sequences}.txt").write_text(text[: sequences * 16 + 3])
    run_ranks(check_evaluation, ranks, corpus, cache, tmp_path, loss, cases)


def split_at_ends(sequence):
    """The documents of a sequence, each with its end."""
    ends = [index + 1 for index, token in enumerate(sequence) if token == END]
    borders = [0, *ends, len(sequence)]
    return [sequence[a:b] for a, b in itertools.pairwise(borders) if a < b]


def check_separate_documents(cache, folder, strategy):
    """The logged losses of packed documents, on this rank's mesh and one by one."""
    module = CausalLM(config=MODEL)
    ranks = torch.distributed.get_world_size()
    trainer = make_trainer(strategy=FSDP2Strategy(**strategy), max_steps=1, log_every_n_steps=1)
    data = TextDataModule(
        path=str(folder),
        validation_fraction=0.4,
        cache_dir=cache,
        sequence_length=30,
        batch_size=2,
        shuffle=False,
        separate_documents=True,
        pad_to_multiple_of=8,
    )
    validated = trainer.validate(module, data, verbose=False)[0]["val/loss"]
    model = copy_model(module)
    trainer.fit(module, data)
    trained = trainer.callback_metrics["train/loss"].item()
    batch = 2 * ranks // strategy.get("cp_size", 1)
    for actual, dataset in ((validated, data.validation_dataset), (trained, data.train_dataset.select(range(batch)))):
        pieces = [piece for row in dataset for piece in split_at_ends(row["input_ids"].tolist())]
        assert len(pieces) > 2 * len(dataset)
        total, tokens = sum_losses(model, pieces)
        assert actual == pytest.approx(total / tokens, abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, {"cp_size": 2}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(4, {"cp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["cp2", "dp2", "dp2-cp2"],
)
def test_separate_documents_give_the_losses_of_the_documents_alone(cache, tmp_path, ranks, strategy):
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text(f"{number} + {number**2}"[: 4 + number % 9])
    run_ranks(check_separate_documents, ranks, cache, tmp_path, strategy)


@pytest.mark.filterwarnings("ignore")
def test_separate_documents_are_refused_by_a_model_that_does_not_look_for_them(build):
    opt = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    module = CausalLM(config={**opt, "word_embed_proj_dim": 32, "vocab_size": 257})
    with pytest.raises(ValueError, match="separate_documents=True is not possible for OPTForCausalLM"):
        make_trainer(max_steps=1).fit(module, build(separate_documents=True))


YAML = """
class_path: lightning_fsdp2.data.TextDataModule
init_args:
  path: [{corpus}/0*.txt, {more}]
  tokenizer: null
  sequence_length: 32
  pad_to_multiple_of: 20
  separate_documents: true
  batch_size: 2
  validation_fraction: 0.25
  suffixes: [.rst]
  num_workers: 1
  max_documents: 15
  cache_dir: {cache}
"""


def test_yaml(corpus, cache, tmp_path):
    (tmp_path / "more.rst").write_text("text " * 20)
    parser = ArgumentParser()
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    config = parser.parse_string(
        "data:\n" + YAML.format(corpus=corpus, cache=cache, more=tmp_path).replace("\n", "\n  ")
    )
    data = parser.instantiate(config).data
    data.setup("fit")
    assert isinstance(data, TextDataModule)
    assert "text text" in data.tokenizer.decode(data.train_dataset[:]["input_ids"].flatten())
    assert data.train_dataloader().num_workers == 1
    batch = next(iter(data.train_dataloader()))
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (2, 40)
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning_cli(corpus, cache, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"data": {"path": corpus, "cache_dir": cache, "batch_size": 3}}))
    arguments = ["--config", str(file), "--data.sequence_length=8", f"--data.validation_path={corpus}"]
    cli = LightningCLI(RowRecorder, TextDataModule, run=False, args=arguments, save_config_callback=None)
    cli.datamodule.setup("fit")
    assert next(iter(cli.datamodule.train_dataloader()))["labels"].shape == (3, 8)
    assert "Tokens per sequence." in " ".join(cli.parser.format_help().split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 1}, "sequence_length=1 is less than 2"),
        ({"batch_size": 0}, "batch_size=0 is less than 1"),
        ({"num_workers": -1}, "num_workers=-1 is less than 0"),
        ({"max_documents": 0}, "max_documents=0 is less than 1"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0 is less than 1"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1.0 must be at least 0 and less than 1; use 0.05"),
        ({"validation_fraction": -0.1}, r"validation_fraction=-0.1 must be at least 0 and less than 1"),
        (
            {"validation_fraction": 0.1, "validation_path": "x"},
            "both choose the validation data; leave one of them out",
        ),
        ({"validation_fraction": 0.1, "streaming": True}, "validation_fraction=0.1 with streaming=True"),
        ({"num_workers": 2, "streaming": True}, "num_workers=2 with streaming=True.*use 0 or 1"),
        ({"dataset": "org/name"}, "path='.*' and dataset='org/name': give exactly one of them"),
        ({"path": None}, "path=None and dataset=None: give exactly one of them"),
        ({"validation_split": "test"}, "validation_split='test' names a split of `dataset`, which is not given"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_settings(corpus, settings, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**({"path": corpus} | settings))


@pytest.mark.parametrize("option", ["path", "validation_path", "test_path"])
def test_missing_path(corpus, option):
    with pytest.raises(FileNotFoundError, match=f"^{option}='/no/such/file' is neither a file nor a directory"):
        TextDataModule(**({"path": corpus} | {option: "/no/such/file"}))


def test_tokenizer_without_end(corpus, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer='.*' has no end-of-text token.*set its eos_token"):
        TextDataModule(path=corpus, tokenizer=str(tmp_path)).prepare_data()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 10**6}, r"sequence_length=1000000 is longer than all \d+ training document\(s\) together"),
        (
            {"sequence_length": 600, "validation_fraction": 0.05},
            r"longer than all \d+ validation document\(s\).*a larger validation_fraction or a validation_path",
        ),
        ({"path": "equal"}, r"validation_fraction=0.05 splits 2 document\(s\) into 2 for training and 0"),
        ({"path": "equal", "validation_fraction": 0.999}, r"splits 2 document\(s\) into 0 for training and 2"),
        ({"text_column": "body", "path": "rows"}, r"text_column='body' is not a column of"),
        ({"text_column": "body", "path": "rows", "streaming": True}, r"text_column='body' is not a column of"),
        ({"path": "empty"}, r"path holds no text"),
    ],
    ids=["train-short", "validation-short", "no-validation", "no-training", "column", "column-stream", "empty"],
)
def test_text_that_does_not_do(build, tmp_path, settings, message):
    (tmp_path / "equal").mkdir()
    for name in ("a", "b"):
        (tmp_path / "equal" / f"{name}.txt").write_text("the same")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    if "path" in settings:
        settings = settings | {"path": str(tmp_path / settings["path"])}
    with pytest.raises(ValueError, match=message):
        build(**settings)


def test_fewer_sequences_than_one_step_needs(build):
    data = build(ranks=4, batch_size=100)
    with pytest.raises(
        ValueError, match=r"batch_size=100 on 4 data parallel rank\(s\) needs 400 sequences for one step"
    ):
        data.train_dataloader()
