"""Access to private parts of DTensor: how it computes an operation. Tested with torch 2.13.

torch 2.11 to 2.15 look an operation up in ``_custom_op_handlers`` before anything else. torch has no public way to give
DTensor another implementation of an operation that it has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from lightning_fsdp2.compat.torch import all_gather_tensor, get_shard

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function that computes an operation on DTensors, given the operation and its arguments."""

_HANDLERS: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

_EARLIER: dict[Any, Handler | None] = {}
"""torch's own handlers of operations that have another handler now."""

_REDUCE = Partial._reduce_value
"""Method of torch that combines the parts of a value."""

READ_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
"""Operation that ``item()``, ``float()``, ``int()`` and ``bool()`` of a tensor consist of."""


def set_handler(operation: Any, handler: Handler) -> None:
    """Make ``handler`` compute ``operation`` whenever one of its arguments is a DTensor."""
    _EARLIER.setdefault(operation, _HANDLERS.get(operation))
    _HANDLERS[operation] = handler


def compute_as_dtensor(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``operation`` as DTensor does without the handler that :func:`set_handler` gave it."""
    earlier = _EARLIER[operation]
    if earlier is not None:
        return earlier(operation, args, kwargs)
    handler = _HANDLERS.pop(operation)
    try:
        return operation(*args, **kwargs)
    finally:
        _HANDLERS[operation] = handler


def set_method(name: str, method: Callable[..., Any]) -> None:
    """Give DTensor a method of its own in place of the one that it inherits from ``Tensor``."""
    setattr(DTensor, name, method)


def keep_nan_of_any_rank() -> None:
    """Make the largest or smallest value of a DTensor NaN if any rank has a NaN, as for a plain tensor.

    The all-reduces of gloo and NCCL may return the largest number instead.
    """
    Partial._reduce_value = _reduce  # type: ignore[method-assign]


def _reduce(self: Partial, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    if self.reduce_op not in ("max", "min") or not tensor.is_floating_point():
        return _REDUCE(self, tensor, mesh, mesh_dim)
    parts = all_gather_tensor(tensor[None], 0, mesh.get_group(mesh_dim))
    return parts.amax(0) if self.reduce_op == "max" else parts.amin(0)


def has_values(tensor: DTensor) -> bool:
    """Return whether this rank's part of ``tensor`` has values.

    It has none while a graph is traced or a run is simulated, on the meta device, and on a rank outside the mesh.
    """
    shard = get_shard(tensor)
    is_plain = type(shard) in (
        Tensor,
        torch.nn.Parameter,
        torch.distributed._functional_collectives.AsyncCollectiveTensor,
    )
    return is_plain and not shard.is_meta and tensor.device_mesh.get_coordinate() is not None
