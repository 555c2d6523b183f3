"""Packed shards in checkpoints, which have no word for them.

Under tensor parallelism a rank holds a shard of each of the projections that a weight packs (gate and up of a mixture's
experts), two pieces of one tensor. DCP takes a rank's part of a tensor for one piece and refuses ("overlapping
chunks"), so such tensors are written and read in contiguous shards: for the time of a save, or until they are copied,
the device holds those of all packed tensors beside the packed ones.
"""

from typing import Any, TypeGuard

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2._torch_compat import StridedShard


def is_packed(tensor: Any) -> TypeGuard[DTensor]:
    """Whether the tensor parallel ranks hold several pieces of ``tensor`` each."""
    # the tensor parallel axis is the last one; a StridedShard on another is FSDP2's, of which each rank has one piece
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], StridedShard)


def unpack(tensor: DTensor) -> DTensor:
    """Return a packed tensor in contiguous shards; every rank must call it."""
    local: DTensor = tensor.detach()  # type: ignore[assignment]
    return local.redistribute(placements=get_contiguous_placements(tensor))


def unpack_all(value: Any) -> Any:
    """Return nested dicts and lists with :func:`unpack` done for the packed tensors in them."""
    if isinstance(value, dict):
        return {key: unpack_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack_all(item) for item in value]
    return unpack(value) if is_packed(value) else value


def pack_like(tensor: DTensor, like: DTensor) -> DTensor:
    """The reverse of :func:`unpack`: the placements of ``like``."""
    return tensor.redistribute(placements=like.placements)


def get_contiguous_placements(tensor: DTensor) -> tuple[Placement, ...]:
    """The placements of a packed tensor once each rank's shard is one piece."""
    *others, packed = tensor.placements
    return (*others, Shard(packed.dim))  # type: ignore[attr-defined]
