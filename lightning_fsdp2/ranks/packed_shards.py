"""DTensors with several pieces on each rank: a shard of each projection that a weight packs.

DTensor has one placement for two cases, ``_StridedShard``. FSDP2 uses it to cut a shard once more, which leaves one
piece. Its ``split_factor`` is then the number of shards that the axes further inside make of the same dim. Tensor
parallelism uses it to cut each of ``split_factor`` projections, which leaves a piece of each. On a user's own mesh the
two cases look alike if an axis inside the tensor parallel one shards the same dim over ``split_factor`` ranks.
"""

import math
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import StridedShard


def get_packed_placements(tensor: DTensor) -> dict[int, Any]:
    """Return the placements that leave each rank with several pieces of ``tensor``, by the axis of its mesh."""
    return {
        axis: placement
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, StridedShard) and placement.split_factor != _count_inner_shards(tensor, axis)
    }


def _count_inner_shards(tensor: DTensor, axis: int) -> int:
    """Return how many shards the axes inside ``axis`` make of the dim that ``axis`` shards."""
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    inner = range(axis + 1, len(dims))
    return math.prod(tensor.device_mesh.size(other) for other in inner if dims[other] == dims[axis])
