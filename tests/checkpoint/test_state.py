"""Optimizer states that are given back to an optimizer which holds its parameters otherwise."""

import warnings

import pytest
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
    loading = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.5, eps=1e-6)
    with pytest.warns(UserWarning, match="AdamW goes on with eps=1e-08 of the checkpoint, not with eps=1e-06 of"):
        set_optimizer_state(model, loading, state)
    assert loading.param_groups[0]["param_names"] == ["bias", "weight"]
    assert loading.param_groups[0]["lr"] == 1e-3
    for parameter in model.parameters():
        assert torch.equal(loading.state[parameter]["exp_avg"], saving.state[parameter]["exp_avg"])


def test_an_optimizer_that_has_made_steps_goes_back_without_a_warning() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state(model, optimizer)
    optimizer.param_groups[0]["eps"] = 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_optimizer_state(model, optimizer, state)
    assert optimizer.param_groups[0]["eps"] == 1e-8


def test_a_state_of_torch_may_have_no_names_or_those_in_a_part_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    for parameters in (model.parameters(), model[0].named_parameters()):
        saving = torch.optim.AdamW(parameters)
        model(torch.ones(1, 2)).sum().backward()
        saving.step()
        saving.state["of the optimizer"] = {"count": 3}  # and of no parameter
        loading = torch.optim.AdamW(model.parameters())
        set_optimizer_state(model, loading, saving.state_dict())
        assert loading.state["of the optimizer"] == {"count": 3}
        for parameter in model.parameters():
            assert torch.equal(loading.state[parameter]["exp_avg"], saving.state[parameter]["exp_avg"])
