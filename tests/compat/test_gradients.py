"""Hooks and unreduced gradients of FSDP2 units in a plain torch loop, against one process."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.oracle import whole
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.compat.gradients import UnreducedGradient, replace_backward_inputs

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


def test_blocks_that_choose_inputs_may_end_in_any_order() -> None:
    original = torch.autograd._engine_run_backward
    seen: list[str] = []

    def choose(name: str, inputs: Any, accumulates: bool) -> Any:
        seen.append(name)
        return inputs

    def run_backward() -> list[str]:
        seen.clear()
        weight = torch.ones(2, requires_grad=True)
        assert torch.autograd.grad(weight.sum(), weight)[0].tolist() == [1, 1]
        weight.sum().backward()  # to no named inputs
        return list(seen)

    first, second, third = (replace_backward_inputs(partial(choose, name)) for name in "abc")
    first.__enter__()
    second.__enter__()
    assert run_backward() == ["a", "b"]
    first.__exit__(None, None, None)
    assert run_backward() == ["b"]
    third.__enter__()
    second.__exit__(None, None, None)
    assert run_backward() == ["c"]
    third.__exit__(None, None, None)
    assert run_backward() == []
    assert torch.autograd._engine_run_backward is original


def test_a_block_leaves_what_another_library_has_replaced_since(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def wrap(run: Any) -> Any:
        return lambda *args, **options: (calls.append("theirs"), run(*args, **options))[1]

    def choose(inputs: Any, accumulates: bool) -> Any:
        calls.append("ours")
        return inputs

    def run_backward() -> list[str]:
        calls.clear()
        weight = torch.ones(2, requires_grad=True)
        torch.autograd.grad(weight.sum(), weight)
        return list(calls)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    with replace_backward_inputs(choose):
        torch.autograd._engine_run_backward = wrap(torch.autograd._engine_run_backward)
        assert run_backward() == ["theirs", "ours"]
    assert run_backward() == ["theirs"]
    with replace_backward_inputs(choose):
        assert run_backward() == ["ours", "theirs"]
    assert run_backward() == ["theirs"]
