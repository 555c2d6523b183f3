"""The ranks of a run without a Trainer: what they tell each other, and which of them read the same data."""

from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_fsdp2 import FSDP2Config, create_device_mesh
from lightning_fsdp2.compat.torch import get_group_timeout
from lightning_fsdp2.compat.torch_simulation import simulate_world
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


def get_groups_of(world: World) -> dict[str, list[int] | None]:
    names = ("stage", "pipeline", "data", "loss", "replica")
    groups = {name: getattr(world, f"{name}_group") for name in names} | {"control": world.pipeline_control}
    return {
        name: None if group is None else dist.get_process_group_ranks(group)  # type: ignore[arg-type]
        for name, group in groups.items()
    }


def test_groups_of_a_stage_and_across_stages() -> None:
    def run() -> dict[str, Any]:
        world = make_world(pp_size=2, tp_size=2)
        world.set_group_timeout(timedelta(seconds=40))
        groups = [world.stage_group, world.pipeline_group, world.pipeline_control, world.replica_group]
        timeouts = {get_group_timeout(cast(Any, group)).seconds for group in groups}
        present = torch.zeros(8)
        present[dist.get_rank()] = 1
        dist.all_reduce(present, group=world.replica_group)
        return {
            "groups": get_groups_of(world),
            "reached by the replica's": present.nonzero().flatten().tolist(),
            "timeouts": timeouts,
            "pipeline": (world.pipeline_rank, world.pipeline_size),
            "size": world.size,
            "part": (world.data_parallel_rank, world.data_parallel_size),
            "sum": world.add_up_over_data(10 * (1 + world.data_parallel_rank)),
            "axes": world.axis_sizes,
        }

    for rank, result in enumerate(run_ranks(run, 8)):
        stage, replica, first = rank // 4, rank % 4 // 2, rank // 4 * 4
        across = [first + rank % 2, first + rank % 2 + 2]
        readers = [2 * replica, 2 * replica + 1, 2 * replica + 4, 2 * replica + 5]  # of the same batch
        assert result.pop("groups") == {
            "stage": [first, first + 1, first + 2, first + 3],
            "pipeline": [rank % 4, rank % 4 + 4],
            "control": [rank % 4, rank % 4 + 4],
            "data": across,
            "loss": across,
            "replica": readers,
        }
        assert result == {
            "reached by the replica's": readers,
            "timeouts": {40},
            "pipeline": (stage, 2),
            "size": 8,
            "part": (replica, 2),
            "sum": 30,
            "axes": {
                "pipeline_parallel": 2,
                "dp_replicate": 1,
                "dp_shard": 2,
                "context_parallel": 1,
                "tensor_parallel": 2,
            },
        }


def test_stages_of_data_parallel_ranks_only() -> None:
    def run() -> tuple[dict[str, list[int] | None], bool, int]:
        world = make_world(pp_size=2)
        before = len(dist.distributed_c10d._world.pg_map)
        world.enter_mesh(world.mesh)  # as a second Trainer does
        created = len(dist.distributed_c10d._world.pg_map) - before
        return get_groups_of(world), world.replica_group is world.pipeline_group, created

    for rank, (groups, is_shared, created) in enumerate(run_ranks(run, 4)):
        stage, line = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert groups == {
            "stage": stage,
            "data": stage,
            "loss": stage,
            "pipeline": line,
            "control": line,
            "replica": line,
        }
        assert is_shared
        assert created == 0


def test_a_simulated_rank_knows_its_stage_and_makes_no_group_for_messages() -> None:
    """Rank 21 of 2 stages with 4 x 2 x 2 ranks each is in stage 1: shard 1, cp 0, tp 1."""

    def run() -> None:
        with simulate_world(32, 21):
            world = World(timeout=timedelta(seconds=60), rendezvous_timeout=timedelta(seconds=60))
            world.enter_mesh(create_device_mesh(device_type="cpu", pp_size=2, tp_size=2, cp_size=2))
            assert get_groups_of(world) == {
                "stage": list(range(16, 32)),
                "pipeline": [5, 21],
                "control": None,
                "data": [17, 21, 25, 29],
                "loss": [17, 19, 21, 23, 25, 27, 29, 31],
                "replica": [4, 5, 6, 7, 20, 21, 22, 23],
            }

    run_ranks(run, 1, group=False)


def test_one_stage_has_all_ranks() -> None:
    def run() -> None:
        world = make_world(tp_size=2)
        assert world.stage_group is dist.group.WORLD
        assert (world.pipeline_group, world.pipeline_control) == (None, None)
        assert (world.pipeline_rank, world.pipeline_size, world.size) == (0, 1, 2)
        assert dist.get_process_group_ranks(world.replica_group) == [0, 1]

    run_ranks(run, 2)


def test_a_world_that_has_not_started_is_one_rank() -> None:
    world = World(timeout=timedelta(seconds=1), rendezvous_timeout=timedelta(seconds=1))
    world.wait()
    assert world.broadcast("own") == "own"
    assert (world.has_mesh, world.sizes, world.hosts) == (False, None, [])
    with pytest.raises(RuntimeError, match="no device mesh yet"):
        _ = world.mesh
