"""Asynchronous tensor parallelism: the collectives of compiled layers overlap the matrix products next to them.

Inductor fuses an all-gather with the products that use its result, or a product with the reduce-scatter of its result.
The fused operation works chunk by chunk, over symmetric memory (https://discuss.pytorch.org/t/209487). In a dense layer
inductor fuses the two all-gathers and two reduce-scatters of forward and the two all-gathers of backward. The
reduce-scatters of backward stay as they are: their input is a sum of several products (q, k and v; gate and up).
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.compat.torch import (
    enable_symmetric_memory,
    get_fusion_options,
    get_fusion_targets,
    has_symmetric_memory,
    is_backward_graph,
)

logger = logging.getLogger(__name__)


def build_collective_fusion(tp_mesh: DeviceMesh | None) -> "CollectiveFusion":
    """Build the :class:`CollectiveFusion` for compiling the layers of a sequence parallel model.

    Args:
        tp_mesh: Mesh of the tensor parallel ranks; None if there is only one rank.

    Raises:
        ValueError: If there are no collectives to overlap, or the devices cannot overlap them.
    """
    if tp_mesh is None:
        raise ValueError(
            "enable_async_tensor_parallel=True with tp_size=1: it overlaps the collectives of several tensor parallel"
            " ranks. Use tp_size > 1, or leave it out."
        )
    if not has_symmetric_memory(tp_mesh.device_type):
        raise ValueError(
            f"enable_async_tensor_parallel=True on {tp_mesh.device_type!r} devices: it needs CUDA devices and NCCL, for"
            " ranks that read each other's memory. Leave it out."
        )
    return CollectiveFusion(tp_mesh.get_group())


class CollectiveFusion:
    """Fusion of the collectives of a model's layers: options of the compiler, and a count of what was fused.

    Args:
        group: Process group of the tensor parallel ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        enable_symmetric_memory(group)
        self.fused = 0
        self.collectives = 0
        self._has_backward = False
        self._is_reported = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``torch.compile``. They also hold for the backward graph, compiled when backward first runs."""
        return get_fusion_options(self.count)

    def count(self, graph: torch.fx.Graph) -> None:
        """Count the collectives of a graph after inductor has fused what it can."""
        fused, unfused = get_fusion_targets()
        targets = [node.target for node in graph.nodes]
        self.fused += sum(target in fused for target in targets)
        self.collectives += sum(target in (*fused, *unfused) for target in targets)
        self._has_backward |= is_backward_graph(graph)

    def report(self) -> None:
        """Log once, after forward and backward are compiled, how many collectives were fused; warn if none were."""
        if self._is_reported or not self._has_backward:
            return
        self._is_reported = True
        if dist.get_rank() != 0:
            return
        if self.fused:
            logger.info("Asynchronous tensor parallel: fused %d of %d collectives.", self.fused, self.collectives)
        else:
            logger.warning(
                "enable_async_tensor_parallel=True: fused 0 of %d collectives of the compiled layers, so that none"
                " overlaps a matrix product. Inductor fuses those right before or after projections without bias.",
                self.collectives,
            )
