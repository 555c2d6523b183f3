"""The ranks of a run without a Trainer: what they tell each other, and which of them read the same data."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_fsdp2 import FSDP2Config, create_device_mesh
from lightning_fsdp2.strategies.parts.world import World


def make_world(**sizes: int) -> World:
    world = World(timeout=timedelta(seconds=60), rendezvous_timeout=timedelta(seconds=60))
    world.start(FSDP2Config(), TorchElasticEnvironment(), torch.device("cpu"))
    world.enter_mesh(create_device_mesh(device_type="cpu", **sizes))
    return world


def test_ranks_of_a_replica_count_once() -> None:
    def run() -> dict[str, Any]:
        world, rank = make_world(tp_size=2), dist.get_rank()
        data = torch.tensor(float(world.data_parallel_rank))
        return {
            "part": (world.data_parallel_rank, world.data_parallel_size),
            "mean": world.reduce(data, torch.device("cpu"), None, "mean").item(),
            "sum": world.add_up_over_data(10 * (1 + world.data_parallel_rank)),
            "not a tensor": world.reduce("text", torch.device("cpu"), None, "mean"),
            "maximum": (world.find_maximum([rank, -rank]).tolist(), world.start_maximum(rank)()),
            "decisions": (world.decide(rank == 3, all=False), world.decide(rank == 3, all=True)),
            "object": world.broadcast({"from": rank}, src=2),
            "axes": world.axis_sizes,
            "hosts": len(world.hosts),
        }

    results = run_ranks(run, 4)
    assert [result.pop("part") for result in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for result in results:
        assert result == {
            "mean": 0.5,
            "sum": 30,
            "not a tensor": "text",
            "maximum": ([3.0, 0.0], 3),
            "decisions": (True, False),
            "object": {"from": 2},
            "axes": {"dp_replicate": 1, "dp_shard": 2, "context_parallel": 1, "tensor_parallel": 2},
            "hosts": 4,
        }


def test_a_world_that_has_not_started_is_one_rank() -> None:
    world = World(timeout=timedelta(seconds=1), rendezvous_timeout=timedelta(seconds=1))
    world.wait()
    assert world.broadcast("own") == "own"
    assert (world.has_mesh, world.sizes, world.hosts) == (False, None, [])
    with pytest.raises(RuntimeError, match="no device mesh yet"):
        _ = world.mesh
