"""Every row of every logger has its tokens, counted exactly, and every logger knows what the run is."""

import csv
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from helpers.collectives import CountsStep, StepCounter
from helpers.models import make_token_batches
from helpers.ranks import run_ranks
from helpers.recorder import Recorder
from helpers.strategies import STRATEGIES
from helpers.tracked_jobs import LENGTHS, finished_runs, make_batches, run_job
from helpers.user_modules import Regressor, RowRecorder, make_language_model, make_loader, make_trainer
from helpers.user_modules import make_batches as make_regression_batches
from helpers.wandb_reader import read_runs
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_fsdp2.callbacks import GradientNorm, LearningRates, LossOverRanks, MemoryUsage
from lightning_fsdp2.loggers import WandbLogger
from lightning_fsdp2.strategies.parts.tracking import Tracking, _Row

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


@pytest.mark.guarantees("tokens-and-description")
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


@pytest.mark.guarantees("hp-metric")
def test_tensorboard_gets_no_row_that_nobody_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path, "tensorboard", "")

    def run() -> None:
        trainer = make_trainer(logger=logger, log_every_n_steps=1)
        trainer.fit(Regressor(), make_loader(make_regression_batches(4)))

    run_ranks(run, 2)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"] == []
    assert "run" in yaml.unsafe_load((tmp_path / "tensorboard" / "hparams.yaml").read_text())


@pytest.mark.guarantees("tokens-and-description")
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


def read_rows(folder: Path) -> list[dict[str, float]]:
    """Rows of CSV, each with what it has."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


class LogsToo(Callback):
    """Logs a number of its own, and then fails or not."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        number = torch.tensor(1.0)
        for logger in trainer.loggers:
            logger.log_metrics({"own": number}, trainer.global_step - 1)
        number += 1
        if trainer.global_step == self.fails_at:
            raise RuntimeError("as asked for")


@pytest.mark.guarantees("one-row-per-step")
@pytest.mark.parametrize("fails_at", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_is_one_row(fails_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    measuring = {"gradients/norm", "loss/mean", "learning_rate/group_0", "memory/process_gib"}

    def make_callbacks() -> list[Any]:
        return [GradientNorm(), LossOverRanks(), LearningRates(), MemoryUsage(), LogsToo(fails_at)]

    def run() -> None:
        run_job(
            tmp_path,
            lambda: [CSVLogger(tmp_path, "csv", ""), WandbLogger(save_dir=str(tmp_path), offline=True)],
            callbacks=make_callbacks,
            log_every_n_steps=1,
        )

    with nullcontext() if fails_at is None else pytest.raises(AssertionError, match="as asked for"):
        run()
    rows = read_rows(tmp_path / "csv")
    (wandb_run,) = read_runs(tmp_path)
    assert [row["step"] for row in rows] == list(range(fails_at or 4))
    assert [row["trainer/global_step"] for row in wandb_run.rows] == list(range(fails_at or 4))
    for row, other in zip(rows, wandb_run.rows, strict=True):
        assert row.keys() - other.keys() == {"step"}
        assert row["own"] == other["own"] == 1.0, "what was logged has changed since"
    whole = rows[: None if fails_at is None else -1]  # the step that failed has no row of `self.log`
    assert all({"train/loss", "throughput/step_seconds", "epoch", *measuring} <= row.keys() for row in whole)
    assert measuring <= rows[-1].keys()


class LogsLoss(RowRecorder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def make_tokens(*lengths: int) -> DataLoader[Any]:
    batches: Any = [{"input_ids": torch.ones(1, length)} for length in lengths]
    return DataLoader(batches, batch_size=None)


def test_a_row_is_written_before_the_next_batch_and_before_a_validation() -> None:
    class Looks(Callback):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def look(self, trainer: Any, *args: Any) -> None:
            self.seen.append(list(trainer.logger.rows))

        on_train_batch_start = on_validation_start = on_train_end = look

    def run() -> list[list[int]]:
        looks = Looks()
        options = {"log_every_n_steps": 1, "max_steps": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
        trainer = make_trainer(logger=Recorder(), callbacks=[looks], **options)
        trainer.fit(LogsLoss(), make_tokens(1, 1), make_tokens(1))
        return looks.seen

    assert run_ranks(run, 1) == [[[], [0], [0, 1], [0, 1]]]


def test_an_epoch_is_logged_with_all_of_its_tokens() -> None:
    """Also with those of steps that are not logged."""

    def run() -> Any:
        recorder = Recorder()
        make_trainer(logger=recorder, log_every_n_steps=2, max_epochs=1).fit(LogsLoss(), make_tokens(2, 3, 4))
        return recorder.rows

    (rows,) = run_ranks(run, 1)
    assert {step: row["train/total_tokens"] for step, row in rows.items()} == {1: 5.0, 2: 9.0}
    assert "loss_epoch" in rows[2]


def test_what_is_no_number_and_what_has_no_step_goes_its_own_way() -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.logger.log_metrics({"text": "a"}, 0)
            trainer.logger.log_metrics({"stepless": 1.0}, None)

    def run() -> dict[int, dict[str, float]]:
        recorder = Recorder()
        options = {"log_every_n_steps": 1, "max_steps": 1, "callbacks": [Logs()]}
        make_trainer(logger=recorder, **options).fit(make_language_model(), make_loader(make_token_batches(2)))
        return recorder.rows

    rows = STRATEGIES["fsdp2"].run(run, 1)[0]
    assert rows[0]["text"] == "a"
    assert rows[0]["train/loss"] > 0
    assert rows[None]["stepless"] == 1.0


def test_rows_of_batches_without_tokens_have_no_such_axis_and_loggers_are_left_as_they_were() -> None:
    def run() -> Any:
        recorder = Recorder()
        trainer = make_trainer(logger=recorder, log_every_n_steps=1)
        loader = make_loader(make_regression_batches(4))
        trainer.fit(Regressor(), loader, loader)
        return (
            recorder.rows,
            {"log_metrics", "finalize"} & vars(recorder).keys(),
            [type(each).__name__ for each in trainer.callbacks],
        )

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


def test_first_logged_loss_that_is_not_finite_is_one_warning() -> None:
    row = _Row(SimpleNamespace())  # type: ignore[arg-type]
    row.log({"train/loss": torch.tensor(1.0)}, step=2)
    with pytest.warns(UserWarning, match=r"train/loss of step 2 is nan.*NaNGuard"):
        row.log({"train/loss": torch.tensor(float("nan"))}, step=2)
    row.log({"train/loss": torch.tensor(float("inf"))}, step=2)  # warnings are errors in the tests
