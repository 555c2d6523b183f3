"""DDP around a module whose parameters are frozen at first."""

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp2.parallel.data.ddp import Replica


def test_a_module_that_trains_nothing_is_called_as_it_is_until_it_is_unfrozen() -> None:
    def run() -> None:
        module = nn.Linear(2, 1, bias=False).requires_grad_(False)
        waits: list[int] = []
        replica = Replica(module, DistributedDataParallel, dist.group.WORLD, lambda: waits.append(1))
        assert replica.root is module
        with replica.defer_sync():
            replica.finish_backward(is_manual=False)
        replica.finish_backward(is_manual=True)
        module.requires_grad_(True)
        with pytest.raises(ValueError, match=r"unfrozen inside `training_step`.*: weight\."):
            replica.check_known()
        replica.refresh()
        replica.check_known()
        assert waits == [1]
        replica.root((1 + 2 * dist.get_rank()) * torch.tensor([[1.0, 2.0]])).sum().backward()
        replica.finish_backward(is_manual=False)
        assert module.weight.grad.tolist() == [[2, 4]]

    run_ranks(run, 2)
