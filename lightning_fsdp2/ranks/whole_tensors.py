"""DTensors of Megatron-FSDP, whose shards do not have the numbers of rows that torch expects.

Megatron-FSDP puts many parameters into one buffer and cuts the buffer into equal parts. A small parameter may be whole
on one rank, and a larger one is cut at an arbitrary row. The DTensors nevertheless have the placement ``Shard(0)``, so
``full_tensor``, ``redistribute`` and checkpoints would mix up rows.

Such a DTensor is recognised by the special name of its mesh axis. The name is the same on all ranks, and optimizer
states and gradients made from a parameter have it too.
"""

from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.compat.torch import split_evenly

UNEVEN_SHARD = "uneven_shard"
"""Name of the mesh axis over which tensors are sharded unevenly."""

_EVEN_SHARD = "even_shard"


def is_uneven(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor on a mesh for uneven shards. The answer is the same on all ranks."""
    return isinstance(tensor, DTensor) and UNEVEN_SHARD in (tensor.device_mesh.mesh_dim_names or ())


def gather(tensor: Tensor) -> Tensor:
    """Return a DTensor as a whole tensor, whether its shards are even or not; return a plain tensor as it is.

    Every rank of the mesh must call this function.
    """
    if is_uneven(tensor):
        return _gather(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_even(tensor: DTensor) -> DTensor:
    """Return ``tensor`` with the even shards that torch expects. Every rank must call this function."""
    mesh = get_even_mesh(tensor)
    shards = split_evenly(_gather(tensor), mesh.size())
    return DTensor.from_local(
        shards[mesh.get_local_rank()].clone(),  # a copy with its own memory, which torch can save in the background
        mesh,
        [Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )


def shard_unevenly_like(tensor: Tensor, like: DTensor) -> DTensor:
    """Return ``tensor`` sharded exactly as ``like``, which has uneven shards. Every rank must call this function.

    Args:
        tensor: Tensor that is whole or has even shards.
        like: DTensor with uneven shards and the same shape.
    """
    sharded: DTensor = torch.empty_like(like)  # type: ignore[assignment]
    copy_rows_(sharded, tensor)
    return sharded


def copy_rows_(target: Tensor, tensor: Tensor) -> None:
    """Fill this rank's part of ``target`` with the matching rows of ``tensor``. Every rank must call this function.

    Args:
        target: Plain tensor, or DTensor with any placements.
        tensor: Unsharded tensor, or DTensor with any placements.
    """
    rows = gather(tensor)
    if is_uneven(target) and _is_sharded(target):
        counts = _get_counts(target)
        rows = rows[sum(counts[: _get_group(target).rank()]) :][: target.to_local().size(0)]
    (target.to_local() if isinstance(target, DTensor) else target).copy_(rows)


def get_even_mesh(tensor: DTensor) -> DeviceMesh:
    """Return a one-dimensional mesh of the ranks that hold the shards of an unevenly sharded tensor."""
    return DeviceMesh.from_group(_get_group(tensor), tensor.device_mesh.device_type, mesh_dim_names=(_EVEN_SHARD,))


def _is_sharded(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def _gather(tensor: DTensor) -> Tensor:
    if not _is_sharded(tensor):
        return tensor.to_local().detach()
    counts, group, local = _get_counts(tensor), _get_group(tensor), tensor.to_local().detach()
    parts = local.new_empty(len(counts) * max(counts), *tensor.shape[1:])
    own = local.new_zeros(max(counts), *tensor.shape[1:])
    own[: local.size(0)] = local
    dist.all_gather_into_tensor(parts, own, group=group)
    return torch.cat([part[:count] for part, count in zip(parts.chunk(len(counts)), counts, strict=True)])


def _get_counts(tensor: DTensor) -> list[int]:
    """Return the number of rows on each rank, in rank order."""
    group = _get_group(tensor)
    own = torch.tensor([tensor.to_local().size(0)], device=tensor.device)
    counts = own.new_empty(group.size())
    dist.all_gather_into_tensor(counts, own, group=group)
    return counts.tolist()


def _get_group(tensor: DTensor) -> dist.ProcessGroup:
    mesh = tensor.device_mesh
    return mesh.get_group(UNEVEN_SHARD) if mesh.ndim > 1 else mesh.get_group()
