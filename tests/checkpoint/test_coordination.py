"""A failure on one rank is an error on all of them, and none waits for what will not come."""

from typing import Any

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks

from lightning_fsdp2.checkpoint.coordination import all_gather, on_every_rank, on_first_rank


class StubbornError(Exception):
    """One that cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail(error: Exception) -> Any:
    raise error


def test_every_rank_learns_what_the_first_one_did() -> None:
    def run() -> None:
        rank = dist.get_rank()
        assert on_first_rank(lambda: rank + 10) == 10
        with pytest.raises(OSError, match="no room"):
            on_first_rank(lambda: fail(OSError(28, "no room")))
        with pytest.raises(StubbornError if rank == 0 else RuntimeError, match="1 and 2") as caught:
            on_first_rank(lambda: fail(StubbornError(1, 2)))
        assert (caught.traceback[-1].name == "fail") == (rank == 0), "where it failed is known"

    run_ranks(run, 2)


def test_every_rank_raises_where_any_failed() -> None:
    def run() -> None:
        rank = dist.get_rank()
        assert on_every_rank(lambda: rank) == rank
        with pytest.raises(ValueError, match="rank 1"):
            on_every_rank(lambda: fail(ValueError("rank 1")) if rank == 1 else rank)
        with pytest.raises(ValueError, match=f"^rank {rank}$") as caught:
            on_every_rank(lambda: fail(ValueError(f"rank {rank}")))
        assert caught.traceback[-1].name == "fail"
        assert all_gather(rank) == [0, 1]

    run_ranks(run, 2)


def test_one_process_needs_no_group() -> None:
    assert on_first_rank(lambda: 1) == on_every_rank(lambda: 1) == 1
    assert all_gather(3) == [3]
    with pytest.raises(ValueError, match="alone"):
        on_every_rank(lambda: fail(ValueError("alone")))
