"""What a plan says: memory, traffic and time of ranks, as plain values."""

import itertools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from lightning_fsdp2.plan.devices import Device
from lightning_fsdp2.plan.recorder import (
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER_STATES,
    WEIGHTS,
    Collective,
    Operation,
    Recording,
)
from lightning_fsdp2.plan.roofline import StepTime, get_seconds, get_step_time

_OFFLOADED = (WEIGHTS, GRADIENTS, OPTIMIZER_STATES)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank sends by one kind of collective over one axis of the mesh, in an optimizer step."""

    kind: str
    axis: str
    """Of the mesh; ``"other"`` for a group of the module's own."""

    ranks: int
    nodes: int
    calls: int
    bytes: int
    """Of the whole tensors: behind an all-gather, before a reduce-scatter."""

    seconds: float
    """At the bandwidth of the slowest link, one after the other."""

    overlaps: bool
    """Whether it can run beside operations."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A change of the memory in use."""

    seconds: float
    """Since the begin of the step, if nothing overlaps."""

    bytes: dict[str, int]
    """By category."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """An optimizer step of one rank."""

    rank: int
    peak: dict[str, int]
    """Bytes by category when the most are in use."""

    peak_at: str
    """The part of the step in which that is."""

    flops: int
    """Of products and attention, with what is computed again."""

    time: StepTime
    traffic: list[Traffic]
    phases: list[tuple[float, str]]
    """Seconds at which ``"forward"``, ``"backward"`` and ``"optimizer"`` begin, as in the timeline."""

    timeline: list[Moment] = field(repr=False)
    """Thinned out; the peak is in it."""

    @property
    def peak_bytes(self) -> int:
        """All categories together."""
        return sum(self.peak.values())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an optimizer step trains on."""

    shapes: dict[str, tuple[int, ...]]
    """Of the tensors of a micro-batch of one data parallel rank."""

    accumulation: int
    """Micro-batches of a data parallel rank."""

    samples: int
    """Of all ranks: the global batch."""

    tokens: int | None
    """Of all ranks; None for batches without ``input_ids``."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to set otherwise, with what it gives."""

    name: str
    """Such as ``activation_checkpointing='full'``."""

    config: dict[str, Any]
    """What to add to the YAML of the run."""

    peak_bytes: int
    """Of the run so planned."""

    shortest: float
    """Seconds of its step, which has as many samples as before."""

    longest: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on devices that need not be there."""

    model: str
    strategy: str
    mesh: dict[str, int]
    precision: dict[str, str]
    parameters: int
    trained_parameters: int
    placements: list[dict[str, Any]]
    """Parameters that are placed alike: ``placement`` by axis, ``parameters``, and ``bytes`` on rank 0."""

    device: Device
    peak_flops: float
    """Of a device, in the dtype of compute."""

    nodes: int
    batch: Batch
    ranks: list[RankPlan]
    budget: int
    """Bytes that the peak may take of the device's memory; the rest is for what is not modelled."""

    model_flops: float | None
    """Of a step of all ranks, by the formula of :class:`~lightning_fsdp2.callbacks.Throughput`; None if not known."""

    changes: list[Change]
    """What would help, if the peak is above the budget."""

    notes: list[str]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget on all ranks that were planned."""
        return self.peak_bytes <= self.budget

    @property
    def shortest(self) -> float:
        """Seconds of a step of the slowest rank, if all overlaps that can."""
        return max(rank.time.shortest for rank in self.ranks)

    @property
    def longest(self) -> float:
        """The same if nothing does."""
        return max(rank.time.longest for rank in self.ranks)

    @property
    def utilisation(self) -> float | None:
        """The ceiling of model FLOPs utilisation: that of the shortest step.

        As :class:`~lightning_fsdp2.callbacks.Throughput` counts, which takes all products of attention. Those that a
        causal mask leaves out are not computed, so that with long sequences it may be above 1.
        """
        if self.model_flops is None:
            return None
        return self.model_flops / self.shortest / self.world_size / self.peak_flops

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; sizes in bytes, times in seconds."""
        values = asdict(self)
        for rank, plain in zip(self.ranks, values["ranks"], strict=True):
            plain["peak_bytes"] = rank.peak_bytes
        return {
            **values,
            "world_size": self.world_size,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "step_seconds": [self.shortest, self.longest],
            "model_flops_utilisation_at_most": self.utilisation,
        }


def build_rank_plan(rank: int, recording: Recording, device: Device, *, overlapped_axes: Collection[str]) -> RankPlan:
    """Add up what one rank was seen to do.

    Args:
        rank: Its number.
        recording: Of its step.
        device: What it is.
        overlapped_axes: As for :func:`~lightning_fsdp2.plan.roofline.get_step_time`.
    """
    peak, moment = _find_peak(recording)
    starts = [0.0, *itertools.accumulate(get_seconds(operation, device) for operation in recording.operations)]
    return RankPlan(
        rank=rank,
        peak=peak,
        peak_at=[name for begin, name in recording.marks if begin <= moment][-1],
        flops=recording.flops,
        time=get_step_time(recording.operations, device, overlapped_axes=overlapped_axes),
        traffic=_add_up_traffic(recording, device, overlapped_axes),
        phases=[(starts[begin], name) for begin, name in recording.phases],
        timeline=_build_timeline(recording, starts),
    )


def without_offloaded(recording: Recording) -> Recording:
    """Leave out what FSDP2's ``CPUOffloadPolicy`` keeps in host memory, and the optimizer, which runs there.

    A CPU is the only device that can be simulated without another one's driver, and there the recipe leaves the policy
    out: the shards are in host memory anyway.
    """
    end = next(moment for moment, name in recording.phases if name == "optimizer")
    kept = [change for change in recording.changes if change[1] not in _OFFLOADED and change[0] < end]
    marks, phases = ([part for part in parts if part[0] < end] for parts in (recording.marks, recording.phases))
    return Recording(recording.operations[:end], kept, marks, phases)


def _find_peak(recording: Recording) -> tuple[dict[str, int], int]:
    """The bytes by category when the most are in use, and the moment."""
    current: Counter[str] = Counter()
    total, highest, peak, at = 0, 0, current.copy(), 0
    for moment, category, change in recording.changes:
        current[category] += change
        total += change
        if total > highest:
            highest, peak, at = total, current.copy(), moment
    return {category: peak[category] for category in CATEGORIES}, at


def _add_up_traffic(recording: Recording, device: Device, overlapped_axes: Collection[str]) -> list[Traffic]:
    """By kind and axis, the slowest first."""
    calls: dict[Any, list[Operation]] = {}
    for operation in recording.operations:
        if (call := operation.collective) is not None:
            overlaps = call.is_of_unit or call.axis in overlapped_axes
            calls.setdefault((call.kind, call.axis, call.group.ranks, overlaps), []).append(operation)
    traffic = [
        Traffic(
            kind=kind,
            axis=axis,
            ranks=len(ranks),
            nodes=len({rank // device.per_node for rank in ranks}),
            calls=sum(operation.times for operation in operations),
            bytes=sum(cast(Collective, operation.collective).bytes * operation.times for operation in operations),
            seconds=sum(get_seconds(operation, device) * operation.times for operation in operations),
            overlaps=overlaps,
        )
        for (kind, axis, ranks, overlaps), operations in calls.items()
    ]
    return sorted(traffic, key=lambda entry: entry.seconds, reverse=True)


def _build_timeline(recording: Recording, starts: list[float], samples: int = 500) -> list[Moment]:
    """The highest of each of ``samples`` stretches of the step; of micro-batches that are alike, one."""
    current: Counter[str] = Counter()
    highest: dict[int, tuple[int, Moment]] = {}
    for moment, category, change in recording.changes:
        current[category] += change
        stretch, total = int(samples * starts[moment] / (starts[-1] or 1)), current.total()
        if stretch not in highest or total > highest[stretch][0]:
            bytes_now = {name: current[name] for name in CATEGORIES}
            highest[stretch] = total, Moment(seconds=starts[moment], bytes=bytes_now)
    return [moment for _, moment in highest.values()]
