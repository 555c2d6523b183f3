"""Conversion of DTensors to whole tensors and of whole tensors to DTensors, for shards of any kind.

``full_tensor`` and ``redistribute`` would mix up the rows of uneven shards; see
:mod:`~lightning_fsdp2.ranks.pieces`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2.ranks.pieces import UNEVEN_SHARD, get_pieces, get_uneven_group, is_uneven


def gather(tensor: Tensor) -> Tensor:
    """Return a DTensor as a whole tensor, whether its shards are even or not. Return a plain tensor unchanged.

    Every rank of the mesh must call this function.
    """
    if is_uneven(tensor):
        return _gather(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Make a contiguous DTensor of the given ``shape`` from this rank's shard, without communication.

    The function is differentiable.
    """
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def reshard_like(tensor: Tensor, like: DTensor) -> DTensor:
    """Return ``tensor`` in its own dtype, sharded in the same way as ``like``. Every rank must call this function.

    Args:
        tensor: Unsharded tensor, or DTensor with shards of any kind.
        like: DTensor of the same shape with shards of any kind.
    """
    sharded: DTensor = torch.empty_like(like, dtype=tensor.dtype, requires_grad=False)  # type: ignore[assignment]
    copy_part_(sharded, tensor)
    return sharded


def copy_part_(target: Tensor, tensor: Tensor) -> None:
    """Fill this rank's part of ``target`` with the matching part of ``tensor``. Every rank must call this function.

    Args:
        target: Plain tensor, or DTensor with shards of any kind.
        tensor: Unsharded tensor, or DTensor with shards of any kind.
    """
    whole = gather(tensor)
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    first_row = get_first_row(target) if is_uneven(target) else 0
    for piece in get_pieces(target, first_row):
        target.to_local()[piece.local].copy_(whole[piece.whole])


def get_first_row(tensor: DTensor) -> int:
    """Return how many rows of an uneven tensor are on the ranks before this one.

    Every rank must call this function.
    """
    group = get_uneven_group(tensor)
    return 0 if group is None else sum(_get_counts(tensor, group)[: group.rank()])


def _gather(tensor: DTensor) -> Tensor:
    """Join the uneven shards into this rank's tensor parallel shard, then those shards into the whole tensor."""
    local, group = tensor.to_local().detach(), get_uneven_group(tensor)
    if group is not None:
        counts = _get_counts(tensor, group)
        parts = local.new_empty(len(counts) * max(counts), *local.shape[1:])
        own = local.new_zeros(max(counts), *local.shape[1:])
        own[: local.size(0)] = local
        dist.all_gather_into_tensor(parts, own, group=group)
        local = torch.cat([part[:count] for part, count in zip(parts.chunk(len(counts)), counts, strict=True)])
    axes = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    others = {name: placement for name, placement in axes.items() if name != UNEVEN_SHARD}
    if all(placement.is_replicate() for placement in others.values()):
        return local
    return make_dtensor(local, tensor.device_mesh[tuple(others)], list(others.values()), tensor.shape).full_tensor()


def _get_counts(tensor: DTensor, group: dist.ProcessGroup) -> list[int]:
    """Return the number of rows on each rank of ``group``, in rank order."""
    own = torch.tensor([tensor.to_local().size(0)], device=tensor.device)
    counts = own.new_empty(group.size())
    dist.all_gather_into_tensor(counts, own, group=group)
    return counts.tolist()
