"""Every row of every logger has its tokens, counted exactly, and every logger knows what the run is."""

import csv
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from helpers.collectives import CountsStep, StepCounter
from helpers.models import make_token_batches
from helpers.recorder import Recorder
from helpers.strategies import STRATEGIES
from helpers.tracked_jobs import LENGTHS, finished_runs, make_batches, run_job
from helpers.user_modules import Regressor, make_language_model, make_loader, make_trainer
from helpers.user_modules import make_batches as make_regression_batches
from helpers.wandb_reader import read_runs
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_fsdp2.loggers import WandbLogger
from lightning_fsdp2.strategies.tracking import Tracking

IGNORED = {"trainer/global_step", "_step", "_runtime", "_timestamp", "hp_metric"}

Metrics = dict[tuple[str, int], float]


def read_csv(folder: Path) -> Metrics:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (name, int(row["step"])): float(text) for row in rows for name, text in row.items() if text and name != "step"
    }


def read_tensorboard(folder: Path) -> Metrics:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    names = set(events.Tags()["scalars"]) - IGNORED
    return {(name, event.step): event.value for name in names for event in events.Scalars(name)}


def read_wandb(folder: Path) -> Metrics:
    (run,) = read_runs(folder)
    return {
        (name, row["trainer/global_step"]): value
        for row in run.rows
        for name, value in row.items()
        if name not in IGNORED
    }


def test_csv_tensorboard_and_wandb_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def make_loggers() -> list[Any]:
        return [
            CSVLogger(tmp_path, "csv", ""),
            TensorBoardLogger(tmp_path, "tensorboard", ""),
            WandbLogger(save_dir=str(tmp_path), offline=True),
        ]

    run_job(tmp_path, make_loggers)
    metrics = read_csv(tmp_path / "csv")
    assert {name for name, _ in metrics} >= {
        "train/loss",
        "train/total_tokens",
        "throughput/tokens_per_second",
        "epoch",
    }
    assert {step for _, step in metrics} == {1, 3}
    assert metrics == pytest.approx(read_wandb(tmp_path))
    assert metrics == pytest.approx(read_tensorboard(tmp_path / "tensorboard"), rel=1e-6)  # float32
    (run,) = read_runs(tmp_path)
    for folder in ("csv", "tensorboard"):
        told = yaml.unsafe_load((tmp_path / folder / "hparams.yaml").read_text())
        assert told["run"] == run.config["run"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("fsdp2", {"tp_size": 2}, id="tp2"),
        pytest.param("fsdp2", {"cp_size": 2}, id="cp2", marks=pytest.mark.slow),
        pytest.param("ddp", {}, id="ddp", marks=pytest.mark.slow),
        pytest.param("megatron_fsdp", {}, id="megatron_fsdp", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_exact_with_accumulation_and_validation_between_logging_steps(
    name: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    kind = STRATEGIES[name]

    def run() -> dict[int, dict[str, float]]:
        recorder = Recorder()
        trainer = make_trainer(
            kind.strategy(**sizes),
            logger=recorder,
            accumulate_grad_batches=2,
            max_steps=2,
            log_every_n_steps=2,
            val_check_interval=1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
        )
        loader = DataLoader(make_batches(), batch_size=None) if sizes else make_loader(make_batches())
        trainer.fit(make_language_model(), loader, loader)
        return recorder.rows

    readers = 1 if sizes else 2
    for rows in kind.run(run, 2):
        totals = {step: row.get("train/total_tokens") for step, row in rows.items()}
        # the first step is validated, the second one logged as well
        assert totals == {step: 2.0 * sum(LENGTHS[: 2 * (step + 1) * readers]) for step in (0, 1)}


def test_rows_of_batches_without_tokens_have_no_such_axis_and_loggers_are_left_as_they_were() -> None:
    def run() -> Any:
        recorder = Recorder()
        trainer = make_trainer(logger=recorder, log_every_n_steps=1)
        loader = make_loader(make_regression_batches(4))
        trainer.fit(Regressor(), loader, loader)
        return recorder.rows, "log_metrics" in vars(recorder), [type(each).__name__ for each in trainer.callbacks]

    for rows, is_wrapped, callbacks in STRATEGIES["fsdp2"].run(run, 2):
        assert rows
        assert not any("train/total_tokens" in row for row in rows.values())
        assert not is_wrapped
        assert "Tracking" not in callbacks


def test_a_step_that_is_not_logged_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")

    def count(loggers: list[Any]) -> StepCounter:
        counts = CountsStep(3)
        options = {"max_steps": 5, "log_every_n_steps": 3, "logger": loggers, "callbacks": [counts]}
        make_trainer(**options).fit(make_language_model(), make_loader(make_token_batches(10)))
        return counts.counter

    def compare() -> None:
        with patch.object(Tracking, "on_train_batch_end", Callback.on_train_batch_end):
            without = count([])
        with finished_runs():
            tracked = count([CSVLogger(tmp_path), WandbLogger(save_dir=str(tmp_path), offline=True)])
        assert sum(without.operations.values()) > 500, "no step was counted"
        assert tracked.operations == without.operations
        assert tracked.collectives == without.collectives

    STRATEGIES["fsdp2"].run(compare, 2)
