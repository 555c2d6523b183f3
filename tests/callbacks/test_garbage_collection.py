"""Garbage is collected at fixed batches and at no other time, on every rank."""

import gc
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer

from lightning_fsdp2.callbacks import GarbageCollection


class Watches(pl.Callback):
    def __init__(self) -> None:
        self.collections: list[tuple[int, int]] = []
        self.batch = -1
        self.enabled: set[bool] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx
        self.enabled.add(gc.isenabled())

    def see(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collections.append((self.batch, info["generation"]))


def test_every_second_batch_and_no_other() -> None:
    def run() -> list[tuple[int, int]]:
        watch = Watches()
        trainer = make_trainer(callbacks=[watch, GarbageCollection(every_n_batches=2)], max_steps=5)
        gc.callbacks.append(watch.see)
        trainer.fit(Regressor(), make_loader(make_batches(10)))
        gc.callbacks.remove(watch.see)
        assert watch.enabled == {False}
        assert gc.isenabled(), "the collector stayed off"
        return [(batch, generation) for batch, generation in watch.collections if 0 <= batch < 4]

    for collections in run_ranks(run, 2):
        assert collections == [(1, 1), (3, 1)]


def test_an_error_leaves_the_collector_on() -> None:
    class Fails(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    def run() -> bool:
        with pytest.raises(ZeroDivisionError):
            make_trainer(callbacks=[GarbageCollection()]).fit(Fails(), make_loader(make_batches(2)))
        return gc.isenabled()

    assert run_ranks(run, 1) == [True]


@pytest.mark.slow
def test_a_collector_that_is_off_stays_off() -> None:
    def run() -> bool:
        gc.disable()
        with patch.object(gc, "enable", lambda: pytest.fail("the collector was turned on")):
            make_trainer(callbacks=[GarbageCollection()], max_steps=1).fit(Regressor(), make_loader(make_batches(2)))
        return gc.isenabled()

    assert run_ranks(run, 1) == [False]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every_n_batches": 0}, r"every_n_batches=0\) must be 1 or more"), ({"generation": 3}, "must be 0, 1 or 2")],
)
def test_values_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GarbageCollection(**options)
