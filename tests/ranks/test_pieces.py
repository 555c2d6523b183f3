"""Which DTensors leave a rank with several pieces, whatever their axes are called and in which order they stand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_fsdp2.compat.torch import StridedShard
from lightning_fsdp2.ranks.pieces import get_packed_placements

GATE_AND_UP = StridedShard(0, split_factor=2)

CASES: dict[str, tuple[tuple[int, ...], list[Any], list[int]]] = {
    "one axis": ((4,), [Shard(0)], []),
    "packed alone": ((4,), [GATE_AND_UP], [0]),
    "packed, the last axis": ((2, 4), [Shard(1), GATE_AND_UP], [1]),
    "packed, the first axis": ((4, 2), [GATE_AND_UP, Shard(1)], [0]),
    "packed, between others": ((2, 2, 2), [Replicate(), GATE_AND_UP, Shard(1)], [1]),
    "packed along dim 1": ((2, 4), [Shard(0), StridedShard(1, split_factor=3)], [1]),
    "a shard cut once more": ((2, 4), [StridedShard(0, split_factor=4), Shard(0)], []),
    "a shard of two axes cut once more": ((2, 2, 2), [StridedShard(0, split_factor=4), Shard(0), Shard(0)], []),
    "other dims do not count": ((2, 2, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)], []),
    "replicas do not count": ((2, 2, 2), [StridedShard(0, split_factor=2), Replicate(), Shard(0)], []),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_placements_by_the_axis_of_the_mesh(name: str) -> None:
    shape, placements, expected = CASES[name]

    def run() -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=torch.Size(shape).numel())
        mesh = init_device_mesh("cpu", shape)
        tensor = DTensor.from_local(
            torch.zeros(2, 2), mesh, placements, run_check=False, shape=(96, 96), stride=(96, 1)
        )
        assert get_packed_placements(tensor) == {axis: placements[axis] for axis in expected}

    run_ranks(run, 1, group=False)


def test_what_fsdp2_cuts_once_more_is_not_packed() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(torch.nn.Linear(8, 8), mesh["tensor"], ColwiseParallel())
        fully_shard(model, mesh=mesh["data"])
        assert isinstance(model.weight.placements[0], StridedShard)
        assert get_packed_placements(model.weight) == {}

    run_ranks(run, 4)
