"""The table of the Trainer's options: what each is to do, how that is checked, which strategy refuses it and why.

A check trains on all ranks, and beside that in one process that sees the same global batches, with Lightning's own
Trainer: what an option does there, it does here.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import WORLD, Batch, Regressor, assert_same_weights, make_batches, make_loader, make_trainer

Check = Callable[[Kind, Path], None]
"""Called on every rank with a strategy and an empty folder that all ranks share."""


@dataclass(frozen=True)
class Option:
    """A row: an argument of the Trainer, a callback or a method of the Tuner."""

    group: str
    name: str
    tried: str
    """What the check has seen, for the reader of the document."""

    check: Check | None
    """None for what cannot be tried on this machine."""

    refused: dict[str, str] = field(default_factory=dict)
    """The reasons, by strategy; refusals are errors before training that name the option."""

    named: str = ""
    """The pattern of the refusal where it is not the option's name."""

    slow: bool = False

    def describe(self, strategy: str) -> str:
        """The cell of the document."""
        if self.check is None:
            return "not tried here"
        return f"refused: {self.refused[strategy]}" if strategy in self.refused else "works"

    def run(self, strategy: str, folder: Path) -> None:
        """Check the option, or that it is refused before training."""
        if self.check is None:
            return
        kind = STRATEGIES[strategy]
        with _global_state_kept():
            if strategy not in self.refused:
                self.check(kind, folder)
                return
            steps = patch.object(kind.strategy, "training_step", side_effect=AssertionError("trained before"))
            error = pytest.raises((ValueError, MisconfigurationException), match=self.named or re.escape(self.name))
            with steps, error:
                self.check(kind, folder)


OPTIONS: list[Option] = []


def option(
    group: str, name: str, tried: str, *, refused: dict[str, str] | str = "", named: str = "", slow: bool = False
) -> Callable[[Check], Check]:
    """Add a row with the decorated check; one reason stands for all strategies."""
    reasons = dict.fromkeys(STRATEGIES, refused) if isinstance(refused, str) and refused else dict(refused or {})

    def add(check: Check) -> Check:
        OPTIONS.append(Option(group, name, tried, check, reasons, named, slow))
        return check

    return add


trainer_option = partial(option, "Trainer")
callback_option = partial(option, "callbacks")
tuner_option = partial(option, "Tuner")


def try_options(strategy: str, options: Sequence[Option], folder: Path) -> None:
    """Check ``options`` one after another, all in one start of the ranks.

    Raises:
        RankError: For the first that fails; it names the option.
    """
    STRATEGIES[strategy].run(_try_on_rank, WORLD, strategy, options, folder)


def _try_on_rank(strategy: str, options: Sequence[Option], folder: Path) -> None:
    for row in options:
        own = folder / row.group / row.name
        own.mkdir(parents=True, exist_ok=True)
        try:
            row.run(strategy, own)
        except BaseException as error:
            raise AssertionError(f"{row.group}, {row.name}: {type(error).__name__}: {error}") from error
        dist.barrier()  # the next one is not to begin where a rank may still fail


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Undo what Trainers set for the whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    anomaly, benchmark = torch.is_anomaly_enabled(), torch.backends.cudnn.benchmark
    with patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(deterministic)
    torch.autograd.set_detect_anomaly(anomaly)
    torch.backends.cudnn.benchmark = benchmark


# ---------------------------------------------------------------------- runs to compare


class Both(NamedTuple):
    """A run on the mesh, and the same in one process."""

    mesh: pl.Trainer
    alone: pl.Trainer


def fit(kind: Kind, batches: Sequence[Batch], module: Any = None, validation: Any = (), **options: Any) -> pl.Trainer:
    """Train on the mesh: rank r reads the batches r, r + 2, ..."""
    trainer = kind.make_trainer(**options)
    trainer.fit(module or Regressor(), make_loader(batches), make_loader(validation) if validation else None)
    return trainer


def make_lone_trainer(**options: Any) -> pl.Trainer:
    """Lightning's own, for this process alone."""
    with patch.dict(os.environ):
        for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK"):
            os.environ.pop(name)
        return make_trainer("auto", **options)


def join(batches: Sequence[Batch]) -> list[Batch]:
    """One batch for those that the ranks read at the same time."""
    return [
        {key: torch.cat([batch[key] for batch in batches[start : start + WORLD]]) for key in batches[start]}
        for start in range(0, len(batches), WORLD)
    ]


@contextmanager
def as_one_process() -> Iterator[None]:
    """Let every rank be the one process of a Trainer of its own."""
    rank = rank_zero_only.rank
    try:
        yield
    finally:
        rank_zero_only.rank = rank


def fit_alone(batches: Sequence[Batch], module: Any = None, validation: Any = (), **options: Any) -> pl.Trainer:
    """The same in one process, on the same global batches."""
    with as_one_process():
        trainer = make_lone_trainer(**options)
        loaders = [DataLoader(join(part), batch_size=None) if part else None for part in (batches, validation)]
        trainer.fit(module or Regressor(), *loaders)
    return trainer


def fit_both(
    kind: Kind,
    batches: int = 4,
    *,
    make_module: Callable[[], pl.LightningModule] = Regressor,
    make_callbacks: Callable[[], list[pl.Callback]] = list,
    validation: int = 0,
    **options: Any,
) -> Both:
    """Train twice, and compare the weights."""
    data = make_batches(batches * WORLD)
    runs = (partial(fit, kind), fit_alone)
    mesh, alone = (
        run(data, make_module(), data[: validation * WORLD], callbacks=make_callbacks(), **options) for run in runs
    )
    assert_same_weights(mesh.lightning_module, alone.lightning_module)
    for counter in ("global_step", "current_epoch"):
        assert getattr(mesh, counter) == getattr(alone, counter), counter
    return Both(mesh, alone)
