"""Values that Python reads from DTensors, such as ``norm.item()``: those of the whole tensor, on every rank.

DTensor's own ``item()`` returns what this rank holds. For the norm of a sharded gradient, that is the norm of this
rank's shard; for ``torch.isnan(gradient).any()``, whether this rank's shard has a NaN. Ranks would log wrong numbers,
and take different branches. ``tolist()``, ``numpy()`` and format strings of a DTensor are errors without a remedy.

To read a whole value, ranks communicate. So they first compare, on the host, the line that reads it: a rank that reads
alone would take part in another rank's next collective, or wait for ever.
"""

import inspect
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2.compat.dtensor import (
    READ_SCALAR,
    add_mesh,
    compute_as_dtensor,
    compute_in_parts,
    has_handlers,
    has_values,
    keep_nan_of_any_rank,
    set_handler,
    set_method,
)
from lightning_fsdp2.compat.torch import StridedShard, get_group_timeout
from lightning_fsdp2.ranks.collectives import copy_to_ranks
from lightning_fsdp2.ranks.coordination import get_group_of_ranks
from lightning_fsdp2.ranks.pieces import is_uneven
from lightning_fsdp2.ranks.whole_random import draw_whole_random_numbers
from lightning_fsdp2.ranks.whole_tensors import gather

_FULL_TENSOR = DTensor.full_tensor
"""torch's own method, which :func:`treat_dtensors_as_whole` replaces."""

_PACKAGES = ("torch", "lightning", "numpy", __name__.partition(".")[0])
"""Packages whose lines are not the line that reads a value."""


_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "huber_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "nll_loss_backward",
    "nll_loss_forward",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
    "soft_margin_loss",
    "soft_margin_loss_backward",
)
"""Losses, and gradients of losses, that torch computes in one operation.

Of a mean, torch takes the mean of the shards' means, even if the shards differ in size or weight. It divides a gradient
by the number of elements in this rank's shard.
"""


def treat_dtensors_as_whole(*meshes: DeviceMesh | None) -> None:
    """Make DTensors of ``meshes`` give Python whole values, and get the random numbers of one process, from now on.

    This stays so when a Trainer is gone, because its module is still sharded, and a script reads its weights then.
    DTensors on other meshes, which other libraries have made, are left alone.
    """
    for mesh in meshes:
        if mesh is not None:
            add_mesh(mesh)
    draw_whole_random_numbers()
    keep_nan_of_any_rank()
    aten = torch.ops.aten
    # in inference mode, DTensor gets `item` and `is_nonzero` themselves, not the operation that they consist of
    for operation in (READ_SCALAR, aten.item.default, aten.is_nonzero.default):
        set_handler(operation, _read_scalar)
    for packet in (aten.max, aten.min, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin):
        set_handler(packet.default, _find_extreme)
    set_handler(aten.linalg_vector_norm.default, _compute_norm)
    set_handler(aten.equal.default, _are_equal)
    set_handler(aten.allclose.default, _are_close)
    for name in _LOSSES:
        set_handler(getattr(aten, name).default, compute_in_parts)
    set_method("numpy", _read_array)
    set_method("tolist", _read_list)
    set_method("__format__", _format)
    set_method("full_tensor", _make_full)
    for name in ("add", "sub", "mul", "truediv", "pow"):
        set_method(f"__{name}__", _make_arithmetic(getattr(Tensor, f"__{name}__")))
        set_method(f"__r{name}__", _make_arithmetic(getattr(Tensor, f"__r{name}__")))


def get_whole(value: DTensor) -> Tensor:
    """Return ``value`` as a plain tensor, on every rank of its mesh.

    Raises:
        RuntimeError: If another rank of the mesh does not read the value in the same line. The message names the line.
    """
    if not has_values(value) or not _is_spread(value):
        return value.to_local()
    _check_all_ranks_read(value)
    return gather(value)


def _is_spread(value: DTensor) -> bool:
    """Return whether a rank holds only a part of ``value``."""
    sizes = zip(value.placements, value.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def _read_scalar(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value: DTensor = args[0]
    return operation(get_whole(value))


def _are_equal(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # torch's own way compares over all ranks of the world, even if only some of them hold the tensors
    first, second = args
    return first.shape == second.shape and get_whole((first == second).all()).item()


def _are_close(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_close: Any = torch.isclose(*args, **kwargs).all()
    return get_whole(is_close).item()


def _find_extreme(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find an extreme, or its index, also in shards in which torch cannot.

    If a rank holds no element, torch raises an error on this rank only. It finds no index in weights that FSDP2 has
    sharded after tensor parallelism.
    """
    value, *rest = args
    if isinstance(value, DTensor) and has_values(value):
        is_index = operation in (torch.ops.aten.argmax.default, torch.ops.aten.argmin.default)
        if _may_be_empty_on_a_rank(value) or (is_index and any(isinstance(p, StridedShard) for p in value.placements)):
            value = DTensor.from_local(gather(value), value.device_mesh, run_check=False)
    return compute_as_dtensor(operation, (value, *rest), kwargs)


def _compute_norm(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_extreme = len(args) > 1 and abs(args[1]) == math.inf
    return (_find_extreme if is_extreme else compute_as_dtensor)(operation, args, kwargs)


def _may_be_empty_on_a_rank(value: DTensor) -> bool:
    if is_uneven(value):
        return True
    sizes = [*value.shape]
    for placement, ranks in zip(value.placements, value.device_mesh.shape, strict=True):
        if placement.is_shard() or isinstance(placement, StridedShard):
            dim = cast(Any, placement).dim
            sizes[dim] = max(0, sizes[dim] - -(-sizes[dim] // ranks) * (ranks - 1))  # what the last rank has
    return value.numel() > 0 and 0 in sizes


def _read_array(self: DTensor, *, force: bool = False) -> Any:
    return Tensor.numpy(get_whole(self) if has_handlers(self.device_mesh) else self, force=force)


def _read_list(self: DTensor) -> Any:
    return Tensor.tolist(get_whole(self) if has_handlers(self.device_mesh) else self)


def _format(self: DTensor, spec: str) -> str:
    # Only a format of a number reads the number. Without a format, a line of a log that one rank writes shows the
    # DTensor, as `repr` does, and so does what is larger than a number.
    is_read = spec and self.dim() == 0 and has_handlers(self.device_mesh)
    return Tensor.__format__(get_whole(self), spec) if is_read else object.__format__(self, spec)


def _make_arithmetic(compute: Callable[[Tensor, Any], Any]) -> Callable[[DTensor, Any], Any]:
    """Return ``compute`` for a DTensor and another value, such as a penalty on weights and the loss of a batch.

    DTensor combines the two, but takes the loss as equal on all ranks, and gives it a gradient that is a DTensor, which
    its layers refuse. It cannot add penalties on weights of different meshes.
    """

    def compute_whole(self: DTensor, other: Any) -> Any:
        if self.dim() == 0 and isinstance(other, Tensor) and torch.is_grad_enabled() and has_handlers(self.device_mesh):
            has_gradient = self.requires_grad or other.requires_grad
            if not isinstance(other, DTensor):
                return compute(self.full_tensor() if has_gradient else self, other)
            if other.dim() == 0 and other.device_mesh != self.device_mesh:
                return compute(self.full_tensor(), other.full_tensor())
        return compute(self, other)

    return compute_whole


def _make_full(self: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """Return the whole of this tensor. The gradient of a single value is the mean of the ranks' gradients.

    DTensor takes the gradient as equal on all ranks. But a penalty that is multiplied by the loss of the batch has
    another gradient on each rank, and the gradients of weights are means over the ranks.
    """
    whole = _FULL_TENSOR(self, grad_placements=grad_placements)
    mesh = self.device_mesh
    if self.dim() or grad_placements is not None or not whole.requires_grad or not has_handlers(mesh):
        return whole
    for group in mesh.get_all_groups():
        whole = copy_to_ranks(whole, group)
    whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def _check_all_ranks_read(value: DTensor) -> None:
    mesh = value.device_mesh
    # half of it, so that this error comes before that of a rank that waits for this one in its next collective
    timeout = min(map(get_group_timeout, mesh.get_all_groups())) / 2
    place, line = _find_line()
    code = zlib.crc32(f"{line} {tuple(value.shape)} {value.dtype} {value.placements}".encode())
    codes = torch.tensor([code, -code])
    try:
        group = get_group_of_ranks(mesh.mesh.flatten().tolist(), "values", timeout)
        dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=group, async_op=True).wait(timeout)
    except RuntimeError as error:
        raise RuntimeError(_describe(value, place, f"not every one of them did so within {timeout}")) from error
    if codes.tolist() != [code, -code]:
        raise RuntimeError(_describe(value, place, "another one reads a value in another line"))


def _describe(value: DTensor, place: str, problem: str) -> str:
    return (
        f"{place}: rank {dist.get_rank()} reads the value of a tensor of which each of {value.device_mesh.size()} ranks"
        f" holds a part, but {problem}. Read it on all ranks, not under `if trainer.is_global_zero`: call"
        " `total = tensor.full_tensor()` on every rank, and use `total` on any. For the norm of all gradients, use the"
        " callback lightning_fsdp2.callbacks.GradientNorm."
    )


def _find_line() -> tuple[str, str]:
    """Return the file and line of the user that reads a value: with the file's path, and with its name only.

    Paths may differ between hosts.
    """
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path}:{frame.f_lineno}", f"{path.name}:{frame.f_lineno}"
