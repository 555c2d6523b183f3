"""Schedulers that monitor a metric: all ranks have the learning rate of one process, whatever they have logged."""

import math
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import user_modules
from helpers.ranks import run_ranks
from helpers.user_modules import UserModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_fsdp2 import DDPStrategy, FSDP2Strategy
from lightning_fsdp2.strategies.monitored import _agree

make_trainer = partial(user_modules.make_trainer, max_epochs=4)

METRICS = ([1.0, 5, 2, 9], [3.0, 2, 4, 1])
"""What each rank logs in each epoch. The means are 2, 3.5, 3 and 5, so the rate falls three times."""


class Monitors(UserModule):
    seed = 1

    def build(self) -> None:
        self.layer = nn.Linear(1, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def get_metric(self) -> float:
        return METRICS[self.global_rank][self.current_epoch]

    def on_train_epoch_end(self) -> None:
        self.log("loss", self.get_metric())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


class OnRankZero(Monitors):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("loss", [2.0, 3.5, 3, 5][self.current_epoch], rank_zero_only=True)


class Manual(Monitors):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        scheduler: Any = self.lr_schedulers()
        assert isinstance(scheduler, ReduceLROnPlateau)
        scheduler.step(self.get_metric())


class Nan(Monitors):
    def get_metric(self) -> float:
        return float("nan")


@pytest.mark.parametrize("strategy", [FSDP2Strategy, DDPStrategy])
@pytest.mark.parametrize(
    ("kind", "warns"),
    [(Monitors, True), (Manual, True), (OnRankZero, False), pytest.param(Nan, False, marks=pytest.mark.slow)],
)
def test_all_ranks_have_the_rate_of_the_mean(strategy: Any, kind: Any, warns: bool) -> None:
    def run() -> tuple[float, int]:
        module = kind()
        trainer = make_trainer(strategy())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(torch.ones(2, 1)))
        told = [str(one.message) for one in caught if "differs between the ranks" in str(one.message)]
        return trainer.optimizers[0].param_groups[0]["lr"], len(told)

    parameter = nn.Parameter(torch.zeros(1))
    plateau = ReduceLROnPlateau(torch.optim.SGD([parameter], lr=1.0), patience=0, factor=0.1)
    for first, second in zip(*METRICS, strict=True):
        plateau.step(float("nan") if kind is Nan else (first + second) / 2)
    expected = plateau.optimizer.param_groups[0]["lr"]
    assert run_ranks(run, 2) == [(pytest.approx(expected), int(warns)), (pytest.approx(expected), 0)]


@pytest.mark.filterwarnings("ignore:A learning rate scheduler monitors")
def test_the_scheduler_of_a_manual_module_can_be_changed() -> None:
    class Own(ReduceLROnPlateau):
        def calm(self) -> None:
            self.patience = 7

    class Changes(Manual):
        def configure_optimizers(self) -> Any:
            self.plateau = Own(torch.optim.SGD(self.parameters(), lr=1.0), patience=0)
            return [self.plateau.optimizer], [self.plateau]

        def on_train_epoch_end(self) -> None:
            scheduler: Any = self.lr_schedulers()
            assert isinstance(scheduler, Own)
            scheduler.step(metrics=self.get_metric())
            scheduler.note = self.current_epoch
            scheduler.calm()
            del scheduler.mode

    def run() -> tuple[Any, ...]:
        module = Changes()
        make_trainer(max_epochs=1).fit(module, DataLoader(torch.ones(2, 1)))
        plateau = module.plateau
        assert type(plateau) is Own
        return plateau.note, plateau.patience, hasattr(plateau, "mode"), plateau.best

    assert run_ranks(run, 2) == [(0, 7, False, 2.0)] * 2


def test_ranks_agree_on_one_tensor_and_no_objects() -> None:
    def run() -> list[Any]:
        with patch.object(dist, "all_gather_object", side_effect=AssertionError):
            values = ((None, None), (float("nan"), None), (1.0, 3.0), (torch.tensor(2.0), 2.0), (0.0, None))
            return [_agree(dist.group.WORLD, {"loss"}, "loss", pair[dist.get_rank()]) for pair in values]

    for nothing, nan, mean, same, known in run_ranks(run, 2):
        assert nothing is None
        assert math.isnan(nan)
        assert (float(mean), float(same), float(known)) == (2, 2, 0)
