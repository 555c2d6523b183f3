"""What a plan says: memory, traffic and time of ranks, as plain values."""

import itertools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from lightning_fsdp2.plan.simulation.recorder import (
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER_STATES,
    WEIGHTS,
    Collective,
    Operation,
    Recording,
)
from lightning_fsdp2.plan.simulation.reserved import Reserved, estimate_reserved
from lightning_fsdp2.plan.timing.devices import Device
from lightning_fsdp2.plan.timing.roofline import StepTime, get_seconds, get_step_time

Verdict = Literal["fits", "tight", "does not fit"]

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
    """By what NCCL reaches of the slowest link, one after the other."""

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

    reserved: Reserved
    """What the process holds of its device, with the rest of segments and what libraries take."""

    flops: int
    """Of products and attention, with what is computed again."""

    time: StepTime
    """By the data sheet: a bound."""

    reached: StepTime
    """By what kernels reach of it: an estimate."""

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

    reserved: Reserved
    at_least: float
    """Seconds of its step, which has as many samples as before: a bound."""

    estimate: float
    """The same by what kernels reach."""


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
    model_flops: float | None
    """Of a step of all ranks, by the formula of :class:`~lightning_fsdp2.callbacks.Throughput`; None if not known."""

    changes: list[Change]
    """What would help, unless it fits."""

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
    def reserved(self) -> Reserved:
        """What a process holds, on the rank that needs most."""
        return max((rank.reserved for rank in self.ranks), key=lambda reserved: reserved.most)

    @property
    def verdict(self) -> Verdict:
        """Whether the run fits on all ranks that were planned."""
        return get_verdict(self.peak_bytes, self.reserved, self.device)

    @property
    def at_least(self) -> float:
        """Seconds of a step of the slowest rank, by the data sheet and if all overlaps that can: a bound."""
        return max(rank.time.shortest for rank in self.ranks)

    @property
    def estimate(self) -> float:
        """Seconds of a step of the slowest rank, by what kernels reach and if nothing overlaps.

        A collective beside operations takes multiprocessors and bandwidth from them.
        """
        return max(rank.reached.longest for rank in self.ranks)

    def get_utilisation(self, seconds: float) -> float | None:
        """Return the model FLOPs utilisation of a step that takes ``seconds``; None if the model's FLOPs are not known.

        As :class:`~lightning_fsdp2.callbacks.Throughput` counts, which takes all products of attention. Those that a
        causal mask leaves out are not computed, so that with long sequences it may be above 1.
        """
        if self.model_flops is None:
            return None
        return self.model_flops / seconds / self.world_size / self.peak_flops

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; sizes in bytes, times in seconds."""
        values = asdict(self)
        for rank, plain in zip(self.ranks, values["ranks"], strict=True):
            plain["peak_bytes"] = rank.peak_bytes
        return {
            **values,
            "world_size": self.world_size,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": [self.reserved.least, self.reserved.most],
            "verdict": self.verdict,
            "step_seconds": {"at_least": self.at_least, "estimate": self.estimate},
            "model_flops_utilisation": {
                "at_most": self.get_utilisation(self.at_least),
                "estimate": self.get_utilisation(self.estimate),
            },
        }


def get_verdict(allocated: int, reserved: Reserved, device: Device) -> Verdict:
    """Say whether a run fits: ``"tight"`` if what it allocates does, and all that its process may hold does not."""
    if reserved.most <= device.memory:
        return "fits"
    return "tight" if allocated <= device.memory else "does not fit"


def build_rank_plan(rank: int, recording: Recording, device: Device, *, overlapped_axes: Collection[str]) -> RankPlan:
    """Add up what one rank was seen to do.

    Args:
        rank: Its number.
        recording: Of its step.
        device: What it is.
        overlapped_axes: As for :func:`~lightning_fsdp2.plan.timing.roofline.get_step_time`.
    """
    peak, moment = _find_peak(recording)
    seconds = (get_seconds(operation, device, as_reached=True) for operation in recording.operations)
    starts = [0.0, *itertools.accumulate(seconds)]
    return RankPlan(
        rank=rank,
        peak=peak,
        reserved=estimate_reserved(recording),
        peak_at=[name for begin, name in recording.marks if begin <= moment][-1],
        flops=recording.flops,
        time=get_step_time(recording.operations, device, overlapped_axes=overlapped_axes),
        reached=get_step_time(recording.operations, device, overlapped_axes=overlapped_axes, as_reached=True),
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
    kept = [change for change in recording.changes if change.category not in _OFFLOADED and change.moment < end]
    marks, phases = ([part for part in parts if part[0] < end] for parts in (recording.marks, recording.phases))
    return Recording(recording.operations[:end], kept, marks, phases)


def _find_peak(recording: Recording) -> tuple[dict[str, int], int]:
    """The bytes by category when the most are in use, and the moment."""
    current: Counter[str] = Counter()
    total, highest, peak, at = 0, 0, current.copy(), 0
    for moment, category, size, _ in recording.changes:
        current[category] += size
        total += size
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
            seconds=sum(get_seconds(operation, device, as_reached=True) * operation.times for operation in operations),
            overlaps=overlaps,
        )
        for (kind, axis, ranks, overlaps), operations in calls.items()
    ]
    return sorted(traffic, key=lambda entry: entry.seconds, reverse=True)


def _build_timeline(recording: Recording, starts: list[float], samples: int = 500) -> list[Moment]:
    """The highest of each of ``samples`` stretches of the step; of micro-batches that are alike, one."""
    current: Counter[str] = Counter()
    highest: dict[int, tuple[int, Moment]] = {}
    for moment, category, size, _ in recording.changes:
        current[category] += size
        stretch, total = int(samples * starts[moment] / (starts[-1] or 1)), current.total()
        if stretch not in highest or total > highest[stretch][0]:
            bytes_now = {name: current[name] for name in CATEGORIES}
            highest[stretch] = total, Moment(seconds=starts[moment], bytes=bytes_now)
    return [moment for _, moment in highest.values()]
