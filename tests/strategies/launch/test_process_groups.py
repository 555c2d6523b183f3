"""The default process group of a process that has one already, and the collectives of the strategies."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_fsdp2.strategies.launch.process_groups import (
    all_gather,
    broadcast_coalesced,
    init_process_group,
    reduce,
)

TIMEOUT = timedelta(seconds=60)


def test_a_group_of_the_user_is_used_if_it_is_the_one_that_the_trainer_asks_for() -> None:
    def run() -> None:
        def start(backend: str | None) -> None:
            options = {"timeout": TIMEOUT, "rendezvous_timeout": TIMEOUT}
            init_process_group(TorchElasticEnvironment(), backend, torch.device("cpu"), **options)

        group = dist.group.WORLD
        for backend in (None, "gloo", "cpu:gloo"):
            start(backend)
        with pytest.raises(ValueError, match=r"config\.backend='cpu:mpi', but .* the backend 'cpu:gloo,cuda:gloo'"):
            start("cpu:mpi")
        os.environ["WORLD_SIZE"] = "3"
        with pytest.raises(ValueError, match=r"asks for 3 rank\(s\) .* already belongs to a group of 1; use the same"):
            start(None)
        assert dist.group.WORLD is group

    run_ranks(run, 1)


def test_what_two_ranks_gather_reduce_and_broadcast() -> None:
    def run() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        own = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T * (rank + 1)  # not contiguous
        gathered = all_gather(own, group, sync_grads=False)
        assert gathered.tolist() == [[[1.0, 3.0], [2.0, 4.0]], [[2.0, 6.0], [4.0, 8.0]]]

        leaf = torch.tensor([rank + 1.0, 5.0], requires_grad=True)
        gathered = all_gather(leaf, group, sync_grads=True)
        assert gathered.tolist() == [[1.0, 5.0], [2.0, 5.0]]
        factors = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        (gathered * factors * (rank + 1)).sum().backward()
        assert leaf.grad.tolist() == (3 * factors[rank]).tolist()  # of the losses of both ranks

        number = torch.tensor([rank + 1, 4])
        reduced = {op: reduce(number, group, op).tolist() for op in ("mean", "avg", None, "sum", "max", "min")}
        mean = [1.5, 4.0]
        assert reduced == {"mean": mean, "avg": mean, None: mean, "sum": [3, 8], "max": [2, 4], "min": [1, 4]}
        assert number.tolist() == [rank + 1, 4]

        tensors = [own, torch.tensor(rank), torch.tensor([rank == 1])]
        broadcast_coalesced(tensors, source=1)
        assert [tensor.tolist() for tensor in tensors] == [[[2.0, 6.0], [4.0, 8.0]], 1, [True]]

    run_ranks(run, 2)
