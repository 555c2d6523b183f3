"""Errors that reach every rank."""

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks

from lightning_fsdp2 import create_device_mesh
from lightning_fsdp2.ranks.failures import describe_ranks, fail_together
from lightning_fsdp2.weights.materialize import get_groups


class NeedsTwo(Exception):
    """Cannot be sent: pickle would make it of its message alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raise_on(rank: int, error: Exception) -> None:
    if dist.get_rank() == rank:
        raise error


def test_an_error_of_any_rank_is_raised_on_all_of_a_mesh() -> None:
    def run() -> None:
        groups = get_groups(create_device_mesh(device_type="cpu", tp_size=2))
        assert len(groups) == 2
        with fail_together(groups):
            pass
        for rank in range(4):
            with pytest.raises(FileNotFoundError, match=f"on rank {rank}"), fail_together(groups):
                raise_on(rank, FileNotFoundError(f"on rank {rank}"))
        expected = NeedsTwo if dist.get_rank() == 2 else RuntimeError
        with pytest.raises(expected, match="one two"), fail_together(groups):
            raise_on(2, NeedsTwo("one", "two"))

    run_ranks(run, 4)


def test_ranks_are_described_as_ranges_by_host() -> None:
    assert describe_ranks([3]) == "3"
    assert describe_ranks([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert describe_ranks([0, 1, 2, 4, 5], ["a", "a", "b", "b", ""]) == "0-1 (a), 2 (b), 4-5"
    assert describe_ranks(range(0, 40, 2)) == ", ".join(map(str, range(0, 32, 2))) + " and 4 more"
    hosts = [f"node-{rank}" for rank in range(20)]
    assert describe_ranks(range(20), hosts).endswith("15 (node-15) and 4 more hosts")


def test_one_process_needs_no_group() -> None:
    with pytest.raises(KeyError), fail_together():
        raise KeyError("mine")
