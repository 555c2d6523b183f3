"""Hooks and unreduced gradients of FSDP2 units in a plain torch loop, against one process."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.oracle import whole
from helpers.ranks import raises_on_all_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.parallel.data import gradient_hooks
from lightning_fsdp2.parallel.data.gradients import UnreducedGradient
from lightning_fsdp2.parallelizer import apply_fsdp_sharding_recursively

WIDTH, RANKS = 4, 2


class Model(nn.Module):
    """Calls a layer twice, and leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, _ = self.layers
        return second(torch.tanh(first(torch.tanh(first(inputs))))).square().mean()


def normalize(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 0.1)


def make_inputs(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, compute_loss: Callable[[int], Tensor], defer: Callable[[], Any]) -> dict[str, Tensor]:
    """Run three backwards, of which the first two may be deferred, and return the gradients."""
    seen: list[str] = []
    first, second, unused = model.layers
    first.weight.register_hook(normalize)
    handle = first.bias.register_hook(lambda gradient: seen.append("removed"))
    handle.remove()
    second.weight.register_hook(lambda gradient: seen.append("hook"))
    second.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("added"))
    unused.weight.register_hook(lambda gradient: seen.append("unused"))
    for step in range(3):
        with nullcontext() if step == 2 else defer():
            compute_loss(step).backward()
    assert seen == ["hook", "added"] * 3
    return whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def make_sharded_model(**sizes: int) -> nn.Module:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
    return FSDP2Manager(config, create_device_mesh(config, device_type="cpu", **sizes)).parallelize(Model())


@pytest.mark.parametrize(("sizes", "reduce_scatter"), [({}, False), ({"dp_replicate_size": 2}, True)])
def test_hooks_run_once_in_a_backward_however_often_a_layer_is_called(
    sizes: dict[str, int], reduce_scatter: bool
) -> None:
    alone = Model()
    expected = train(
        alone, lambda step: alone(torch.cat([make_inputs(step, rank) for rank in range(RANKS)])), nullcontext
    )

    def run() -> None:
        model = make_sharded_model(**sizes)
        gradients = train(
            model,
            lambda step: model(make_inputs(step, dist.get_rank())),
            lambda: defer_grad_sync(model, reduce_scatter=reduce_scatter),
        )
        torch.testing.assert_close(gradients, expected)

    run_ranks(run, RANKS)


@pytest.mark.parametrize(("sizes", "reduce_scatter"), [({}, False), ({"dp_replicate_size": 2}, True)])
def test_deferred_gradients_have_a_placeholder_until_they_are_reduced(
    sizes: dict[str, int], reduce_scatter: bool
) -> None:
    def run() -> None:
        model = make_sharded_model(**sizes)
        with defer_grad_sync(model, reduce_scatter=reduce_scatter):
            model(make_inputs(0, dist.get_rank())).backward()
        first, second, unused = (layer.weight.grad for layer in model.layers)
        assert unused is None
        assert type(first) is type(second) is UnreducedGradient
        assert (first.shape, first.dtype, first.device.type) == ((WIDTH, WIDTH), torch.float32, "cpu")
        for use in (torch.norm, Tensor.neg_, DTensor.to_local, DTensor.full_tensor, repr, lambda g: 2 * g):
            with pytest.raises(ValueError, match="In a plain loop, leave out `defer_grad_sync`"):
                use(first)
        with pytest.raises(ValueError, match="accumulation window"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        model(make_inputs(1, dist.get_rank())).backward()
        assert type(model.layers[0].weight.grad) is DTensor

    run_ranks(run, RANKS)


# ---------------------------------------------------------------------- hooks on some ranks only


def make_model_of_sharded_layers() -> nn.Module:
    model = Model()
    apply_fsdp_sharding_recursively(model, create_device_mesh(device_type="cpu")["dp_shard"], None)
    return model


def step(model: nn.Module) -> None:
    with defer_grad_sync(model):
        model(make_inputs(0, dist.get_rank())).backward()
    model(make_inputs(1, dist.get_rank())).backward()
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


@pytest.mark.parametrize("make", [make_sharded_model, make_model_of_sharded_layers])
def test_hooks_on_other_parameters_on_each_rank_are_all_named(make: Callable[[], nn.Module]) -> None:
    def run() -> None:
        model = make()
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
