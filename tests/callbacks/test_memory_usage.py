"""Memory in GiB, of the rank that has taken the most."""

import resource
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.devices import NEEDS_GPU
from helpers.ranks import run_ranks
from helpers.recorder import Recorder
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer
from lightning.pytorch import Trainer

from lightning_fsdp2 import FSDP2Strategy
from lightning_fsdp2.callbacks import MemoryUsage, memory_usage

GIB = 2**30


def fit(**options: Any) -> dict[int, dict[str, float]]:
    recorder = Recorder()
    trainer = make_trainer(FSDP2Strategy(), logger=recorder, callbacks=[MemoryUsage()], log_every_n_steps=2, **options)
    trainer.fit(Regressor(), make_loader(make_batches(4)))
    return recorder.rows


@pytest.mark.guarantees("measuring-callbacks")
def test_the_process_on_a_cpu() -> None:
    def run() -> tuple[Any, float]:
        ballast = bytearray(2**28) if dist.get_rank() == 1 else None
        rows = fit()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        del ballast
        return rows, peak

    (rows, _), (others, most) = run_ranks(run, 2)
    assert rows == others
    assert list(rows) == [1]
    assert most - 0.05 < rows[1]["memory/process_gib"] <= most


def test_the_allocator_of_an_accelerator() -> None:
    def run() -> dict[str, float]:
        stats = {
            "allocated_bytes.all.peak": 3 * GIB,
            "reserved_bytes.all.peak": (4 + dist.get_rank()) * GIB,
            "num_alloc_retries": dist.get_rank(),
            "num_ooms": 0,
        }
        resets: list[Any] = []
        accelerator = {
            "memory_stats": lambda device: stats,
            "get_memory_info": lambda device: (0, 10 * GIB),
            "reset_peak_memory_stats": resets.append,
        }

        def measure(device: torch.device) -> dict[str, float]:
            return real(torch.device("cuda"))

        real = memory_usage._measure
        with patch.multiple(torch.accelerator, **accelerator), patch.object(memory_usage, "_measure", measure):
            rows = fit()
        assert resets == [torch.device("cuda")]
        return rows[1]

    for row in run_ranks(run, 2):
        assert row == {
            "memory/allocated_gib": 3,
            "memory/reserved_gib": 5,
            "memory/reserved_share": 0.5,
            "memory/allocation_retries": 1,
            "memory/out_of_memory": 0,
        }


@pytest.mark.parametrize("device", [pytest.param("gpu", marks=NEEDS_GPU)])
def test_on_a_gpu(device: str) -> None:
    def run() -> dict[str, float]:
        recorder = Recorder()
        trainer = Trainer(
            accelerator=device,
            devices=1,
            max_steps=2,
            logger=recorder,
            callbacks=[MemoryUsage()],
            log_every_n_steps=2,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Regressor(), torch.utils.data.DataLoader(make_batches(2), batch_size=None))
        return recorder.rows[1]

    (row,) = run_ranks(run, 1, group=False)
    assert 0 < row["memory/allocated_gib"] <= row["memory/reserved_gib"] < 1
    assert row["memory/out_of_memory"] == 0
