import io
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from helpers.models import LLAMA
from helpers.ranks import run_ranks
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

import lightning_fsdp2
from lightning_fsdp2._refusals import is_refusal
from lightning_fsdp2.callbacks import TrainingProgressBar
from lightning_fsdp2.cli import FSDP2CLI, main
from lightning_fsdp2.cli.names import expand_arguments, expand_yaml
from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.models.lora import build_lora_config


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
    # as before `main`, and faster
    set_parsing_settings(docstring_parse_attribute_docstrings=False, add_print_completion_argument=False)


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


@pytest.mark.parametrize(
    ("options", "bars"),
    [
        ({"enable_progress_bar": None}, [TrainingProgressBar]),
        ({"enable_progress_bar": False}, []),
        ({"barebones": True, "enable_progress_bar": None, "enable_model_summary": None}, []),
        (
            {"enable_progress_bar": None, "callbacks": {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}},
            [TQDMProgressBar],
        ),
    ],
    ids=["default", "none", "barebones", "other"],
)
def test_the_progress_bar_is_ours_if_the_config_says_nothing(tmp_path, options, bars):
    cli = FSDP2CLI([write_yaml(tmp_path, **options)], run=False)
    assert [type(each) for each in cli.trainer.callbacks if isinstance(each, ProgressBar)] == bars


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
    state = FSDP2CLI([subcommand, write_yaml(tmp_path)]).trainer.state
    assert (state.fn, state.finished) == (subcommand, True)


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


STRATEGIES = (
    " (such as lightning_fsdp2.DDPStrategy, lightning_fsdp2.FSDP2Strategy, lightning_fsdp2.MegatronFSDPStrategy)"
)


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        (
            strategy({"sequence_paralel": True}),
            "trainer.strategy.config: Option 'sequence_paralel' is not accepted; did you mean 'sequence_parallel'?",
        ),
        (strategy({}, tp_sise=2), "trainer.strategy: Option 'tp_sise' is not accepted; did you mean 'tp_size'?"),
        (
            strategy({}, sequence_parallel=True),
            "trainer.strategy: Option 'sequence_parallel' is not accepted; did you mean 'config.sequence_parallel'?",
        ),
        (
            strategy({"activation_checkpointing": "sel"}),
            "trainer.strategy.config.activation_checkpointing=sel must be true, false, 'full' or 'selective'",
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
            'use_hf_tp_plan=True is no longer an option; use tp_plan="hf" for the plan of the Hugging Face model, '
            "or tp_plan=None for our plan.",
        ),
        ({"class_path": f"{__name__}.Nothing"}, f"trainer.strategy: module '{__name__}' has no attribute 'Nothing'"),
        (
            {"class_path": "lightning_fsdp2.FSDP2Strateg"},
            "trainer.strategy: module 'lightning_fsdp2' has no attribute 'FSDP2Strateg'; did you mean"
            " 'lightning_fsdp2.FSDP2Strategy'?",
        ),
        (
            {"class_path": "lightnin_fsdp2.FSDP2Strategy"},
            "trainer.strategy: No module named 'lightnin_fsdp2'; did you mean 'lightning_fsdp2'?",
        ),
        (
            {"class_path": "fsd2"},
            f"trainer.strategy=fsd2 must be the class path of a Strategy{STRATEGIES}; did you mean 'fsdp2'?",
        ),
        (
            {"class_path": "FSDP2Strateg"},
            f"trainer.strategy=FSDP2Strateg must be the class path of a Strategy{STRATEGIES}; did you mean"
            " 'lightning_fsdp2.FSDP2Strategy'?",
        ),
        ("megatron", "trainer.strategy: there is no strategy 'megatron'; did you mean 'megatron_fsdp'?"),
    ],
    ids=[
        "unknown-field",
        "unknown-argument",
        "field-as-argument",
        "wrong-type",
        "target",
        "wrong-value",
        "old-name",
        "no-class",
        "class",
        "module",
        "short-name",
        "class-name",
        "name",
    ],
)
def test_errors_in_the_strategy_are_one_line(strategy, line, tmp_path, capsys):
    assert error_of(["fit", write_yaml(tmp_path, strategy=strategy)], capsys) == f"error: {line}"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--trainer.max_epochs=ten", "trainer.max_epochs=ten must be an int"),
        ("--nothing=1", "unrecognized arguments: --nothing=1"),
        ("--trainer.max_stepz=1", "unrecognized arguments: --trainer.max_stepz=1; did you mean 'trainer.max_steps'?"),
        ("--trainer.strategy=nothing", "trainer.strategy: there is no strategy 'nothing'"),
        ("--trainer.accelerator=cuda", "`CUDAAccelerator` can not run on your system"),
    ],
)
def test_errors_in_flags_are_one_line(flag, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert error_of(["fit", write_yaml(tmp_path), flag], capsys).startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"NTASKS": 4, "NTASKS_PER_NODE": 4, "NNODES": 1},
            "You set `devices=2` in Lightning, but the number of tasks per node configured in SLURM"
            " `--ntasks-per-node=4`",
        ),
        (
            {"NTASKS": 4, "NTASKS_PER_NODE": 2, "NNODES": 2},
            "You set `num_nodes=1` in Lightning, but the number of nodes configured in SLURM `--nodes=2`",
        ),
        ({"NTASKS": 4}, "You set `--ntasks=4` in your SLURM bash script, but this variable is not supported."),
        (
            {"NTASKS": 8, "NTASKS_PER_NODE": 2, "NNODES": 1},
            "SLURM has started 8 task(s) (SLURM_NTASKS), but Trainer(devices=2, num_nodes=1) asks for 2. Set num_nodes",
        ),
    ],
)
def test_a_config_that_contradicts_slurm_is_one_line(variables, line, tmp_path, capsys, monkeypatch):
    variables = {**variables, "JOB_ID": 7, "JOB_NAME": "run", "NODELIST": "localhost"}
    variables |= {"PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    args = ["fit", write_yaml(tmp_path), "--trainer.strategy=fsdp2", "--trainer.devices=2"]
    assert error_of(args, capsys).startswith(f"error: {line}")


def test_a_misspelt_key_in_yaml_is_one_line(tmp_path, capsys):
    line = error_of(["fit", write_yaml(tmp_path, max_stepz=1)], capsys)
    assert (
        line == "error: Subcommand 'fit' does not accept option 'trainer.max_stepz'; did you mean 'trainer.max_steps'?"
    )


def change(folder: Path, old: str, new: str) -> str:
    path = Path(write_yaml(folder).removeprefix("--config="))
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return f"--config={path}"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("lr: 0.01", "lrr: 0.01", "model.optimizer: Option 'lrr' is not accepted; did you mean 'lr'?"),
        (
            "torch.optim.AdamW",
            "torch.optim.AdanW",
            "model.optimizer: module 'torch.optim' has no attribute 'AdanW'; did you mean 'torch.optim.AdamW'?",
        ),
        (
            "step_size: 1",
            "step_sizes: 1",
            "model.lr_scheduler: Option 'step_sizes' is not accepted; did you mean 'step_size'?",
        ),
        (
            "trainer:",
            "trainr:",
            "Subcommand 'fit' does not accept option 'trainr.accelerator'; did you mean 'trainer'?",
        ),
        (
            "max_epochs: 1",
            "max_epochs: '1",
            "run.yaml, line 24: this is not YAML (found unexpected end of stream); check the indentation and the"
            " quotes.",
        ),
    ],
    ids=["optimizer", "optimizer-class", "scheduler", "section", "syntax"],
)
def test_errors_in_other_sections_are_one_line(old, new, line, tmp_path, capsys):
    assert error_of(["fit", change(tmp_path, old, new)], capsys) == f"error: {line}"


def test_a_word_that_is_none_of_those_allowed_gets_the_nearest(tmp_path, capsys):
    model = {"class_path": "lightning_fsdp2.CausalLM", "init_args": {"config": LLAMA, "loss": "chunkd"}}
    line = error_of(["fit", write_yaml(tmp_path, model)], capsys)
    assert line == ("error: model.loss=chunkd must be 'full' or 'chunked'; did you mean 'chunked'?")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"pretrained": "nobody/nothing"},
            "CausalLM('nobody/nothing'): this is neither a directory with",
        ),
        ({"pretrained": "./nothing"}, "pretrained='./nothing' does not exist."),
    ],
)
def test_a_model_that_is_nowhere_is_one_line(options, line, tmp_path, capsys):
    model = {"class_path": "lightning_fsdp2.CausalLM", "init_args": options}
    assert error_of(["fit", write_yaml(tmp_path, model)], capsys).startswith(f"error: {line}")


def write_text_run(folder: Path, **data: Any) -> str:
    """A run on two ranks that is refused for what ``data`` says."""
    (folder / "text.txt").write_text("again and again " * 200)
    path = Path(write_yaml(folder, devices=2, strategy="fsdp2").removeprefix("--config="))
    config = yaml.safe_load(path.read_text())
    config["model"] = {"class_path": "lightning_fsdp2.CausalLM", "init_args": {"config": {**LLAMA, "vocab_size": 257}}}
    options = {"path": str(folder / "text.txt"), "sequence_length": 16, "batch_size": 2, **data}
    config["data"] = {"class_path": "lightning_fsdp2.TextDataModule", "init_args": options}
    path.write_text(yaml.safe_dump(config))
    return f"--config={path}"


def run_and_catch(args: list[str]) -> tuple[str, str]:
    """What ends the run of this rank, and what it says."""
    with redirect_stderr(io.StringIO()) as output:
        try:
            FSDP2CLI(args)
            end = ""
        except (SystemExit, ValueError) as error:
            end = repr(error)
    return end, "".join(line for line in output.getvalue().splitlines() if line.startswith("error: "))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "line", "source"),
    [
        (
            {"global_batch_size": 6},
            "global_batch_size=6 is not a multiple of batch_size=2 x 2 data",
            "",
        ),
        (
            {"tokenizer": "nobody/nothing"},
            "tokenizer='nobody/nothing' is not a directory with a tokenizer",
            "Rank 0 could not read the data (this is rank 1): ",
        ),
    ],
    ids=["found-by-both", "found-by-rank-0"],
)
def test_what_a_run_refuses_is_said_by_the_first_rank_of_a_node(data, line, source, tmp_path, monkeypatch):
    """The other rank says it later, because here nobody ends this rank; see test_errors.py."""
    monkeypatch.setattr("lightning_fsdp2.cli.errors._PATIENCE", 0.1)
    args = ["fit", write_text_run(tmp_path, **data)]
    (first, said), (second, later) = run_ranks(lambda: run_and_catch(args), 2, group=False)
    assert first == second == "SystemExit(2)"
    assert said.startswith(f"error: {line}")
    assert later.startswith(f"error: local rank 1: {source}{line}")


@pytest.mark.slow
def test_debug_keeps_the_traceback_of_what_a_run_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    args = ["fit", write_text_run(tmp_path, global_batch_size=6)]
    for end, said in run_ranks(lambda: run_and_catch(args), 2, group=False):
        assert end.startswith("ValueError('global_batch_size=6 is not a multiple")
        assert said == ""


def test_last_does_not_start_from_scratch_beside_other_checkpoints(tmp_path):
    for step in (20, 10):
        (tmp_path / f"runs/step={step}.ckpt").mkdir(parents=True)
        os.utime(tmp_path / f"runs/step={step}.ckpt", (step, step))
    args = ["fit", write_text_run(tmp_path), "--trainer.devices=1", "--ckpt_path=last"]
    args += ["--trainer.callbacks=ModelCheckpoint", f"--trainer.callbacks.dirpath={tmp_path / 'runs'}"]
    end, said = run_and_catch(args)
    assert end == "SystemExit(2)"
    assert said.startswith(
        f"error: ckpt_path=last: {tmp_path / 'runs'} has no last.ckpt, since ModelCheckpoint(save_last"
    )
    assert f"the newest, {tmp_path / 'runs/step=20.ckpt'}, " in said


def test_last_that_points_nowhere_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/last.ckpt").symlink_to("step=20.ckpt")
    args = ["fit", write_text_run(tmp_path), "--trainer.devices=1", "--ckpt_path=last"]
    args += ["--trainer.callbacks=ModelCheckpoint", f"--trainer.callbacks.dirpath={tmp_path / 'runs'}"]
    end, said = run_and_catch(args)
    assert end == "SystemExit(2)"
    assert said.startswith(
        f"error: ckpt_path=last: {tmp_path / 'runs/last.ckpt'} points to step=20.ckpt, which is gone"
    )


def catch(function: Callable[[], Any]) -> Exception:
    with pytest.raises((ValueError, TypeError)) as raised:
        function()
    return raised.value


def test_only_a_raise_statement_of_the_package_is_a_refusal():
    assert is_refusal(catch(lambda: FSDP2Config(fsdp2_forward_prefetch_depth=-1)))
    assert is_refusal(catch(lambda: FSDP2Config(sequence_parallel="no")))
    assert not is_refusal(catch(lambda: expand_arguments(1)))  # a bug, in the package's own code
    assert is_refusal(catch(lambda: FSDP2Config(nothing=1)))
    assert not is_refusal(catch(lambda: expand_yaml()))  # raised in the caller
    assert not is_refusal(catch(lambda: torch.nn.Linear(2, 2)("text")))


def test_missing_files_are_one_line(tmp_path, capsys):
    line = error_of(["fit", f"--config={tmp_path}/absent.yaml"], capsys)
    assert "File does not exist" in line
    model = {"class_path": f"{__name__}.MissingFileModel"}
    line = error_of(["fit", write_yaml(tmp_path, model=model)], capsys)
    assert line == "error: pretrained='absent' does not exist; give a folder with a config.json."


class MissingPackageModel(BoringModel):
    def __init__(self) -> None:
        with patch.dict(sys.modules, peft=None):
            build_lora_config({})


def test_a_misspelt_choice_beside_other_types_is_named(tmp_path, capsys):
    flags = strategy({"activation_checkpointing": "fulll"})
    assert error_of(["fit", write_yaml(tmp_path, strategy=flags)], capsys).endswith("'selective'; did you mean 'full'?")


def test_causes_of_other_kinds_are_one_line(tmp_path, capsys):
    line = error_of(["fit", write_yaml(tmp_path, model={"class_path": f"{__name__}.MissingPackageModel"})], capsys)
    assert line.startswith("error: CausalLM(lora=...) needs peft; ")


class BrokenRows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        FSDP2Config(fsdp2_forward_prefetch_depth=-index - 1)
        return torch.zeros(32)


class BrokenData(BoringDataModule):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(BrokenRows(), num_workers=1)


def test_what_a_worker_process_refuses_is_one_line(tmp_path, capsys):
    line = error_of(["fit", write_yaml(tmp_path), f"--data={__name__}.BrokenData"], capsys)
    assert "fsdp2_forward_prefetch_depth=-1" in line
    assert "Traceback" not in line


def test_a_bug_in_a_worker_process_keeps_its_traceback():
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/a/lightning_fsdp2/data/sources.py", line 7, in read\n    count = int(text)\n            ^^^^^^^^^\n'
        "ValueError: invalid literal for int()"
    )
    assert not is_refusal(catch(lambda: raise_(ValueError(text))))
    refused = text.replace("count = int(text)", "raise ValueError(")
    assert is_refusal(catch(lambda: raise_(ValueError(refused))))


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.slow
def test_debug_keeps_the_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(ArgumentError) as raised:
        FSDP2CLI(["fit", write_yaml(tmp_path, model={"class_path": f"{__name__}.MissingFileModel"})])
    assert isinstance(raised.value.__cause__.__cause__, FileNotFoundError)


@pytest.mark.guarantees("tracebacks")
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
    shown = " ".join(capsys.readouterr().out.split())
    assert "Whether each transformer layer is compiled with torch.compile. The loss of CausalLM" in shown


@pytest.mark.usefixtures("_restored_settings")
def test_python_dash_m(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("lightning_fsdp2", run_name="__main__")
    assert exit_.value.code == 0
    assert "usage: lightning-fsdp2 COMMAND" in capsys.readouterr().out


def print_config(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI([*args, "--print_config"])
    assert exit_.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


SHORT_NAMES = {
    "fsdp2": ("lightning_fsdp2.FSDP2Strategy", None),
    "fsdp2_offload": ("lightning_fsdp2.FSDP2Strategy", True),
    "lightning_fsdp2_ddp": ("lightning_fsdp2.DDPStrategy", None),
    "megatron_fsdp": ("lightning_fsdp2.MegatronFSDPStrategy", None),
}


FAST_SHORT_NAMES = [
    *(("yaml", name) for name in SHORT_NAMES),
    ("yaml-with-options", "fsdp2_offload"),
    ("yaml-with-options", "megatron_fsdp"),
    ("flag", "lightning_fsdp2_ddp"),
    ("flag", "megatron_fsdp"),
]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        pytest.param(*cell, marks=() if cell in FAST_SHORT_NAMES else pytest.mark.slow)
        for cell in itertools.product(["yaml", "yaml-with-options", "flag"], SHORT_NAMES)
    ],
)
def test_short_names_of_strategies(name, source, tmp_path, capsys):
    class_path, offload_policy = SHORT_NAMES[name]
    config = {"activation_checkpointing": "full"} if name != "megatron_fsdp" else {"activation_checkpointing": True}
    if source == "yaml":
        args = [write_yaml(tmp_path, strategy=name)]
    elif source == "yaml-with-options":
        args = [write_yaml(tmp_path, strategy={"class_path": name, "init_args": {"config": config}})]
    else:
        option = f"--trainer.strategy.config.activation_checkpointing={config['activation_checkpointing']}"
        args = [write_yaml(tmp_path), "--trainer.strategy", name, option.replace("True", "true")]
    printed = print_config(["fit", *args], capsys)["trainer"]["strategy"]
    assert printed["class_path"] == class_path
    printed = (printed["init_args"]["config"] or {}).get("init_args", {})
    assert printed.get("offload_policy") is offload_policy
    if source != "yaml":
        assert printed["activation_checkpointing"] == config["activation_checkpointing"]


@pytest.mark.parametrize("source", ["yaml", pytest.param("one-word", marks=pytest.mark.slow), "two-words"])
def test_a_class_path_without_options_is_no_short_name(source, tmp_path, capsys):
    path = "lightning_fsdp2.DDPStrategy"
    args = {
        "yaml": lambda: [write_yaml(tmp_path, strategy=path)],
        "one-word": lambda: [write_yaml(tmp_path), f"--trainer.strategy={path}"],
        "two-words": lambda: [write_yaml(tmp_path), "--trainer.strategy", path],
    }[source]()
    printed = print_config(["fit", *args], capsys)["trainer"]["strategy"]
    assert printed["class_path"] == path
    with pytest.raises(SystemExit):
        main(["fit", *args[:1], "--trainer.strategy=lightning_fsdp2.DPStrategy"])
    assert "did you mean 'lightning_fsdp2.DDPStrategy'?" in capsys.readouterr().err


def test_numbers_of_a_config_with_a_short_name_stay_numbers(tmp_path, capsys):
    path = Path(write_yaml(tmp_path, strategy="fsdp2").removeprefix("--config="))
    path.write_text(path.read_text() + "seed_everything: 7\n")
    path.write_text(path.read_text().replace("lr: 0.01", "lr: 1e-4"))
    printed = print_config(["fit", f"--config={path}"], capsys)
    assert printed["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e-4
    assert printed["seed_everything"] == 7


def test_quickstart_is_fit_with_the_config_in_the_package(capsys):
    printed = print_config(["quickstart", "--trainer.max_steps=3"], capsys)
    config = yaml.safe_load((Path(lightning_fsdp2.__file__).parent / "cli" / "quickstart.yaml").read_text())
    assert printed["model"]["init_args"]["config"] == config["model"]["init_args"]["config"]
    assert printed["trainer"]["max_steps"] == 3


LLAMA_OPTIONS = {"config": LLAMA, "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}}}


def test_describe_needs_neither_the_devices_nor_the_data_of_a_run(tmp_path):
    model = {"class_path": "lightning_fsdp2.CausalLM", "init_args": LLAMA_OPTIONS}
    strategy = {"class_path": "fsdp2", "init_args": {"tp_size": 2, "dp_replicate_size": "auto"}}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path / "logs")}}
    config = write_yaml(
        tmp_path,
        model,
        strategy=strategy,
        accelerator="gpu",
        devices=4,
        num_nodes=2,
        logger=logger,
        precision="bf16-mixed",
    )

    def run(*args: str) -> str:
        with redirect_stdout(io.StringIO()) as output:
            FSDP2CLI(["describe", config, *args])
        return output.getvalue()

    [printed] = run_ranks(run, 1, "--format=json", group=False)
    description = json.loads(printed)
    assert description["mesh"] == {"dp_replicate": 2, "dp_shard": 2, "context_parallel": 1, "tensor_parallel": 2}
    units = [unit["modules"] for unit in description["units"]]
    assert units[:2] == [["model.model.embed_tokens"], ["model.model.layers.0"]]
    q_proj = next(p for p in description["units"][1]["parameters"] if p["name"].endswith("q_proj.weight"))
    assert q_proj == {
        "name": "model.model.layers.0.self_attn.q_proj.weight",
        "shape": [32, 32],
        "dtype": "float32",
        "is_trained": True,
        "placements": {"dp_replicate": "whole", "dp_shard_cp": "dim 0", "tensor_parallel": "dim 0"},
        "shard_shape": [8, 32],
        "shard_bytes": 1024,
    }
    [printed] = run_ranks(run, 1, "--world_size=64", "--trainer.strategy=lightning_fsdp2_ddp", group=False)
    assert "DDPStrategy on 64 ranks" in printed
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ["--trainer.strategy=fsdp2", "--trainer.strategy.tp_size=3", "--world_size=4"],
            "tp_size=3 = 3 does not divide",
        ),
        (["--trainer.strategy=ddp", "--world_size=4"], "describe supports the strategies of lightning_fsdp2"),
        (
            ["--trainer.strategy=fsdp2", "--trainer.accelerator=gpu", "--trainer.devices=-1"],
            "give the number of ranks, such as --world_size=8.",
        ),
        (["--world_size=4"], "the config has no trainer.strategy; give one, such as --trainer.strategy=fsdp2."),
    ],
)
def test_what_cannot_be_described_is_one_line(flags, error, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    model = {"class_path": "lightning_fsdp2.CausalLM", "init_args": LLAMA_OPTIONS}
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI(["describe", write_yaml(tmp_path, model), *flags])
    assert exit_.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error in line


@pytest.mark.usefixtures("_restored_settings")
def test_all_options_fit_100_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    for args in (["fit", "--help=all"], ["describe", "--help=all"]):
        with pytest.raises(SystemExit):
            main(args)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        assert not any("known subclasses" in line for line in lines)
    assert lines[0] == "usage: lightning-fsdp2 describe --config FILE [--OPTION VALUE ...]"
    assert sum("fsdp2_offload" in line for line in lines) == 1


@pytest.mark.guarantees("completion")
@pytest.mark.usefixtures("_restored_settings")
def test_shell_completion(capsys):
    pytest.importorskip("shtab", reason="needs jsonargparse[shtab]")
    with pytest.raises(SystemExit, match="0"):
        main(["--print_completion=bash"])
    script = capsys.readouterr().out
    completed = subprocess.run(
        ["bash"], input=f"{script}\ncomplete -p lightning-fsdp2", capture_output=True, text=True, check=True
    )
    assert completed.stdout.split()[-1] == "lightning-fsdp2"
    for option in ("--trainer.strategy.tp_size", "--trainer.strategy.config.float8", "--model.config", "--data.path"):
        assert option in script
    assert len(script) < 100_000


RUN_ALL = """
import sys
from lightning_fsdp2.cli import main

def run_all(commands):
    for command in commands:
        sys.argv = ["lightning-fsdp2", *command]
        try:
            main()
        except SystemExit as exit_:
            assert not exit_.code
"""
"""Runs commands one after the other, which saves the time of their imports."""


@pytest.mark.guarantees("quickstart-report", "installed-package")
@pytest.mark.slow
def test_the_wheel_works_in_an_empty_directory(tmp_path):
    pytest.importorskip("hatchling", reason="needs the build backend")
    root = Path(__file__).parents[2]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(root)], check=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    empty = tmp_path / "empty"
    empty.mkdir()
    short = ["--trainer.devices=1", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    last, model = "outputs/quickstart/last.ckpt", "outputs/quickstart/model"
    # the wheel itself on the path: what is not in it cannot be found
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(wheel, unpacked, "zip")
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}

    def run_python(*args: str) -> str:
        command = [sys.executable, *args]
        result = subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout

    run_python("-m", "lightning_fsdp2", "quickstart", *short, "--trainer.max_steps=2")
    config = yaml.safe_load((unpacked / "lightning_fsdp2" / "cli" / "quickstart.yaml").read_text())
    config["trainer"]["callbacks"][1]["init_args"]["every_n_train_steps"] = 2
    (empty / "run.yaml").write_text(yaml.safe_dump(config))
    longer = ["--trainer.max_steps=4", f"--ckpt_path={last}"]
    run_python("-m", "lightning_fsdp2", "fit", "--config=run.yaml", *short, *longer)
    commands = [["describe", "--config=run.yaml"], ["verify", last], ["export", last, model]]
    printed = run_python("-c", f"{RUN_ALL}\nrun_all({commands!r})")
    assert "771.33 K, all trained" in printed
    assert f"{last} is complete." in printed
    assert f"{model} is complete." in printed
    assert json.loads((empty / model / "config.json").read_text())["model_type"] == "llama"
    [metrics] = (empty / "outputs" / "quickstart").glob("version_1/metrics.csv")
    assert ",4," in metrics.read_text()  # the validation behind the last step of the resumed run


@pytest.mark.usefixtures("_restored_settings")
def test_modules_in_the_working_directory_are_found(tmp_path, monkeypatch, capsys):
    """Also by a program whose folder is another one, such as an installed script."""
    (tmp_path / "module_of_a_newcomer.py").write_text(
        "from lightning.pytorch import LightningModule\n"
        "class Model(LightningModule):\n"
        "    def __init__(self, width: int = 3) -> None:\n"
        "        super().__init__()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--model=module_of_a_newcomer.Model", "--print_config"])
    assert exit_.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"] == {"width": 3}
