"""Access to private parts of DTensor: how it computes an operation. Tested with torch 2.11, 2.13 and 2.14.

torch 2.11 to 2.15 look an operation up in ``_custom_op_handlers`` before anything else. torch has no public way to give
DTensor another implementation of an operation that it has. The table is one of the process, so it also serves DTensors
of other libraries. On meshes that nobody has passed to :func:`add_mesh`, they are computed as without this package.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._op_schema import OutputSharding

from lightning_fsdp2.compat.torch import get_schema, get_shard, tree_leaves

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function that computes an operation on DTensors, given the operation and its arguments."""

_meshes: set[DeviceMesh] = set()
"""Meshes whose DTensors get the handlers. torch treats equal meshes as one, and so does this set."""

_handlers: dict[Any, Handler] = {}
"""Handlers that :func:`set_handler` was given, by operation."""

_earlier: dict[Any, Handler | None] = {}
"""torch's own handlers of operations that have another handler now."""

_REDUCE = Partial._reduce_value
"""Method of torch that combines the parts of a value."""

READ_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
"""Operation that ``item()``, ``float()``, ``int()`` and ``bool()`` of a tensor consist of."""


def add_mesh(mesh: DeviceMesh) -> None:
    """Make handlers compute the operations on DTensors of ``mesh``, of its root, and of the root's other views."""
    _meshes.update((mesh, mesh._get_root_mesh()))


def has_handlers(mesh: DeviceMesh) -> bool:
    """Return whether handlers compute the operations on DTensors of ``mesh``; see :func:`add_mesh`."""
    return mesh in _meshes or mesh._get_root_mesh() in _meshes


def set_handler(operation: Any, handler: Handler) -> None:
    """Make ``handler`` compute ``operation`` whenever one of its arguments is a DTensor of a mesh that was added."""
    table: dict[Any, Handler] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    if table.get(operation) is not _handle:
        _earlier[operation] = table.get(operation)
    _handlers[operation] = handler
    table[operation] = _handle


def _handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    handler = _handlers[operation] if has_handlers(first.device_mesh) else compute_as_dtensor
    return handler(operation, args, kwargs)


def compute_as_dtensor(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``operation`` as DTensor does without the handler that :func:`set_handler` gave it.

    The handler stays in the table, because other threads use the table too. So this function takes the steps that
    follow in torch after the look-up.
    """
    earlier = _earlier[operation]
    if earlier is not None:
        return earlier(operation, args, kwargs)
    dispatcher: Any = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(operation, args, kwargs)
    sharding = dispatcher._propagate_op_sharding_dispatch_slow_path(operation, args, kwargs, call, True)
    if not isinstance(sharding, OutputSharding):  # torch has computed an operation that consists of others
        return sharding
    call.output_sharding = sharding
    local = dispatcher._dispatch_get_local_results_slow_path(operation, args, call)
    is_in_place = get_schema(operation).is_mutable
    if not is_in_place and operation is not torch.ops.aten.equal.default:
        return dispatcher.wrap(local, sharding.output_spec)
    mesh, is_member = call.compute_mesh, call.compute_mesh.get_coordinate() is not None
    return dispatcher._dispatch_fast_path_python_tail(
        operation, args, kwargs, mesh, sharding, local, is_member, is_in_place, False
    )


def compute_in_parts(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``operation`` by the simpler operations that torch defines it by."""
    return decomposition_table[operation](*args, **kwargs)


def set_method(name: str, method: Callable[..., Any]) -> None:
    """Give DTensor a method of its own in place of the one that it inherits from ``Tensor``."""
    setattr(DTensor, name, method)


def keep_nan_of_any_rank() -> None:
    """Make the largest or smallest value of a DTensor NaN if any rank has a NaN, as for a plain tensor.

    The all-reduces of gloo and NCCL may return the largest number instead.
    """
    Partial._reduce_value = _reduce  # type: ignore[method-assign]


def _reduce(self: Partial, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    if self.reduce_op not in ("max", "min") or not tensor.is_floating_point() or not has_handlers(mesh):
        return _REDUCE(self, tensor, mesh, mesh_dim)
    has_nan = tensor.isnan().to(tensor.dtype) * (1 if self.reduce_op == "max" else -1)
    extreme, has_nan = _REDUCE(self, torch.stack([tensor, has_nan]), mesh, mesh_dim)  # one all-reduce
    return extreme.masked_fill(has_nan != 0, math.nan)


def has_random_tracker(mesh: DeviceMesh) -> bool:
    """Return whether torch draws different random numbers for the shards of ``mesh``, and equal ones for replicas."""
    return mesh.device_type != "cpu"


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
