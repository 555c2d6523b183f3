"""Every callback is made by a YAML file, and together they train."""

import csv
from pathlib import Path

import pytest
import yaml
from helpers.models import LLAMA
from helpers.ranks import run_ranks

from lightning_fsdp2 import callbacks
from lightning_fsdp2.cli import FSDP2CLI

CALLBACKS = {
    "Throughput": {"peak_flops": 1e12},
    "MemoryUsage": {},
    "GradientNorm": {},
    "LearningRates": {},
    "LossOverRanks": {},
    "NaNGuard": {},
    "GarbageCollection": {"every_n_batches": 2, "generation": 1},
    "ExponentialMovingAverage": {"decay": 0.9, "every_n_steps": 2},
    "TrainingProgressBar": {"refresh_rate": 4, "leave": False},
    "ModelSummary": {"max_depth": 2},
    "ProcessGroupTimeout": {"train": "0:02:00"},
    "Preemption": {"signals": ["SIGUSR2"], "exit_code": 75},
    "FlightRecorder": {"dirpath": "records"},
    "StepProfiler": {"wait": 0, "warmup": 1, "active": 1},
    "MemorySnapshot": {"at_step": 2},
    "RunReport": {},
    "HuggingFaceExport": {},
    "ExpertLoad": {},
    "ExpertBias": {"rate": 0.01},
}

METRICS = {
    "train/total_tokens",
    "throughput/tokens_per_second",
    "throughput/tokens_per_second_per_device",
    "throughput/step_seconds",
    "throughput/data_share",
    "throughput/tflops_per_device",
    "throughput/mfu",
    "memory/process_gib",
    "gradients/norm",
    "learning_rate/group_0",
    "learning_rate/group_1",
    "loss/mean",
    "loss/max",
}


def write(folder: Path, names: list[str]) -> str:
    (folder / "text.txt").write_text("again and again " * 200)
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {"class_path": "lightning_fsdp2.FSDP2Strategy"},
            "max_steps": 4,
            "log_every_n_steps": 2,
            "gradient_clip_val": 1.0,
            "default_root_dir": str(folder),
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "", "version": "run"}},
            "callbacks": [
                {"class_path": f"lightning_fsdp2.callbacks.{name}", "init_args": CALLBACKS[name]} for name in names
            ],
        },
        "model": {
            "class_path": "lightning_fsdp2.CausalLM",
            "init_args": {"config": {**LLAMA, "vocab_size": 257, "eos_token_id": 256}},
        },
        "data": {
            "class_path": "lightning_fsdp2.TextDataModule",
            "init_args": {
                "path": str(folder / "text.txt"),
                "sequence_length": 16,
                "batch_size": 2,
                "validation_fraction": 0.0,
            },
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return f"--config={path}"


@pytest.mark.slow
def test_all_that_run_on_a_cpu_train_together(tmp_path: Path) -> None:
    names = [name for name in CALLBACKS if name not in ("MemorySnapshot", "ExpertLoad", "ExpertBias")]
    arguments = ["fit", write(tmp_path, names)]
    run_ranks(lambda: FSDP2CLI(arguments) and None, 2, group=False)
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for step in ("1", "3"):
        logged = {name for row in rows if row["step"] == step for name, value in row.items() if value}
        assert logged >= METRICS
    assert {row["step"] for row in rows} == {"1", "3"}
    assert (tmp_path / "run" / "huggingface" / "config.json").exists()
    assert len(list((tmp_path / "run" / "traces").iterdir())) == 2


def test_each_is_made_with_all_its_arguments(tmp_path: Path) -> None:
    assert set(CALLBACKS) == set(callbacks.__all__)
    made = FSDP2CLI([write(tmp_path, list(CALLBACKS))], run=False).trainer.callbacks
    for name, options in CALLBACKS.items():
        (callback,) = (callback for callback in made if type(callback) is getattr(callbacks, name))
        for option, value in options.items():
            stored = getattr(callback, option, getattr(callback, f"_{option}", None))
            assert value in (stored, str(stored)), f"{name}({option}={value})"


def test_an_argument_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, ["Throughput"])
    with pytest.raises(SystemExit):
        FSDP2CLI(["fit", config, "--trainer.callbacks.init_args.peek_flops=1"])
    assert "peek_flops" in capsys.readouterr().err
