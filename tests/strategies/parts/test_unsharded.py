"""What a strategy does not shard: it is moved to the device, and buffers are those of the first rank of a stage."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torchmetrics import SumMetric

from lightning_fsdp2 import create_device_mesh
from lightning_fsdp2.strategies.parts.unsharded import (
    SharedBuffers,
    move_to_device,
    synchronise_batch_norm,
    synchronise_metrics,
)
from lightning_fsdp2.strategies.parts.world import World


class Holder(nn.Module):
    """A module that holds values of each kind."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.full((1,), value))
        self.register_buffer("saved", torch.full((2,), value))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("own", torch.full((3,), value), persistent=False)
        self.register_buffer("none", None)


def test_saved_buffers_are_those_of_the_first_rank() -> None:
    def run() -> dict[str, Any]:
        rank = dist.get_rank()
        world = World(timeout=timedelta(seconds=60), rendezvous_timeout=timedelta(seconds=60))
        world.enter_mesh(create_device_mesh(device_type="cpu"))
        module, buffers = nn.ModuleDict({"inner": Holder(1.0 + rank)}), SharedBuffers(world)
        replicated = DTensor.from_local(torch.full((2,), 1.0 + rank), world.mesh, [Replicate()] * world.mesh.ndim)
        module["inner"].register_buffer("sharded", replicated)
        buffers.find(module)
        del module["inner"].count  # which a module may do later
        buffers.share()
        assert replicated.to_local().tolist() == [1.0 + rank] * 2
        return {name: value.tolist() for name, value in module.named_buffers() if value is not replicated}

    assert run_ranks(run, 2) == [
        {"inner.saved": [1.0, 1.0], "inner.own": [1.0] * 3},
        {"inner.saved": [1.0, 1.0], "inner.own": [2.0] * 3},
    ]


def test_what_is_not_sharded_is_moved_to_the_device() -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu")
        root: Any = nn.ModuleDict({"inner": Holder(1.0), "metric": SumMetric()})
        root["inner"].sharded = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()] * mesh.ndim))
        moved, move = [], Tensor.to

        def look(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            moved.append(tuple(tensor.shape))
            return move(tensor, *args, **options)

        with patch.object(Tensor, "to", look), patch.object(SumMetric, "to") as move_metric:
            move_to_device(root, torch.device("cpu"))
        assert sorted(moved) == [(), (1,), (2,), (3,)]
        move_metric.assert_called_once_with(torch.device("cpu"))

    run_ranks(run, 1)


def test_metrics_count_over_the_group_unless_they_have_their_own() -> None:
    def run() -> None:
        module = nn.ModuleDict({"free": SumMetric(), "bound": SumMetric(process_group="own")})
        synchronise_metrics(module, cast(Any, dist.group.WORLD))
        assert [module[name].process_group for name in ("free", "bound")] == [dist.group.WORLD, "own"]

    run_ranks(run, 1)


def test_batch_norm_is_left_to_the_plugin_of_lightning() -> None:
    module, applied = nn.BatchNorm1d(2), []
    synchronise_batch_norm(module, None, torch.device("cuda"))
    synchronise_batch_norm(module, SimpleNamespace(apply=applied.append), torch.device("cuda"))
    assert applied == [module]
