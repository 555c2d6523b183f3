"""DTensors whose shards are whole rows, but not the number of rows on each rank that torch would choose.

Megatron-FSDP cuts a buffer of many parameters into equal parts. A small parameter may lie on one rank as a whole, and a
larger one is cut at some row. Their DTensors still say ``Shard(0)``, so ``full_tensor``, ``redistribute`` and
checkpoints would mix up rows. These DTensors are recognised by the special name of their mesh axis. So all ranks agree,
and states and gradients made from a parameter are recognised too.
"""

from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.compat.torch import split_evenly

UNEVEN_SHARD = "uneven_shard"
"""Name of the mesh axis of uneven shards."""

_EVEN_SHARD = "even_shard"


def is_uneven(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` may have uneven shards, or is whole on a mesh for these. All ranks agree."""
    return isinstance(tensor, DTensor) and UNEVEN_SHARD in (tensor.device_mesh.mesh_dim_names or ())


def gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, with even shards or not; return a plain tensor as it is.

    Every rank of the mesh must call it.
    """
    if is_uneven(tensor):
        return _gather(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_even(tensor: DTensor) -> DTensor:
    """Return the same tensor with the shards that torch would make. Every rank must call it."""
    mesh = get_even_mesh(tensor)
    shards = split_evenly(_gather(tensor), mesh.size())
    return DTensor.from_local(
        shards[mesh.get_local_rank()].clone(),  # in its own memory, which torch can copy in the background
        mesh,
        [Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )


def shard_unevenly_like(tensor: Tensor, like: DTensor) -> DTensor:
    """Return ``tensor``, whole or in even shards, in uneven shards like those of ``like``. Every rank must call it."""
    sharded: DTensor = torch.empty_like(like)  # type: ignore[assignment]
    copy_rows_(sharded, tensor)
    return sharded


def copy_rows_(target: Tensor, tensor: Tensor) -> None:
    """Copy this rank's rows of ``tensor``, whole or in shards of any kind, to ``target``. Every rank must call it."""
    rows = gather(tensor)
    if is_uneven(target) and _is_sharded(target):
        counts = _get_counts(target)
        rows = rows[sum(counts[: _get_group(target).rank()]) :][: target.to_local().size(0)]
    (target.to_local() if isinstance(target, DTensor) else target).copy_(rows)


def get_even_mesh(tensor: DTensor) -> DeviceMesh:
    """Return a mesh of the ranks that hold the shards of an uneven tensor."""
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
    """Return the number of rows on each rank."""
    group = _get_group(tensor)
    own = torch.tensor([tensor.to_local().size(0)], device=tensor.device)
    counts = own.new_empty(group.size())
    dist.all_gather_into_tensor(counts, own, group=group)
    return counts.tolist()


def _get_group(tensor: DTensor) -> dist.ProcessGroup:
    mesh = tensor.device_mesh
    return mesh.get_group(UNEVEN_SHARD) if mesh.ndim > 1 else mesh.get_group()
