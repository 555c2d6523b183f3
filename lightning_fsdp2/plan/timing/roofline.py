"""Step times: a lower bound at the rates of the data sheet, and an estimate at the rates that kernels reach.

This is the roofline model (https://doi.org/10.1145/1498765.1498785). An operation takes the time for its FLOPs at the
peak rate, or the time for its reads and writes at the memory bandwidth, whichever is longer. A collective takes the
time for its bytes to go around a ring over the slowest link of its group, without latency. In an all-to-all, each rank
sends different bytes to each of the others, so what leaves the node goes through the rank's own network adapter. With
the rates of the data sheet, the result is a lower bound. With the rates of
:mod:`~lightning_fsdp2.plan.timing.rates`, it is an estimate.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

import torch

from lightning_fsdp2.plan.simulation.recorder import TRANSFERS, Collective, Group, Operation
from lightning_fsdp2.plan.timing.devices import Device
from lightning_fsdp2.sizes import DP_REPLICATE

_ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "broadcast": 1}
"""Number of times that a collective's bytes go around a ring. An all-reduce is a reduce-scatter and an all-gather."""

_TENSOR_CORE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time that a step takes on one rank, in seconds."""

    compute: float
    """Seconds of all operations except collectives, one after the other."""

    exposed: float
    """Seconds of collectives that the next operation waits for: those of tensor and context parallelism."""

    overlappable: float
    """Seconds of collectives that can overlap with computation: all-gathers of weights, reductions of gradients."""

    waiting: float = 0.0
    """Seconds in which a pipeline parallel rank has nothing to compute, because it waits for other ranks."""

    @property
    def shortest(self) -> float:
        """Step time in seconds if all collectives that can overlap with computation do so."""
        return max(self.compute + self.exposed, self.overlappable) + self.waiting

    @property
    def longest(self) -> float:
        """Step time in seconds if nothing overlaps."""
        return self.compute + self.exposed + self.overlappable + self.waiting


def get_step_time(
    operations: Iterable[Operation],
    device: Device,
    *,
    overlapped_axes: Collection[str] = (DP_REPLICATE,),
    as_reached: bool = False,
) -> StepTime:
    """Add up the times of all operations of a step.

    Transfers between pipeline parallel ranks do not count, because their time is part of the time that ranks wait.

    Args:
        operations: Operations of one rank.
        device: Device of every rank.
        overlapped_axes: Mesh axes whose collectives overlap with computation. FSDP2's own collectives always overlap.
        as_reached: Whether to use the rates that kernels reach instead of those of the data sheet.
    """
    compute, exposed, overlappable = 0.0, 0.0, 0.0
    for operation in operations:
        seconds = get_seconds(operation, device, as_reached=as_reached) * operation.times
        if operation.collective is None:
            compute += seconds
        elif operation.collective.kind in TRANSFERS:
            continue
        elif operation.collective.is_of_unit or operation.collective.axis in overlapped_axes:
            overlappable += seconds
        else:
            exposed += seconds
    return StepTime(compute=compute, exposed=exposed, overlappable=overlappable)


def get_seconds(operation: Operation, device: Device, *, as_reached: bool = False) -> float:
    """Return the time of one call in seconds, at the rates of the data sheet or at those that kernels reach."""
    if operation.collective is not None:
        seconds = _get_collective_seconds(operation.collective, device)
        return seconds / device.rates.links if as_reached else seconds
    bandwidth = device.memory_bandwidth * (device.rates.memory if as_reached else 1)
    seconds = operation.bytes / bandwidth
    if operation.flops:  # a cast from a dtype needs no peak for it
        rate = _get_peak(device, operation.dtype) * (_get_share(operation, device) if as_reached else 1)
        seconds = max(seconds, operation.flops / rate)
    return seconds


def _get_share(operation: Operation, device: Device) -> float:
    """Return the fraction of the device's peak rate that the matrix products of an operation reach."""
    if (attention := operation.attention) is None:
        return device.rates.products
    reached = device.rates.get_attention(
        head_size=attention.head_size,
        length=attention.length,
        is_causal=attention.is_causal,
        is_backward=attention.is_backward,
    )
    return reached / _get_peak(device, torch.bfloat16)  # the published rates are for 16-bit dtypes


@cache
def get_bandwidth(group: Group, device: Device) -> float:
    """Return the bandwidth from one rank of ``group`` to the next, in bytes per second.

    A ring across nodes uses several network adapters at once: one for each rank of the group on a node.
    """
    nodes = _count_nodes(group, device)
    if nodes == 1:
        return device.link_bandwidth
    return min(device.link_bandwidth, device.network_bandwidth * len(group.ranks) / nodes)


def _get_collective_seconds(collective: Collective, device: Device) -> float:
    ranks = len(collective.group.ranks)
    if ranks < 2:
        return 0.0
    if collective.kind in TRANSFERS:
        return get_transfer_seconds(collective.bytes, collective.group, device)
    if collective.kind == "all-to-all":
        return _get_all_to_all_seconds(collective, device)
    share = (ranks - 1) / ranks
    return _ROUNDS.get(collective.kind, 1) * collective.bytes * share / get_bandwidth(collective.group, device)


def _get_all_to_all_seconds(collective: Collective, device: Device) -> float:
    """Return the time of an all-to-all in which each rank sends an equal part of its bytes to every rank."""
    ranks = len(collective.group.ranks)
    on_node = ranks / _count_nodes(collective.group, device)
    seconds_per_byte = max((on_node - 1) / device.link_bandwidth, (ranks - on_node) / device.network_bandwidth)
    return collective.bytes / ranks * seconds_per_byte


def get_transfer_seconds(size: int, group: Group, device: Device) -> float:
    """Return the time in which one rank of ``group`` sends ``size`` bytes to the next, which may be on another node."""
    return size / (device.link_bandwidth if _count_nodes(group, device) == 1 else device.network_bandwidth)


def _count_nodes(group: Group, device: Device) -> int:
    return len({rank // device.per_node for rank in group.ranks})


@cache
def _get_peak(device: Device, dtype: torch.dtype | None) -> float:
    return device.get_peak_flops(dtype if dtype in _TENSOR_CORE_DTYPES else torch.float32)
