"""What the measuring callbacks log, against numbers from one process; and what they cost a step that does not log."""

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from helpers.collectives import CountsStep, StepCounter
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import token_sum_loss
from helpers.ranks import run_ranks
from helpers.recorder import Recorder, record
from helpers.strategies import STRATEGIES, Kind
from helpers.tracked_jobs import finished_runs
from helpers.user_modules import (
    Batch,
    Regressor,
    make_batches,
    make_language_model,
    make_loader,
    make_optimizer,
    make_trainer,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import FSDP2Strategy, callbacks
from lightning_fsdp2.callbacks import GradientNorm, LearningRates, LossOverRanks, NaNGuard
from lightning_fsdp2.loggers import WandbLogger
from lightning_fsdp2.strategies.parts.tracking import Tracking

WORLD = 2

DEEP_LLAMA = {**LLAMA, "num_hidden_layers": 8}
"""Few layers for a real model; callbacks cost the same however deep it is."""

each_strategy = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if name == "fsdp2" else pytest.mark.slow) for name, kind in STRATEGIES.items()],
    ids=STRATEGIES,
)


def train_language_model_alone(batches: Sequence[Batch], window: int, clip: float) -> list[dict[str, float]]:
    """Mean loss, highest loss of a rank, and norm before clipping of every step."""
    model, steps = make_language_model().model, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for start in range(0, len(batches), window):
        parts = [token_sum_loss(model, batch) for batch in batches[start : start + window]]
        optimizer.zero_grad()
        loss = sum(part for part, _ in parts) / sum(tokens for _, tokens in parts)
        loss.backward()
        ranks = [parts[rank::WORLD] for rank in range(WORLD)]
        means = [float(sum(part for part, _ in own)) / max(1, sum(tokens for _, tokens in own)) for own in ranks]
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        steps.append({"loss/mean": float(loss), "loss/max": max(means), "gradients/norm": float(norm)})
        optimizer.step()
    return steps


@pytest.mark.guarantees("measuring-callbacks")
@each_strategy
@pytest.mark.parametrize("clip", [0.5, pytest.param(None, marks=pytest.mark.slow)])
def test_loss_and_norm_are_those_of_one_process(kind: Kind, clip: float | None) -> None:
    batches = make_token_batches(12)

    def run() -> tuple[Any, Any]:
        measuring = [GradientNorm(), LossOverRanks(), LearningRates(), NaNGuard()]
        options = {"max_steps": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 2, "gradient_clip_val": clip}
        rows = record(kind, make_language_model(), batches, measuring, **options)
        return rows, train_language_model_alone(batches, 4, clip)

    for rows, expected in kind.run(run, WORLD):
        assert list(rows) == [1], "another step than the second was logged"
        for name, value in expected[1].items():
            assert rows[1][name] == pytest.approx(value, rel=1e-5), name
        assert rows[1]["learning_rate/group_0"] == 0.3


def train_regressor_alone(batches: Sequence[Batch], window: int) -> list[dict[str, float]]:
    module, steps = Regressor(), []
    optimizer = make_optimizer(module.parameters())
    for start in range(0, len(batches), window):
        losses = [module.loss(batch) for batch in batches[start : start + window]]
        optimizer.zero_grad()
        loss = sum(losses) / window
        loss.backward()
        ranks = [float(sum(losses[rank::WORLD]) / (window // WORLD)) for rank in range(WORLD)]
        norm = nn.utils.clip_grad_norm_(module.parameters(), math.inf)
        steps.append({"loss/mean": float(loss), "loss/max": max(ranks), "gradients/norm": float(norm)})
        optimizer.step()
    return steps


@pytest.mark.slow
@each_strategy
def test_loss_and_norm_of_a_users_own_module(kind: Kind) -> None:
    batches = make_batches(12)

    def run() -> tuple[Any, Any]:
        measuring = [LossOverRanks(), NaNGuard(), GradientNorm()]  # the guard is the first to need the norm
        options = {"max_steps": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 1, "gradient_clip_val": 0.01}
        options["gradient_clip_algorithm"] = "value"
        clipped = record(kind, Regressor(), batches[:4], measuring, **{**options, "max_steps": 1})
        del options["gradient_clip_val"], options["gradient_clip_algorithm"]
        return clipped[0], record(kind, Regressor(), batches, measuring, **options), train_regressor_alone(batches, 4)

    for clipped, rows, expected in kind.run(run, WORLD):
        assert clipped == pytest.approx(expected[0], rel=1e-5), "clipping by value came before the norm"
        for step, values in enumerate(expected):
            assert rows[step] == pytest.approx(values, rel=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "GarbageCollection": {"every_n_batches": 1},
    "HuggingFaceExport": {"overwrite": True},
    "ProcessGroupTimeout": {"train": timedelta(seconds=50)},
    "Preemption": {"exit_code": 75},
}

LEFT_OUT = {"MemorySnapshot", "ExpertBias", "ExpertLoad"}
"""Callbacks that need a GPU, or a mixture of experts."""


@pytest.mark.guarantees("no-waiting", "operations-of-callbacks")
@pytest.mark.slow
@each_strategy
@pytest.mark.parametrize("clip", [0.5, None])
def test_a_step_that_does_not_log_costs_at_most_a_hundredth_more(
    kind: Kind, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def run(names: list[str], loggers: list[Logger]) -> StepCounter:
        counts = CountsStep(2)  # behind a logging step, whose numbers are still there
        trainer = kind.make_trainer(
            callbacks=[*(getattr(callbacks, name)(**OPTIONS.get(name, {})) for name in names), counts],
            logger=loggers,
            default_root_dir=tmp_path,
            max_steps=4,
            log_every_n_steps=2,
            gradient_clip_val=clip,
            enable_progress_bar=bool(names),
        )
        module = make_language_model()
        module.model = make_causal_lm(DEEP_LLAMA)
        with finished_runs():
            trainer.fit(module, make_loader(make_token_batches(8)))
        return counts.counter

    def compare() -> None:
        everything = [name for name in callbacks.__all__ if name not in LEFT_OUT]
        with patch.object(Tracking, "attach", lambda *_: None):  # nothing that the strategies add, either
            without = run([], [])
        wandb_logger = WandbLogger(save_dir=str(tmp_path), offline=True)
        with_all = run(everything, [CSVLogger(tmp_path), TensorBoardLogger(tmp_path), wandb_logger])
        assert sum(without.operations.values()) > 1000, "no step was counted"
        assert with_all.collectives == without.collectives
        assert with_all.host_syncs == without.host_syncs
        added = sum(with_all.operations.values()) - sum(without.operations.values())
        assert 0 < added <= 0.01 * sum(without.operations.values()), with_all.operations - without.operations
        assert added <= 6, "docs/callbacks.md says four to six"

    kind.run(compare, WORLD)


@pytest.mark.slow
def test_a_micro_batch_of_a_step_that_does_not_log_adds_nothing_up() -> None:
    def count(measuring: list[pl.Callback]) -> int:
        counts = CountsStep(3)
        options = {"max_steps": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 10}
        record(STRATEGIES["ddp"], Regressor(), make_batches(12), [*measuring, counts], **options)
        return sum(counts.counter.operations.values())

    for without, with_all in run_ranks(lambda: (count([]), count([LossOverRanks(), GradientNorm()])), WORLD):
        assert with_all == without > 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}], ids=["tp2", "cp2"])
def test_ranks_that_share_a_batch_count_once(sizes: dict[str, int]) -> None:
    batches = make_token_batches(4)

    def run() -> tuple[Any, Any]:
        recorder = Recorder()
        measuring = [GradientNorm(), LossOverRanks(), NaNGuard()]
        options = {"max_steps": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 1, "gradient_clip_val": 0.5}
        trainer = make_trainer(FSDP2Strategy(**sizes), logger=recorder, callbacks=measuring, **options)
        module = make_language_model()
        trainer.fit(module, DataLoader(batches, batch_size=None))
        return recorder.rows, train_language_model_alone(batches, 2, 0.5)

    for rows, expected in run_ranks(run, WORLD):
        for step, values in enumerate(expected):
            for name in ("loss/mean", "gradients/norm"):
                assert rows[step][name] == pytest.approx(values[name], rel=1e-5), name
            if "tp_size" in sizes:
                assert rows[step]["loss/max"] == pytest.approx(values["loss/mean"], rel=1e-5)


@pytest.mark.slow
@each_strategy
def test_the_norm_of_a_clipped_step_is_computed_once(kind: Kind) -> None:
    def run() -> int:
        counts = CountsStep(1)
        measuring = [GradientNorm(), NaNGuard(), counts]
        options = {"max_steps": 3, "log_every_n_steps": 2, "gradient_clip_val": 0.5}
        record(kind, make_language_model(), make_token_batches(6), measuring, **options)
        return counts.counter.operations["aten::_foreach_norm"]

    assert kind.run(run, WORLD) == [1, 1]
