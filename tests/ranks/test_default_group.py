"""Threads, open files and groups end with the default process group, however many Trainers there were."""

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer

from lightning_fsdp2 import DDPStrategy, FSDP2Strategy


def count() -> tuple[int, int, int]:
    """Return the numbers of this process's threads, open files and process groups."""
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), groups


def fit(strategy: Any) -> None:
    make_trainer(strategy, max_steps=1, limit_val_batches=0).fit(Regressor(), make_loader(make_batches(8)))


def start_again(folder: Path, number: int) -> None:
    dist.destroy_process_group()
    gc.collect()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / f"store-{number}"), size), rank=rank, world_size=size
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_they_end_with_a_default_group_that_the_user_destroys(world_size: int, tmp_path: Path) -> None:
    def run() -> None:
        counts = []
        for number in range(4):
            start_again(tmp_path, number)
            fit(FSDP2Strategy())
            counts.append(count())
        assert counts[1:] == [counts[1]] * 3, counts

    run_ranks(run, world_size)


@pytest.mark.parametrize("layouts", [[{}], [{}, {"dp_replicate_size": 2}]])
def test_trainers_share_them_while_it_lives(layouts: Sequence[dict[str, int]]) -> None:
    def run() -> None:
        counts = []
        for _ in range(3):
            for sizes in layouts:
                fit(FSDP2Strategy(**sizes))
            fit(DDPStrategy())
            counts.append(count())
        assert counts[1] == counts[2], counts

    run_ranks(run, 2)
