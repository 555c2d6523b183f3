"""The pieces of a DTensor that a rank holds, including shards that are not contiguous or differ in size.

Most shards are laid out as ``Shard`` describes. Two kinds are not:

* *Packed* shards. Under tensor parallelism, a weight may pack several projections along a dim, such as gate and up. A
  rank holds a piece of every projection. The placement is ``_StridedShard``, and ``split_factor`` is the number of
  projections.
* *Uneven* shards. Megatron-FSDP puts many parameters into one buffer and cuts the buffer into equal parts. A small
  parameter may be whole on one rank, and a larger one is cut at an arbitrary row. The DTensors nevertheless have the
  placement ``Shard(0)``. They are recognised by their mesh axis, which has a special name on all ranks. Optimizer
  states and gradients made from a parameter have this axis too.

FSDP2 uses ``_StridedShard`` too, if later mesh axes shard the same dim. But then each rank holds one piece, and
``split_factor`` is the number of shards that the later axes make. So a shard is packed if its ``split_factor`` differs
from that number. This rule is wrong only on a user's own mesh, if axes after the tensor parallel axis happen to shard
the same dim over exactly ``split_factor`` ranks.
"""

import itertools
import math
from typing import Any, NamedTuple, TypeGuard, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import StridedShard
from lightning_fsdp2.ranks.collectives import get_shard_range

UNEVEN_SHARD = "uneven_shard"
"""Name of the mesh axis over which tensors are sharded unevenly."""


class Piece(NamedTuple):
    """Contiguous part of a tensor that a rank holds."""

    local: tuple[slice, ...]
    """Position of the piece in the rank's local tensor."""

    whole: tuple[slice, ...]
    """Position of the piece in the whole tensor."""


class _Range(NamedTuple):
    """Contiguous range of indices along a dim of the whole tensor. The local tensor holds a shard's ranges in order."""

    start: int
    length: int


def is_uneven(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor on a mesh for uneven shards. The answer is the same on all ranks."""
    return isinstance(tensor, DTensor) and UNEVEN_SHARD in _get_axes(tensor)


def without_uneven_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same ranks and process groups, without the axis name that marks shards as uneven."""
    if mesh.mesh_dim_names is None or UNEVEN_SHARD not in mesh.mesh_dim_names:
        return mesh
    names = tuple("even_shard" if name == UNEVEN_SHARD else name for name in mesh.mesh_dim_names)
    return DeviceMesh.from_group(mesh.get_all_groups(), mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)


def get_packed_placements(tensor: DTensor) -> dict[int, Any]:
    """Return the placements that leave each rank with several pieces of ``tensor``, as a dict keyed by mesh axis."""
    return {
        axis: placement
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, StridedShard) and placement.split_factor != _count_inner_shards(tensor, axis)
    }


def get_uneven_group(tensor: DTensor) -> dist.ProcessGroup | None:
    """Return the process group whose ranks hold the shards of an uneven ``tensor``, or None if every rank has all rows.

    With tensor parallelism, "all rows" means all rows of the tensor parallel shard.
    """
    axis = _get_axes(tensor).index(UNEVEN_SHARD)
    return None if tensor.placements[axis].is_replicate() else tensor.device_mesh.get_group(axis)


def get_pieces(tensor: DTensor, first_row: int = 0) -> list[Piece]:
    """Return the pieces of ``tensor`` that this rank holds. There are none if the local tensor is empty.

    Args:
        tensor: DTensor with shards of any kind.
        first_row: For an uneven tensor, the number of rows held by lower ranks in the group from
            :func:`get_uneven_group`.
    """
    dims = [[_Range(0, size)] for size in tensor.shape]
    for axis in _list_sharding_axes(tensor):
        dim = cast(Any, tensor.placements[axis]).dim
        if _get_axes(tensor)[axis] == UNEVEN_SHARD:
            dims[dim] = _cut(dims[dim], first_row, tensor.to_local().size(dim))
        else:
            dims[dim] = _shard(dims[dim], tensor, axis)
    pieces = []
    for ranges in itertools.product(*map(_list_slices, dims)):
        pieces.append(Piece(tuple(local for local, _ in ranges), tuple(whole for _, whole in ranges)))
    return pieces


def _get_axes(tensor: DTensor) -> tuple[str | None, ...]:
    return tensor.device_mesh.mesh_dim_names or (None,) * tensor.device_mesh.ndim


def _count_inner_shards(tensor: DTensor, axis: int) -> int:
    """Return the number of shards into which the mesh axes after ``axis`` cut the dim that ``axis`` shards.

    Uneven shards do not count, because FSDP2 does not make them.
    """
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    inner = (other for other in range(axis + 1, len(dims)) if _get_axes(tensor)[other] != UNEVEN_SHARD)
    return math.prod(tensor.device_mesh.size(other) for other in inner if dims[other] == dims[axis])


def _list_sharding_axes(tensor: DTensor) -> list[int]:
    """Return the mesh axes that shard ``tensor``, in the order in which they cut it."""
    packed = get_packed_placements(tensor)
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    # In the mesh, FSDP2's axis comes before the other axes. However, FSDP2 shards last: it cuts the shards that the
    # other axes have made. FSDP2 marks this order with a strided placement, so axes with such a placement come last.
    return sorted(axes, key=lambda axis: isinstance(tensor.placements[axis], StridedShard) and axis not in packed)


def _shard(ranges: list[_Range], tensor: DTensor, axis: int) -> list[_Range]:
    """Return the parts of ``ranges`` that this rank keeps after sharding over the mesh axis ``axis``.

    If the shards are packed, the rank keeps a part of each packed projection.
    """
    packed = get_packed_placements(tensor).get(axis)
    count = 1 if packed is None else packed.split_factor
    size = sum(length for _, length in ranges) // count
    rank, ranks = tensor.device_mesh.get_local_rank(axis), tensor.device_mesh.size(axis)
    start, length = get_shard_range(size, rank, ranks)
    return [part for index in range(count) for part in _cut(ranges, index * size + start, length)]


def _cut(ranges: list[_Range], start: int, length: int) -> list[_Range]:
    """Take ``length`` indices from the concatenated ``ranges``, from position ``start`` on. Return their ranges."""
    found = []
    for first, count in ranges:
        skipped = min(max(start, 0), count)
        taken = min(count - skipped, length)
        if taken > 0:
            found.append(_Range(first + skipped, taken))
        start, length = start - count, length - max(taken, 0)
    return found


def _list_slices(ranges: list[_Range]) -> list[tuple[slice, slice]]:
    """Convert each range to a pair: its slice of the local tensor, and its slice of the whole tensor."""
    ends = itertools.accumulate(length for _, length in ranges)
    return [
        (slice(end - length, end), slice(start, start + length))
        for end, (start, length) in zip(ends, ranges, strict=True)
    ]
