"""What the measuring callbacks log, against numbers from one process; and what they cost a step that does not log."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.models import make_token_batches
from helpers.oracle import token_sum_loss
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import (
    Batch,
    Regressor,
    make_batches,
    make_language_model,
    make_loader,
    make_optimizer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_fsdp2.callbacks import (
    ExponentialMovingAverage,
    GarbageCollection,
    GradientNorm,
    LearningRates,
    LossOverRanks,
    MemoryUsage,
    NaNGuard,
    Throughput,
    TrainingProgressBar,
)

WORLD = 2
each_strategy = pytest.mark.parametrize("kind", STRATEGIES.values(), ids=STRATEGIES)


class Recorder(DummyLogger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)


def record(
    kind: Kind, module: pl.LightningModule, batches: Sequence[Batch], callbacks: list[pl.Callback], **options: Any
) -> dict[int, dict[str, float]]:
    recorder = Recorder()
    trainer = kind.make_trainer(logger=recorder, callbacks=callbacks, **options)
    trainer.fit(module, make_loader(batches))
    return recorder.rows


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


@each_strategy
@pytest.mark.parametrize("clip", [0.5, None])
def test_loss_and_norm_are_those_of_one_process(kind: Kind, clip: float | None) -> None:
    batches = make_token_batches(12)

    def run() -> tuple[Any, Any]:
        callbacks = [GradientNorm(), LossOverRanks(), LearningRates(), NaNGuard()]
        options = {"max_steps": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 2, "gradient_clip_val": clip}
        rows = record(kind, make_language_model(), batches, callbacks, **options)
        return rows, train_language_model_alone(batches, 4, clip)

    for rows, expected in kind.run(run, WORLD):
        assert list(rows) == [1], "another step than the second was logged"
        for name, value in expected[1].items():
            assert rows[1][name] == pytest.approx(value, rel=1e-5), name
        assert rows[1]["learning_rate/group_0"] == 0.3
