"""Training steps have a short timeout on every group, and nothing else has."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind, fast_under
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer
from torch import Tensor

from lightning_fsdp2 import CheckpointConfig
from lightning_fsdp2.callbacks import ProcessGroupTimeout
from lightning_fsdp2.compat.torch import get_group_timeout
from lightning_fsdp2.ranks import default_group
from lightning_fsdp2.strategies.launch import rendezvous

SHORT, LONG = timedelta(seconds=7), timedelta(seconds=60)


def read_timeouts() -> set[timedelta]:
    """Of all groups of this process, but for those that wait on their own terms."""
    others = [kept for purpose, kept in default_group._kept.items() if purpose != "control"]
    return {get_group_timeout(group) for group in dist.distributed_c10d._world.pg_map if group not in others}


class Reads(pl.Callback):
    """Before the callback or behind it, it must not matter."""

    def __init__(self) -> None:
        self.read: list[tuple[str, set[timedelta]]] = []

    def note(self, where: str) -> None:
        if (where, read_timeouts()) not in self.read[-1:]:
            self.read.append((where, read_timeouts()))

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("step")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.note("validation")

    def on_save_checkpoint(self, *args: Any) -> None:
        self.note("save")

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.note("test")


class SavesOnce(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.batches += 1
        if self.batches == 10:  # in the second epoch
            trainer.save_checkpoint(self.path)


@pytest.mark.guarantees("short-timeouts")
@fast_under("fsdp2")
def test_training_steps_alone_have_the_short_timeout(kind: Kind, tmp_path: Path) -> None:
    def run() -> list[tuple[str, set[timedelta]]]:
        reads = Reads()
        trainer = kind.make_trainer(
            timeout=60,
            checkpoint=CheckpointConfig(async_save=kind.shards),
            callbacks=[ProcessGroupTimeout(train=SHORT), reads, SavesOnce(tmp_path / "a.ckpt")],
            max_epochs=2,
            max_steps=-1,
            accumulate_grad_batches=2,
            num_sanity_val_steps=1,
            enable_checkpointing=False,
        )
        module, batches = Regressor(), make_batches(16)
        trainer.fit(module, make_loader(batches), make_loader(batches[:2]))
        trainer.test(module, make_loader(batches[:2]), verbose=False)
        return reads.read

    first = [("validation", {LONG}), ("step", {LONG}), ("step", {SHORT}), ("validation", {LONG})]
    second = [("step", {SHORT}), ("save", {LONG}), ("step", {SHORT}), ("validation", {LONG})]
    for read in kind.run(run, 2):
        assert read == [*first, *second, ("test", {LONG})]


@pytest.mark.guarantees("short-timeouts")
@fast_under("fsdp2")
def test_a_rank_that_does_not_come_is_found(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PROBE_TIMEOUT", timedelta(seconds=0.5))  # the other rank waits for this one
    found = tmp_path / "found"

    class Hangs(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2 and self.global_rank == 1:
                while not found.exists():
                    time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    def run() -> str:
        trainer = kind.make_trainer(
            timeout=60, callbacks=[ProcessGroupTimeout(train=timedelta(seconds=1))], max_steps=4
        )
        with pytest.raises(RuntimeError) as error:
            trainer.fit(Hangs(), make_loader(make_batches(8)))
        found.touch()
        return str(error.value)

    assert "Timed out waiting 1000ms" in kind.run(run, 2)[0]


def test_what_cannot_be_is_said() -> None:
    def fit(strategy: Any, callback: ProcessGroupTimeout) -> str:
        with pytest.raises(ValueError, match="ProcessGroupTimeout") as error:
            make_trainer(strategy, callbacks=[callback], max_steps=1).fit(Regressor(), make_loader(make_batches(2)))
        return str(error.value)

    def run() -> list[str]:
        strategy = STRATEGIES["fsdp2"].strategy
        messages = [
            fit(strategy(timeout=timedelta(minutes=2)), ProcessGroupTimeout(timedelta(minutes=2))),
            fit("auto", ProcessGroupTimeout()),
        ]
        with patch.object(dist, "get_backend_config", lambda: "cpu:gloo,xpu:xccl"):
            return [*messages, fit(strategy(), ProcessGroupTimeout())]

    ((too_long, foreign, fixed),) = run_ranks(run, 1)
    assert "train='0:02:00') must be shorter than the timeout of FSDP2Strategy, '0:02:00'" in too_long
    assert "needs a strategy of lightning_fsdp2, not SingleDeviceStrategy" in foreign
    assert "torch cannot change the timeout of xccl" in fixed
    with pytest.raises(ValueError, match=r"ProcessGroupTimeout\(train='0:00:00'\) must be longer than 0"):
        ProcessGroupTimeout(timedelta(0))
