import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_fsdp2.cli import FSDP2CLI, main
from lightning_fsdp2.config import FSDP2Config


class Strategy(SingleDeviceStrategy):
    def __init__(self, tp_size: int = 1, config: FSDP2Config | None = None) -> None:
        super().__init__(device="cpu")


class Model(BoringModel):
    def __init__(self, optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable | None = None) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [self.make_lr_scheduler(optimizer)] if self.make_lr_scheduler else []

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)


class NamesItsArguments(BoringModel):
    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.save_hyperparameters("sizes")


class MissingFileModel(BoringModel):
    def __init__(self, folder: str = "absent") -> None:
        raise FileNotFoundError(f"pretrained={folder!r} does not exist; give a folder with a config.json.")


class BrokenModel(BoringModel):
    def __init__(self) -> None:
        raise RuntimeError("a bug of the model's author")


class FailingModel(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        raise ValueError("the run fails")


class Data(BoringDataModule):
    pass


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")


@pytest.fixture
def _restored_settings():
    yield
    set_parsing_settings(docstring_parse_attribute_docstrings=False)  # as before `main`, and faster


def write_yaml(folder: Path, model: dict[str, Any] | None = None, **trainer: Any) -> str:
    trainer = {
        "accelerator": "cpu",
        "default_root_dir": str(folder),
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "limit_test_batches": 1,
        "limit_predict_batches": 1,
        "max_epochs": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer,
    }
    options = {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}},
    }
    config = {
        "trainer": trainer,
        "model": model or {"class_path": f"{__name__}.Model", "init_args": options},
        "data": {"class_path": f"{__name__}.Data"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return f"--config={path}"


def error_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that ``args`` end with."""
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI(args)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_optimizer_and_scheduler_are_options_of_the_model(tmp_path):
    cli = FSDP2CLI([write_yaml(tmp_path), "--model.init_args.optimizer.lr=0.5"], run=False)
    [optimizer], [scheduler] = cli.model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 0.5
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert isinstance(cli.datamodule, Data)


def test_fit_twice_resumes_from_last(tmp_path):
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}
    callback["init_args"] = {"dirpath": str(tmp_path / "checkpoints"), "save_last": True}
    config = write_yaml(tmp_path, callbacks=[callback])
    FSDP2CLI(["fit", config])
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    FSDP2CLI(["fit", config, "--trainer.max_epochs=2", "--ckpt_path=last"])
    assert torch.load(last, weights_only=True)["global_step"] == 4


def test_fit_resumes_from_a_single_file_with_the_models_arguments_of_the_config(tmp_path):
    model = {"class_path": f"{__name__}.NamesItsArguments", "init_args": {"sizes": {"one": 1}}}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}
    callback["init_args"] = {"dirpath": str(tmp_path), "save_last": True}
    config = write_yaml(tmp_path, model, callbacks=[callback])
    FSDP2CLI(["fit", config])
    cli = FSDP2CLI(["fit", config, "--trainer.max_epochs=2", f"--ckpt_path={tmp_path}/last.ckpt"])
    assert cli.trainer.global_step == 4


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_subcommands(subcommand, tmp_path):
    FSDP2CLI([subcommand, write_yaml(tmp_path)])


def test_config_is_saved_again_over_the_last(tmp_path):
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    logger["init_args"] = {"save_dir": str(tmp_path), "version": "same"}
    config = write_yaml(tmp_path, logger=logger)
    FSDP2CLI(["validate", config])
    FSDP2CLI(["validate", config, "--seed_everything=7"])
    [saved] = tmp_path.rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["seed_everything"] == 7


def strategy(config: dict[str, Any], **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"{__name__}.Strategy", "init_args": {"config": config, **init_args}}


TARGET_HINT = "(_target_ is an earlier spelling: use class_path, or a plain mapping for a config or policy)"


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        (strategy({"sequence_paralel": True}), "trainer.strategy.config: Option 'sequence_paralel' is not accepted"),
        (strategy({}, tp_sise=2), "trainer.strategy: Option 'tp_sise' is not accepted"),
        (
            strategy({"activation_checkpointing": "sel"}),
            "trainer.strategy.config.activation_checkpointing: Expected a <class 'bool'>, or: Expected a "
            "typing.Literal['full', 'selective']. Got value: sel",
        ),
        (
            strategy({"mp_policy": {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy"}}),
            f"trainer.strategy.config.mp_policy: Option '_target_' is not accepted {TARGET_HINT}",
        ),
        (
            strategy({"fsdp2_forward_prefetch_depth": -1}),
            "fsdp2_forward_prefetch_depth=-1 must not be negative; use 0 to prefetch nothing.",
        ),
        (
            strategy({"use_hf_tp_plan": True}),
            'use_hf_tp_plan=True is an option of the past; use tp_plan="hf" for the plan of the Hugging Face model, '
            "tp_plan=None for ours.",
        ),
        ({"class_path": f"{__name__}.Nothing"}, f"trainer.strategy: module '{__name__}' has no attribute 'Nothing'"),
    ],
    ids=["unknown-field", "unknown-argument", "wrong-type", "target", "wrong-value", "old-name", "no-class"],
)
def test_errors_in_the_strategy_are_one_line(strategy, line, tmp_path, capsys):
    assert error_of(["fit", write_yaml(tmp_path, strategy=strategy)], capsys) == f"error: {line}"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--trainer.max_epochs=ten", "trainer.max_epochs: Expected a <class 'int'>. Got value: ten"),
        ("--nothing=1", "unrecognized arguments: --nothing=1"),
        ("--trainer.strategy=nothing", "You selected an invalid strategy name: `strategy='nothing'`"),
        ("--trainer.accelerator=cuda", "`CUDAAccelerator` can not run on your system"),
    ],
)
def test_errors_in_flags_are_one_line(flag, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert error_of(["fit", write_yaml(tmp_path), flag], capsys).startswith(f"error: {line}")


def test_missing_files_are_one_line(tmp_path, capsys):
    line = error_of(["fit", f"--config={tmp_path}/absent.yaml"], capsys)
    assert "File does not exist" in line
    model = {"class_path": f"{__name__}.MissingFileModel"}
    line = error_of(["fit", write_yaml(tmp_path, model=model)], capsys)
    assert line == "error: pretrained='absent' does not exist; give a folder with a config.json."


def test_debug_keeps_the_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(ArgumentError) as raised:
        FSDP2CLI(["fit", write_yaml(tmp_path, model={"class_path": f"{__name__}.MissingFileModel"})])
    assert isinstance(raised.value.__cause__.__cause__, FileNotFoundError)


def test_a_bug_in_the_model_keeps_its_traceback(tmp_path):
    with pytest.raises(ValueError, match="a bug of the model's author") as raised:
        FSDP2CLI(["fit", write_yaml(tmp_path, model={"class_path": f"{__name__}.BrokenModel"})])
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_error_of_the_run_is_not_caught(tmp_path):
    with pytest.raises(ValueError, match="the run fails"):
        FSDP2CLI(["fit", write_yaml(tmp_path, model={"class_path": f"{__name__}.FailingModel"})])


@pytest.mark.usefixtures("_restored_settings")
def test_help_of_a_config_shows_the_texts_of_its_fields(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fit", f"--trainer.strategy.help={__name__}.Strategy", "--trainer.strategy.config.help"])
    assert exit_.value.code == 0
    assert "Whether each transformer layer is compiled with torch.compile." in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("_restored_settings")
def test_python_dash_m(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("lightning_fsdp2", run_name="__main__")
    assert exit_.value.code == 0
    assert "usage: lightning-fsdp2 [-c CONFIG]" in capsys.readouterr().out
