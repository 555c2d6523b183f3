"""Copies of sharded tensors in host memory, from which checkpoints are written in the background."""

import torch
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.compat.torch import StateDictStager

ROWS = {"first": slice(0, 4), "later": slice(4, 12)}
"""The parts of a buffer, as Megatron-FSDP keeps its shards."""


def copy_twice() -> None:
    mesh = init_device_mesh("cpu", (1,))
    buffer = torch.arange(12.0)
    shards = {name: DTensor.from_local(buffer[rows], mesh, [Shard(0)]) for name, rows in ROWS.items()}
    stager = StateDictStager()
    for _ in range(2):  # the second copy reuses the memory of the first
        buffer += 1
        copies = stager.stage(shards)
        for name, rows in ROWS.items():
            assert isinstance(copies[name], DTensor)
            assert copies[name].placements == (Shard(0),)
            assert torch.equal(copies[name].to_local(), buffer[rows])
    before = {name: copy.to_local().clone() for name, copy in copies.items()}
    buffer += 1
    assert all(torch.equal(copy.to_local(), before[name]) for name, copy in copies.items())


def test_shards_that_are_views_of_one_buffer_are_copied() -> None:
    run_ranks(copy_twice, 1)
