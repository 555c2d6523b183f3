"""Search for packed experts: modules that hold all experts of a mixture-of-experts layer in stacked parameters.

All mixture-of-experts layers in transformers that pack their experts call them in the same way:
``experts(hidden_states, indices, weights)``. Experts are found by this signature and by their parameters, so the names
of classes do not matter.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_MESH_ATTRIBUTE = "_lightning_fsdp2_expert_mesh"


def find_experts(modules: Iterable[nn.Module]) -> list[Any]:
    """Return those of ``modules`` that hold packed experts. Expert parallelism must not have been applied yet."""
    return [module for module in modules if is_packed_experts(module)]


def is_packed_experts(module: nn.Module) -> bool:
    """Return whether ``module`` holds packed experts.

    This is the case if dim 0 of all of its parameters is the number of experts, some of the parameters are stacks of
    matrices, and the forward takes hidden states, the indices of each token's experts, and their routing weights.
    """
    number = getattr(module, "num_experts", None)
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(number, int) or not any(parameter.ndim == 3 for parameter in parameters):
        return False
    return all(p.ndim > 0 and p.size(0) == number for p in parameters) and len(get_arguments(module)) == 3


def get_optional_shard_dim(sizes: Sequence[int], ranks: int) -> int | None:
    """Return the dim along which to shard a stack of experts: the first dim divisible by ``ranks``, or None.

    Args:
        sizes: Shape of the stack that one expert parallel rank holds. Dim 0 is the number of its experts.
        ranks: Number of ranks with the same experts.
    """
    return next((dim for dim, size in enumerate(sizes) if size % ranks == 0), None)


def get_arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward."""
    return list(inspect.signature(module.forward).parameters)


def set_expert_mesh(module: nn.Module, mesh: DeviceMesh) -> None:
    """Record that the experts of ``module`` are distributed over ``mesh``."""
    module.__dict__[_MESH_ATTRIBUTE] = mesh


def get_optional_expert_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the 1-D mesh that the experts of ``module`` are distributed over; None without expert parallelism."""
    mesh: DeviceMesh | None = module.__dict__.get(_MESH_ATTRIBUTE)
    return mesh


def exchanges_tokens(module: nn.Module) -> bool:
    """Return whether ``module`` has experts that are distributed over ranks, so that its forward exchanges tokens."""
    return any(get_optional_expert_mesh(inner) is not None for inner in module.modules())


def get_shared_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the submodules that all experts of a layer share, such as a norm.

    Only layers with expert parallelism count. Each rank applies the shared submodules to the tokens of its own experts.
    """
    experts = [module for module in modules if get_optional_expert_mesh(module) is not None]
    return [inner for module in experts for inner in module.modules() if inner is not module]
