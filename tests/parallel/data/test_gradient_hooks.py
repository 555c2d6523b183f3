"""Hooks on the gradients of sharded parameters that are on some ranks only, in a plain torch loop."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import raises_on_all_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.parallel.data import gradient_hooks
from lightning_fsdp2.parallelizer import apply_fsdp_sharding_recursively

WIDTH = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.layers
        return second(torch.tanh(first(inputs))).square().mean()


def make_sharded_model(**sizes: int) -> nn.Module:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
    return FSDP2Manager(config, create_device_mesh(config, device_type="cpu", **sizes)).parallelize(Model())


def make_model_of_sharded_layers() -> nn.Module:
    model = Model()
    apply_fsdp_sharding_recursively(model, create_device_mesh(device_type="cpu")["dp_shard"], None)
    return model


def step(model: nn.Module) -> None:
    with defer_grad_sync(model):
        model(torch.ones(2, WIDTH)).backward()
    model(torch.ones(2, WIDTH)).backward()
    model.zero_grad()


@pytest.mark.parametrize(
    ("make", "world"),
    [
        (make_sharded_model, 2),
        (make_model_of_sharded_layers, 2),
        (lambda: make_sharded_model(dp_replicate_size=2), 2),
        pytest.param(lambda: make_sharded_model(dp_replicate_size=2), 4, marks=pytest.mark.slow),
    ],
    ids=["sharded", "layers", "replicas", "hybrid"],
)
def test_hooks_on_one_rank_are_refused_on_all_ranks(make: Callable[[], nn.Module], world: int) -> None:
    def run() -> None:
        model = make()
        model.layers[1].bias.register_hook(torch.neg)  # on all ranks, and so not named
        if dist.get_rank() == 1:
            model.layers[0].weight.register_hook(torch.neg)
        step(model)

    with raises_on_all_ranks(ValueError, r"all ranks: layers.0.weight \(only on rank 1\)\. .*`if trainer.is_global_"):
        run_ranks(run, world)


def test_hooks_on_other_parameters_on_each_rank_are_all_named() -> None:
    def run() -> None:
        model = make_sharded_model()
        model.layers[dist.get_rank()].weight.register_post_accumulate_grad_hook(Tensor.detach)
        step(model)

    with raises_on_all_ranks(ValueError, r"layers.0.weight \(only on rank 0\), layers.1.weight \(only on rank 1\)\."):
        run_ranks(run, 2)


@pytest.mark.parametrize("removes", [False, True])
def test_a_change_on_one_rank_is_an_error_and_no_hang(removes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> str:
        model = make_sharded_model()
        handles = [model.layers[0].weight.register_hook(torch.neg)] if removes else []
        step(model)
        if dist.get_rank() == 0:
            if removes:
                handles[0].remove()
            else:
                model.layers[0].weight.register_hook(torch.neg)
        try:
            step(model)
        except RuntimeError as error:
            return str(error)
        return ""

    monkeypatch.setattr(gradient_hooks, "_TIMEOUT", timedelta(seconds=1))
    first, _ = run_ranks(run, 2)
    names = "no parameter" if removes else "layers.0.weight"
    assert f"its hooks have changed: they are on {names}. But not every rank has come within 0:00:01: rank 1" in first


def test_ranks_compare_hooks_only_where_these_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = gradient_hooks.compare_in_store
    seen: list[str] = []

    def count(purpose: str, answer: str, *args: Any) -> Any:
        seen.append(answer)
        return compare(purpose, answer, *args)

    monkeypatch.setattr(gradient_hooks, "compare_in_store", count)

    def run() -> None:
        model, other = make_sharded_model(), make_sharded_model()
        weight = model.layers[0].weight
        step(model)
        step(model)
        assert seen == [""]
        handle = weight.register_hook(torch.neg)
        step(model)
        weight.register_hook(torch.neg)
        step(model)
        assert seen == ["", "layers.0.weight"]
        step(other)
        handle.remove()
        step(model)
        assert seen == ["", "layers.0.weight", ""]

    run_ranks(run, 2)
