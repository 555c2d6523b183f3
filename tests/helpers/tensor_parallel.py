"""What the tests of tensor parallelism share: a mesh, models whose every weight matters, whole gradients, refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from helpers.models import GPT2, make_causal_lm
from lightning_fsdp2.compat.torch import has_packed_shards

COUNTED_GPT2 = pytest.param(
    GPT2, marks=pytest.mark.skipif(not has_packed_shards(), reason="this torch gathers packed weights at use")
)
"""For tests that count collectives."""


def make_mesh() -> DeviceMesh:
    """One of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor_parallel",))
    dist.barrier()  # a rank that ends before another has connected to it would fail that one
    return mesh


def make_rough_model(config: dict[str, Any]) -> Any:
    """With weights of which every one matters; biases start at zero and norms at one otherwise."""
    torch.manual_seed(0)
    model = make_causal_lm({**config, "initializer_range": 0.2})
    roughen(model)
    return model


def roughen(module: nn.Module) -> None:
    """Move its vectors away from zero and one."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def to_whole(tensor: Any) -> Any:
    """The tensor that a DTensor stands for; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Whole ones, by name."""
    return {name: to_whole(parameter.grad) for name, parameter in module.named_parameters()}


@contextmanager
def refuse(model: nn.Module, error: type[Exception] | tuple[type[Exception], ...], message: str) -> Iterator[None]:
    """Expect ``error``, and that it came before anything was touched."""
    before = describe(model)
    with pytest.raises(error, match=message):
        yield
    changed = [name for name, (kind, attributes) in describe(model).items() if before[name] != (kind, attributes)]
    assert not changed, f"{message}: {changed} changed"
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), message


def describe(model: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """The class of each module and what it holds, but for its parameters and children."""
    return {
        name: (type(module), {key: value for key, value in vars(module).items() if not isinstance(value, dict)})
        for name, module in model.named_modules()
    }
