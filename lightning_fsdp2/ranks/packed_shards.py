"""DTensors of weights that pack several projections. Each rank holds a piece of every projection.

DTensor describes two cases by the same placement, ``_StridedShard``:

* FSDP2 uses it if later mesh axes shard the same dim too. Each rank holds one piece, and ``split_factor`` is the number
  of shards that the later axes make.
* Tensor parallelism uses it if a dim packs ``split_factor`` projections. Each rank holds a piece of every projection.

Comparing ``split_factor`` with the number of shards of the later axes tells the cases apart. The comparison fails only
on a user's own mesh, if axes after the tensor parallel axis shard the same dim over exactly ``split_factor`` ranks.
"""

import math
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import StridedShard


def get_packed_placements(tensor: DTensor) -> dict[int, Any]:
    """Return the placements that leave each rank with several pieces of ``tensor``, as a dict by mesh axis."""
    return {
        axis: placement
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, StridedShard) and placement.split_factor != _count_inner_shards(tensor, axis)
    }


def _count_inner_shards(tensor: DTensor, axis: int) -> int:
    """Return the number of shards into which the mesh axes after ``axis`` cut the dim that ``axis`` shards."""
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    inner = range(axis + 1, len(dims))
    return math.prod(tensor.device_mesh.size(other) for other in inner if dims[other] == dims[axis])
