"""How long a step takes at the least: as long as its slowest resource, at the rates of the data sheet.

The roofline model (https://doi.org/10.1145/1498765.1498785): an operation takes as long as its products at the peak
rate, or as its reads and writes at the memory's, whichever is longer. A collective takes as long as a ring needs for
its bytes over the slowest link of its group, latency left out.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

import torch

from lightning_fsdp2.mesh import DP_REPLICATE
from lightning_fsdp2.plan.devices import Device
from lightning_fsdp2.plan.recorder import Collective, Group, Operation

_ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2, "broadcast": 1}
"""How often the bytes of a collective go around a ring: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on one rank."""

    compute: float
    """Of all operations, one after the other."""

    exposed: float
    """Of collectives that the next operation waits for: those of tensor and context parallelism."""

    overlappable: float
    """Of collectives that can run beside operations: gathering weights ahead, and reducing gradients behind."""

    @property
    def shortest(self) -> float:
        """If all that can overlap does."""
        return max(self.compute + self.exposed, self.overlappable)

    @property
    def longest(self) -> float:
        """If nothing does."""
        return self.compute + self.exposed + self.overlappable


def get_step_time(
    operations: Iterable[Operation], device: Device, *, overlapped_axes: Collection[str] = (DP_REPLICATE,)
) -> StepTime:
    """Add up the operations of a step.

    Args:
        operations: Of one rank.
        device: Of every rank.
        overlapped_axes: Those of the mesh whose collectives run beside operations, as those of FSDP2's units do.
    """
    compute, exposed, overlappable = 0.0, 0.0, 0.0
    for operation in operations:
        seconds = get_seconds(operation, device) * operation.times
        if operation.collective is None:
            compute += seconds
        elif operation.collective.is_of_unit or operation.collective.axis in overlapped_axes:
            overlappable += seconds
        else:
            exposed += seconds
    return StepTime(compute=compute, exposed=exposed, overlappable=overlappable)


def get_seconds(operation: Operation, device: Device) -> float:
    """Of one call."""
    if operation.collective is not None:
        return _get_collective_seconds(operation.collective, device)
    products = operation.flops / _get_peak(device, operation.dtype) if operation.flops else 0.0
    return max(products, operation.bytes / device.memory_bandwidth)


@cache
def get_bandwidth(group: Group, device: Device) -> float:
    """Bytes per second from one rank of ``group`` to the next.

    Over several nodes a ring goes through as many network adapters at once as a node has ranks of the group.
    """
    nodes = {rank // device.per_node for rank in group.ranks}
    if len(nodes) == 1:
        return device.link_bandwidth
    return min(device.link_bandwidth, device.network_bandwidth * len(group.ranks) / len(nodes))


def _get_collective_seconds(collective: Collective, device: Device) -> float:
    ranks = len(collective.group.ranks)
    if ranks < 2:
        return 0.0
    share = (ranks - 1) / ranks
    return _ROUNDS.get(collective.kind, 1) * collective.bytes * share / get_bandwidth(collective.group, device)


@cache
def _get_peak(device: Device, dtype: torch.dtype | None) -> float:
    return device.get_peak_flops(dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32)
