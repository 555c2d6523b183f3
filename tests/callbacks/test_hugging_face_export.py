"""HuggingFaceExport: the trained model at the end of fit, under any strategy."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import LLAMA, make_token_batches
from helpers.oracle import whole
from helpers.ranks import RankError, run_ranks
from helpers.user_modules import Regressor, make_trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fsdp2 import CausalLM, FSDP2Strategy, export_hf
from lightning_fsdp2.callbacks import HuggingFaceExport
from lightning_fsdp2.cli import main
from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer

CONFIG = {**LLAMA, "vocab_size": 257}


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def make_loader() -> DataLoader[Any]:
    return DataLoader(make_token_batches(4), batch_size=None)


class Data(pl.LightningDataModule):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader()


@pytest.mark.parametrize(
    "strategy", ["fsdp2-tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2-cp2", "ddp", "auto"))]
)
def test_the_model_is_that_of_the_last_step_and_of_its_checkpoint(strategy: str, tmp_path: Path) -> None:
    def train() -> dict[str, Tensor]:
        module = CausalLM(config=CONFIG)
        export = HuggingFaceExport(tmp_path / "out", max_shard_size="60KB")
        sizes = {"fsdp2-tp2": {"tp_size": 2}, "fsdp2-cp2": {"cp_size": 2}}.get(strategy)
        chosen = FSDP2Strategy(**sizes) if sizes else strategy
        trainer = make_trainer(chosen, max_steps=1, callbacks=[export])
        tokenizer = build_byte_tokenizer()
        tokenizer.name_or_path = "some/tokenizer"
        trainer.fit(module, Data(tokenizer))
        if sizes:
            trainer.save_checkpoint(tmp_path / "last.ckpt")
        return whole(module.model.state_dict())

    def read_again() -> dict[str, Tensor]:
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("a")["input_ids"] == [97]
        return AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()

    ranks = 1 if strategy == "auto" else 2
    weights = run_ranks(train, ranks, group=ranks > 1)[0]
    actual = run_ranks(read_again, 1, group=False)[0]
    assert actual.keys() == weights.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, weights[name]), name
    assert "attn_implementation" not in (tmp_path / "out" / "config.json").read_text()
    if strategy.startswith("fsdp2"):
        export_hf(tmp_path / "last.ckpt", tmp_path / "offline")
        offline = read_weights(tmp_path / "offline")
        assert offline.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in offline.items())
        (description,) = json.loads((tmp_path / "last.ckpt" / "meta.json").read_text())["hf_models"]
        assert (description["path"], description["class"]) == ("model", "LlamaForCausalLM")
        assert (description["tokenizer"], description["tied"]) == ("some/tokenizer", [])


def test_by_default_the_model_is_written_beside_the_log(tmp_path: Path) -> None:
    def train(**options: Any) -> Path:
        trainer = make_trainer("auto", max_steps=1, callbacks=[HuggingFaceExport(dtype="bfloat16")], **options)
        trainer.fit(CausalLM(config=CONFIG), make_loader())
        return Path(trainer.log_dir)

    def run() -> None:
        log_dir = train(logger=CSVLogger(tmp_path))
        assert {tensor.dtype for tensor in read_weights(log_dir / "huggingface").values()} == {torch.bfloat16}
        assert train(default_root_dir=tmp_path / "root") == tmp_path / "root"
        assert (tmp_path / "root" / "huggingface" / "model.safetensors").exists()
        train(fast_dev_run=True, default_root_dir=tmp_path / "fast")
        assert not (tmp_path / "fast").exists()

    run_ranks(run, 1, group=False)


class OtherTokenizer:
    """One of another library."""

    def __len__(self) -> int:
        return 100


def test_a_data_modules_tokenizer_of_another_library_is_left_out(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer("auto", max_steps=1, callbacks=[HuggingFaceExport(tmp_path / "out")])
        with pytest.warns(UserWarning, match="tokenizer, a OtherTokenizer, is not a transformers tokenizer"):
            trainer.fit(CausalLM(config=CONFIG), Data(OtherTokenizer()))

    run_ranks(run, 1, group=False)
    assert (tmp_path / "out" / "model.safetensors").exists()


class Nowhere(DummyLogger):
    """A logger without files."""

    save_dir = None


def test_a_logger_without_a_directory(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer(
            "auto", max_steps=1, callbacks=[HuggingFaceExport()], logger=Nowhere(), default_root_dir=tmp_path
        )
        trainer.fit(CausalLM(config=CONFIG), make_loader())

    run_ranks(run, 1, group=False)
    assert (tmp_path / "huggingface" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "make_module", "message"),
    [
        ({}, Regressor, "TypeError: .*no transformers model in Regressor"),
        ({"model": "student"}, lambda: CausalLM(config=CONFIG), r"ValueError: .*CausalLM has the model\(s\) 'model'"),
        ({"dtype": "int8"}, lambda: CausalLM(config=CONFIG), "ValueError: .*dtype='int8'"),
        ({"tokenizer": "."}, lambda: CausalLM(config=CONFIG), "ValueError: .*'.'.*has no tokenizer files"),
        ({"max_shard_size": "5 gigs"}, lambda: CausalLM(config=CONFIG), "ValueError: .*max_shard_size='5 gigs'"),
        ({"max_shard_size": 0}, lambda: CausalLM(config=CONFIG), "ValueError: .*max_shard_size=0"),
        ({"max_shard_size": "0GB"}, lambda: CausalLM(config=CONFIG), "ValueError: .*max_shard_size='0GB'"),
        (
            {"tokenizer": object()},
            lambda: CausalLM(config=CONFIG),
            "TypeError: .*<object>.*not a transformers tokenizer",
        ),
        (
            {"dirpath": "."},
            lambda: CausalLM(config=CONFIG),
            "FileExistsError: HuggingFaceExport: dirpath=.*is not empty.*overwrite=True",
        ),
        ({"dirpath": "file/out"}, lambda: CausalLM(config=CONFIG), r"Error: .*cannot be created \(File exists\)"),
    ],
    ids=[
        "no-model",
        "another-model",
        "unknown-dtype",
        "no-tokenizer",
        "no-size",
        "size-0",
        "size-0GB",
        "other-tokenizer",
        "something-there",
        "below-a-file",
    ],
)
def test_what_cannot_be_exported_is_said_before_training(
    options: dict[str, Any], make_module: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    def run() -> None:
        export = HuggingFaceExport(tmp_path / options.pop("dirpath", "out"), **options)
        make_trainer(FSDP2Strategy(), max_steps=1, callbacks=[export]).fit(make_module(), make_loader())

    with pytest.raises(RankError, match=message):
        run_ranks(run, 1, group=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("again and " * 100)
    run_config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 1,
            "default_root_dir": str(tmp_path),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "strategy": {"class_path": "lightning_fsdp2.FSDP2Strategy"},
            "callbacks": [
                {
                    "class_path": "lightning_fsdp2.callbacks.HuggingFaceExport",
                    "init_args": {"dirpath": str(tmp_path / "out"), "dtype": "bfloat16"},
                }
            ],
        },
        "model": {"class_path": "lightning_fsdp2.CausalLM", "init_args": {"config": CONFIG, "allow_missing": ["a.*"]}},
        "data": {
            "class_path": "lightning_fsdp2.TextDataModule",
            "init_args": {"path": str(tmp_path / "text"), "sequence_length": 16, "batch_size": 2},
        },
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run_config))
    run_ranks(lambda: main(["fit", "--config", str(tmp_path / "run.yaml")]), 1, group=False)
    assert {tensor.dtype for tensor in read_weights(tmp_path / "out").values()} == {torch.bfloat16}
