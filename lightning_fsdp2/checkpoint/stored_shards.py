"""Conversion of unusual shards to the contiguous, even shards that checkpoints hold.

DCP expects one piece of each tensor per rank, at the offset that ``Shard`` would give it. Two kinds of tensors are
different and must be converted. Under tensor parallelism, a packed weight, such as the gate and up projections of MoE
experts, has two pieces per rank. Under Megatron-FSDP, ranks hold uneven numbers of rows. During a save, the device
holds the converted shards in addition to the original shards, until the converted shards are copied or written.
"""

from typing import Any, TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2.ranks.packed_shards import get_packed_placements
from lightning_fsdp2.ranks.whole_tensors import get_even_mesh, is_uneven, shard_unevenly_like, to_even


def is_packed(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether each rank holds several separate pieces of ``tensor``."""
    return isinstance(tensor, DTensor) and bool(get_packed_placements(tensor))


def is_converted(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether the shards of ``tensor`` must be converted for a checkpoint."""
    return is_packed(tensor) or is_uneven(tensor)


def convert(tensor: DTensor) -> DTensor:
    """Convert ``tensor`` to contiguous, even shards. Every rank must call this."""
    if is_uneven(tensor):
        return to_even(tensor)
    local: DTensor = tensor.detach()  # type: ignore[assignment]
    return local.redistribute(placements=get_stored_layout(tensor)[1])


def convert_all(value: Any) -> Any:
    """Apply :func:`convert` to the unusual shards in nested dicts and lists, and return the result."""
    if isinstance(value, dict):
        return {key: convert_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [convert_all(item) for item in value]
    return convert(value) if is_converted(value) else value


def convert_back(tensor: DTensor, like: DTensor) -> DTensor:
    """Undo :func:`convert`, and return ``tensor`` with the same shards as ``like``."""
    if is_uneven(like):
        return shard_unevenly_like(tensor, like)
    return tensor.redistribute(placements=like.placements)


def get_stored_layout(tensor: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements that ``tensor`` has after :func:`convert`."""
    if is_uneven(tensor):
        return get_even_mesh(tensor), (Shard(0),)
    contiguous = {axis: Shard(packed.dim) for axis, packed in get_packed_placements(tensor).items()}
    placements = tuple(contiguous.get(axis, placement) for axis, placement in enumerate(tensor.placements))
    return tensor.device_mesh, placements
