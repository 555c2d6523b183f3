"""The history of a GPU's memory is written at a step, and when memory runs out."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer

from lightning_fsdp2.callbacks import MemorySnapshot, memory_snapshot


class RunsOut(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise torch.OutOfMemoryError("no memory")
        return super().training_step(batch, batch_idx)


def test_at_a_step_and_when_memory_runs_out(tmp_path: Path) -> None:
    """The allocator of a GPU is not here; what is called of it, and when, is."""

    def run() -> tuple[list[bool], list[str]]:
        recorded: list[bool] = []
        written: list[str] = []
        stand_ins = {
            "record_memory_history": recorded.append,
            "dump_memory_snapshot": lambda path: written.append(str(path.relative_to(tmp_path))),
        }
        snapshot = MemorySnapshot(tmp_path / "memory", at_step=2)
        trainer = make_trainer(callbacks=[snapshot], max_steps=4)
        on_gpu = patch.object(type(trainer.strategy), "root_device", torch.device("cuda"))

        def start(*args: Any) -> None:
            with on_gpu:
                MemorySnapshot.on_fit_start(snapshot, *args)

        patches = patch.multiple(memory_snapshot, **stand_ins), patch.object(snapshot, "on_fit_start", start)
        with patches[0], patches[1], pytest.raises(torch.OutOfMemoryError):
            trainer.fit(RunsOut(), make_loader(make_batches(8)))
        return recorded, written

    for rank, (recorded, written) in enumerate(run_ranks(run, 2)):
        assert recorded == [True, False]
        assert written == [f"memory/step2-rank{rank}.pickle", f"memory/out-of-memory-rank{rank}.pickle"]


def test_memory_of_a_cpu_has_no_history() -> None:
    def run() -> None:
        trainer = make_trainer(callbacks=[MemorySnapshot()])
        with pytest.raises(ValueError, match="this run is on 'cpu'; remove the callback"):
            trainer.fit(Regressor(), make_loader(make_batches(2)))

    run_ranks(run, 1)


def test_steps_begin_at_one() -> None:
    with pytest.raises(ValueError, match=r"at_step=0\) must be 1 or more"):
        MemorySnapshot(at_step=0)
