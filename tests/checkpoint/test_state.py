"""Optimizer states that are given back to an optimizer which holds its parameters otherwise."""

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.checkpoint.state import get_optimizer_state, set_optimizer_state, shard_all_like
from lightning_fsdp2.ranks.pieces import UNEVEN_SHARD
from lightning_fsdp2.ranks.whole_tensors import make_dtensor

WHOLE = torch.arange(10.0).view(5, 2)


def test_uneven_rows_that_are_elsewhere_move() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=(UNEVEN_SHARD,))

        def cut(*counts: int) -> DTensor:
            return make_dtensor(WHOLE.split(counts)[dist.get_rank()].clone(), mesh, [Shard(0)], WHOLE.shape)

        own = cut(2, 2, 1)
        values = {"all ranks differ": cut(1, 3, 1), "the first has as many": cut(2, 0, 3), "equal": cut(2, 2, 1)}
        moved = shard_all_like(values, dict.fromkeys(values, own))
        assert moved.keys() == values.keys()
        assert all(torch.equal(value.to_local(), own.to_local()) for value in moved.values())
        assert moved["equal"] is values["equal"]

    run_ranks(run, 3)


def test_an_optimizer_keeps_the_order_and_the_names_of_its_own_parameters() -> None:
    model = nn.Linear(2, 3)
    saving = torch.optim.AdamW(list(model.named_parameters()))
    model(torch.ones(1, 2)).sum().backward()
    saving.step()
    state = get_optimizer_state(model, saving)
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    loading = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.5)
    set_optimizer_state(model, loading, state)
    assert loading.param_groups[0]["param_names"] == ["bias", "weight"]
    assert loading.param_groups[0]["lr"] == 1e-3
    for parameter in model.parameters():
        assert torch.equal(loading.state[parameter]["exp_avg"], saving.state[parameter]["exp_avg"])
