"""Conversion of shards that a checkpoint cannot describe to shards that it can.

Under tensor parallelism, a rank holds a shard of each projection in a packed weight (gate and up of MoE experts): two
pieces of one tensor. Megatron-FSDP gives ranks uneven numbers of rows. DCP expects one piece per rank, at the place
where torch would put it. Tensors of both kinds are therefore written and read in contiguous, even shards. During a
save, or until the tensors are copied, the device holds their converted shards in addition to the original ones.
"""

from typing import Any, TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2.ranks.packed_shards import get_packed_placements
from lightning_fsdp2.ranks.whole_tensors import get_even_mesh, is_uneven, shard_unevenly_like, to_even


def is_packed(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether each rank holds several pieces of ``tensor``."""
    return isinstance(tensor, DTensor) and bool(get_packed_placements(tensor))


def is_converted(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is written and read in shards other than its own."""
    return is_packed(tensor) or is_uneven(tensor)


def convert(tensor: DTensor) -> DTensor:
    """Return ``tensor`` in contiguous, even shards; every rank must call it."""
    if is_uneven(tensor):
        return to_even(tensor)
    local: DTensor = tensor.detach()  # type: ignore[assignment]
    return local.redistribute(placements=get_stored_layout(tensor)[1])


def convert_all(value: Any) -> Any:
    """Return nested dicts and lists with :func:`convert` applied to the tensors that need it."""
    if isinstance(value, dict):
        return {key: convert_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [convert_all(item) for item in value]
    return convert(value) if is_converted(value) else value


def convert_back(tensor: DTensor, like: DTensor) -> DTensor:
    """Undo :func:`convert`: return ``tensor`` in the shards of ``like``."""
    if is_uneven(like):
        return shard_unevenly_like(tensor, like)
    return tensor.redistribute(placements=like.placements)


def get_stored_layout(tensor: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements of the tensor that :func:`convert` returns."""
    if is_uneven(tensor):
        return get_even_mesh(tensor), (Shard(0),)
    contiguous = {axis: Shard(packed.dim) for axis, packed in get_packed_placements(tensor).items()}
    placements = tuple(contiguous.get(axis, placement) for axis, placement in enumerate(tensor.placements))
    return tensor.device_mesh, placements
