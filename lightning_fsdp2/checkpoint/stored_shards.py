"""Shards that checkpoints have no word for, as shards that they have.

Under tensor parallelism a rank holds a shard of each of the projections that a weight packs (gate and up of a mixture's
experts), two pieces of one tensor; Megatron-FSDP gives ranks rows of uneven number. DCP takes a rank's part of a tensor
for one piece, where torch would put it, so such tensors are written and read in contiguous, even shards: for the time
of a save, or until they are copied, the device holds those of all of them beside their own.
"""

from typing import Any, TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2.compat.torch import StridedShard
from lightning_fsdp2.ranks.whole_tensors import get_even_mesh, is_uneven, shard_unevenly_like, to_even


def is_packed(tensor: Any) -> TypeGuard[DTensor]:
    """Whether the tensor parallel ranks hold several pieces of ``tensor`` each."""
    # the tensor parallel axis is the last one; a StridedShard on another is FSDP2's, of which each rank has one piece
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], StridedShard)


def is_converted(tensor: Any) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is written and read in other shards than its own."""
    return is_packed(tensor) or is_uneven(tensor)


def convert(tensor: DTensor) -> DTensor:
    """Return such a tensor in contiguous, even shards; every rank must call it."""
    if is_uneven(tensor):
        return to_even(tensor)
    local: DTensor = tensor.detach()  # type: ignore[assignment]
    return local.redistribute(placements=get_stored_layout(tensor)[1])


def convert_all(value: Any) -> Any:
    """Return nested dicts and lists with :func:`convert` done for the tensors in them that need it."""
    if isinstance(value, dict):
        return {key: convert_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [convert_all(item) for item in value]
    return convert(value) if is_converted(value) else value


def convert_back(tensor: DTensor, like: DTensor) -> DTensor:
    """The reverse of :func:`convert`: the shards of ``like``."""
    if is_uneven(like):
        return shard_unevenly_like(tensor, like)
    return tensor.redistribute(placements=like.placements)


def get_stored_layout(tensor: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh and the placements of what :func:`convert` returns."""
    if is_uneven(tensor):
        return get_even_mesh(tensor), (Shard(0),)
    *others, packed = tensor.placements
    return tensor.device_mesh, (*others, Shard(packed.dim))  # type: ignore[attr-defined]
