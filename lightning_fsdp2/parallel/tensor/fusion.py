"""Asynchronous tensor parallelism, in which collectives of compiled layers overlap with matrix products.

Inductor fuses an all-gather with the matrix products that use the gathered tensor, or a matrix product with the
reduce-scatter of the product. The fused operation works chunk by chunk, over symmetric memory
(https://discuss.pytorch.org/t/209487).

In a dense layer, inductor fuses the two all-gathers and two reduce-scatters of forward, and the two all-gathers of
backward. It cannot fuse the reduce-scatters of backward, because their input is a sum of several matrix products (of q,
k and v, or of gate and up).
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
    """Build the :class:`CollectiveFusion` with which the layers of a sequence parallel model are compiled.

    Args:
        tp_mesh: Mesh of the tensor parallel ranks. None if there is only one such rank.

    Raises:
        ValueError: If there is only one tensor parallel rank and therefore no collective, or if the devices have no
            symmetric memory.
    """
    if tp_mesh is None:
        raise ValueError(
            "enable_async_tensor_parallel=True with tp_size=1: with one tensor parallel rank, there are no collectives"
            " to overlap with matrix products. Use tp_size > 1, or leave the flag out."
        )
    if not has_symmetric_memory(tp_mesh.device_type):
        raise ValueError(
            f"enable_async_tensor_parallel=True on {tp_mesh.device_type!r} devices: the flag needs CUDA devices and"
            " NCCL, so that ranks can read each other's memory. Leave the flag out."
        )
    return CollectiveFusion(tp_mesh.get_group())


class CollectiveFusion:
    """Fusion of collectives with matrix products in the layers of a model.

    It provides the options for ``torch.compile``, and counts the collectives that inductor has fused.

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
        """Options to pass to ``torch.compile``, which also apply to the backward graph."""
        return get_fusion_options(self.count)

    def count(self, graph: torch.fx.Graph) -> None:
        """Count the fused and unfused collectives in a graph that inductor has finished fusing."""
        fused, unfused = get_fusion_targets()
        targets = [node.target for node in graph.nodes]
        self.fused += sum(target in fused for target in targets)
        self.collectives += sum(target in (*fused, *unfused) for target in targets)
        self._has_backward |= is_backward_graph(graph)

    def report(self) -> None:
        """Log how many collectives inductor has fused, or warn if it has fused none.

        This happens only once, when the forward and backward graphs have been compiled, and only on global rank 0.
        """
        if self._is_reported or not self._has_backward:
            return
        self._is_reported = True
        if dist.get_rank() != 0:
            return
        if self.fused:
            logger.info("Asynchronous tensor parallel: fused %d of %d collectives.", self.fused, self.collectives)
        else:
            logger.warning(
                "enable_async_tensor_parallel=True: fused 0 of %d collectives of the compiled layers, so none of the"
                " collectives overlaps with a matrix product. Inductor only fuses collectives directly before or after"
                " projections without bias.",
                self.collectives,
            )
