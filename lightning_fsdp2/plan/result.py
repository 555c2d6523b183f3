"""The contents of a plan: the memory, the traffic and the step time of each rank."""

import itertools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

from lightning_fsdp2.parallel.layers.float8_conversion import Conversion
from lightning_fsdp2.plan.pipeline import ActionTime, Pipeline, group_operations
from lightning_fsdp2.plan.simulation.recorder import (
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER_STATES,
    TRANSFERS,
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
    """Traffic of a rank in one optimizer step, caused by one kind of collective over one mesh axis."""

    kind: str
    axis: str
    """Axis of the mesh; ``"other"`` for a group that the module made itself."""

    ranks: int
    nodes: int
    calls: int
    bytes: int
    """Size of the whole tensors: the result of an all-gather, the input of a reduce-scatter."""

    seconds: float
    """Total time of all calls, at the rate that NCCL reaches on the slowest link."""

    overlaps: bool
    """Whether the collectives can overlap with computation."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The memory in use at one moment of the step."""

    seconds: float
    """Time since the start of the step, if nothing overlaps."""

    bytes: dict[str, int]
    """Bytes in use, by category."""


@dataclass(frozen=True, kw_only=True)
class UnevenMemory:
    """Memory of a rank at its peak, if its experts get more tokens than at even routing."""

    load: int
    """Number of tokens that the rank's experts get in every layer, as a multiple of the number at even routing."""

    peak_bytes: int
    peak_at: str
    reserved: Reserved


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The memory, the traffic and the time that one rank needs for an optimizer step."""

    rank: int
    peak: dict[str, int]
    """Bytes by category at the peak of memory use."""

    peak_at: str
    """Part of the step in which the peak occurs."""

    reserved: Reserved
    """Device memory that the process holds, including unused parts of segments and the memory of libraries."""

    flops: int
    """Floating-point operations of matrix products and attention, including recomputation."""

    time: StepTime
    """Lower bound of the step time, at the rates of the data sheet."""

    reached: StepTime
    """Estimate of the step time, at the rates that kernels reach."""

    traffic: list[Traffic]
    phases: list[tuple[float, str]]
    """Seconds at which ``"forward"``, ``"backward"`` and ``"optimizer"`` begin, counted as in ``timeline``."""

    timeline: list[Moment] = field(repr=False)
    """Memory over the step, at a limited number of moments that include the peak."""

    actions: list[ActionTime] = field(default_factory=list)
    """Times of the forwards and backwards of the rank's stages; empty without pipeline parallelism."""

    uneven: UnevenMemory | None = None
    """Memory if this rank's experts get more tokens than at even routing; None without expert parallelism. All other
    values assume even routing, in which the experts of all ranks get the same number of tokens."""

    @property
    def peak_bytes(self) -> int:
        """Total bytes of all categories at the peak."""
        return sum(self.peak.values())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Shapes and size of the data that an optimizer step trains on."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of the tensors of a batch of one data parallel rank."""

    accumulation: int
    """Number of batches of a data parallel rank. Without a pipeline, which divides them, batches are micro-batches."""

    samples: int
    """Number of samples of all ranks: the global batch."""

    tokens: int | None
    """Number of tokens of all ranks; None for batches without ``input_ids``."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to the run's options, with the resulting memory and step time."""

    name: str
    """Description of the change, such as ``activation_checkpointing='full'``."""

    config: dict[str, Any]
    """Additions to the YAML of the run."""

    peak_bytes: int
    """Peak memory of the changed run in bytes."""

    reserved: Reserved
    verdict: Verdict
    at_least: float
    """Lower bound of the step time in seconds. The number of samples per step is unchanged."""

    estimate: float
    """Estimated step time in seconds, at the rates that kernels reach."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a run, computed without the devices of the run."""

    model: str
    strategy: str
    mesh: dict[str, int]
    expert_mesh: dict[str, int]
    """Axes of the mesh of experts, which has the same ranks as ``mesh``. Empty without expert parallelism."""

    precision: dict[str, str]
    parameters: int
    trained_parameters: int
    placements: list[dict[str, Any]]
    """Groups of parameters with the same placement. Each group has its ``placement`` by axis, its numbers of
    ``tensors`` and ``parameters``, and its ``bytes`` on rank 0."""

    device: Device
    peak_flops: float
    """Peak floating-point operations per second of a device in the compute dtype, or in that and float8."""

    nodes: int
    batch: Batch
    ranks: list[RankPlan]
    model_flops: float | None
    """FLOPs of a step on all ranks, by the formula of :class:`~lightning_fsdp2.callbacks.Throughput`, if known."""

    changes: list[Change]
    """Changes that would help; empty if the run fits."""

    notes: list[str]

    pipeline: Pipeline | None = None
    """Stages and micro-batches of pipeline parallelism; None without."""

    float8: Conversion | None = None
    """Linear layers that multiply in float8, and those that do not; None without float8."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes, on the rank that needs the most."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def reserved(self) -> Reserved:
        """Estimated peak of the device memory that the process holds, as a range, on the rank that needs the most."""
        return max((rank.reserved for rank in self.ranks), key=lambda reserved: reserved.most)

    @property
    def verdict(self) -> Verdict:
        """Verdict on whether the run fits into the memory of every planned rank; see :func:`get_verdict`."""
        return get_verdict(self.peak_bytes, self.reserved, self.device)

    @property
    def uneven(self) -> UnevenMemory | None:
        """Memory of the rank that needs the most if its experts get more tokens; None without expert parallelism."""
        uneven = [rank.uneven for rank in self.ranks if rank.uneven is not None]
        return max(uneven, key=lambda memory: memory.reserved.most, default=None)

    @property
    def at_least(self) -> float:
        """Lower bound of the step time in seconds, for the slowest rank, at data sheet rates and with full overlap."""
        return max(rank.time.shortest for rank in self.ranks)

    @property
    def estimate(self) -> float:
        """Estimated step time in seconds, for the slowest rank at the rates that kernels reach, without any overlap.

        Overlap is not counted, because a collective takes multiprocessors and memory bandwidth from the computation
        that runs at the same time.
        """
        return max(rank.reached.longest for rank in self.ranks)

    def get_utilisation(self, seconds: float) -> float | None:
        """Return the model FLOPs utilisation of a step that takes ``seconds``; None if the model's FLOPs are not known.

        FLOPs are counted as in :class:`~lightning_fsdp2.callbacks.Throughput`. The count includes the query-key pairs
        that a causal mask excludes. Kernels skip these pairs, so the result may be above 1 for long sequences.
        """
        if self.model_flops is None:
            return None
        return self.model_flops / seconds / self.world_size / self.peak_flops

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON, with sizes in bytes and times in seconds."""
        values = asdict(self)
        for rank, plain in zip(self.ranks, values["ranks"], strict=True):
            plain["peak_bytes"] = rank.peak_bytes
        if self.pipeline is not None:
            values["pipeline"] |= {"bubble": self.pipeline.bubble, "in_flight": self.pipeline.in_flight}
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
    """Return whether a run fits into the memory of ``device``.

    The run "fits" if the device has enough memory for the upper end of ``reserved``, the estimated range of the memory
    that the process holds. It is "tight" if there is only enough memory for the ``allocated`` bytes of its tensors.
    Otherwise it "does not fit".
    """
    if reserved.most <= device.memory:
        return "fits"
    return "tight" if allocated <= device.memory else "does not fit"


def build_rank_plan(rank: int, recording: Recording, device: Device, *, overlapped_axes: Collection[str]) -> RankPlan:
    """Build the plan of a rank from the recording of its step.

    Args:
        rank: Rank that the plan is for.
        recording: Recording of the rank's step.
        device: Device of the rank.
        overlapped_axes: See :func:`~lightning_fsdp2.plan.timing.roofline.get_step_time`.
    """
    peak, moment = _find_peak(recording)
    seconds = (get_seconds(operation, device, as_reached=True) for operation in recording.operations)
    starts = [0.0, *itertools.accumulate(seconds)]
    return RankPlan(
        rank=rank,
        peak=peak,
        reserved=estimate_reserved(recording),
        peak_at=_get_part(recording, moment),
        flops=recording.flops,
        time=get_step_time(recording.operations, device, overlapped_axes=overlapped_axes),
        reached=get_step_time(recording.operations, device, overlapped_axes=overlapped_axes, as_reached=True),
        traffic=_add_up_traffic(recording, device, overlapped_axes),
        phases=[(starts[begin], name) for begin, name in recording.phases],
        timeline=_build_timeline(recording, starts),
        actions=[action.get_time(device, overlapped_axes=overlapped_axes) for action in group_operations(recording)[0]],
    )


def add_waiting(ranks: list[RankPlan], pipeline: Pipeline, *, ranks_per_stage: int, batches: int) -> list[RankPlan]:
    """Return the plans of ranks with the time that each of them waits for the other ranks of its pipeline.

    Args:
        ranks: Plans of ranks, with the first and the last pipeline rank and one between them among them.
        pipeline: The pipeline.
        ranks_per_stage: Number of ranks that hold the same layers.
        batches: Number of batches that run through the pipeline in a step.
    """
    times = [time for rank in ranks for time in rank.actions]
    sends = [entry.seconds / entry.calls for rank in ranks for entry in rank.traffic if entry.kind == "send"]
    _, bound = pipeline.compute_waiting({(time.stage, time.is_backward): time.at_least for time in times})
    _, estimate = pipeline.compute_waiting(
        {(time.stage, time.is_backward): time.estimate for time in times}, transfer=max(sends, default=0.0)
    )
    return [
        replace(
            rank,
            time=replace(rank.time, waiting=batches * bound[rank.rank // ranks_per_stage]),
            reached=replace(rank.reached, waiting=batches * estimate[rank.rank // ranks_per_stage]),
        )
        for rank in ranks
    ]


def build_uneven_memory(load: int, recording: Recording) -> UnevenMemory:
    """Return a rank's memory in a recorded step in which its experts get ``load`` times as many tokens as usual."""
    peak, moment = _find_peak(recording)
    return UnevenMemory(
        load=load,
        peak_bytes=sum(peak.values()),
        peak_at=_get_part(recording, moment),
        reserved=estimate_reserved(recording),
    )


def without_offloaded(recording: Recording) -> Recording:
    """Return ``recording`` without the tensors and operations that FSDP2's ``CPUOffloadPolicy`` moves to the host.

    These are the weights, gradients and optimizer states, and the optimizer's operations. A recording contains them
    even with this policy, because the simulated devices are CPUs. On a CPU, sharding ignores the policy, since shards
    are in host memory anyway.
    """
    end = next(moment for moment, name in recording.phases if name == "optimizer")
    kept = [change for change in recording.changes if change.category not in _OFFLOADED and change.moment < end]
    marks, phases = ([part for part in parts if part[0] < end] for parts in (recording.marks, recording.phases))
    return Recording(recording.operations[:end], kept, marks, phases, recording.actions)


def _find_peak(recording: Recording) -> tuple[dict[str, int], int]:
    """Return the bytes by category at the peak of memory use, and the moment of the peak."""
    current: Counter[str] = Counter()
    total, highest, peak, at = 0, 0, current.copy(), 0
    for moment, category, size, _ in recording.changes:
        current[category] += size
        total += size
        if total > highest:
            highest, peak, at = total, current.copy(), moment
    return {category: peak[category] for category in CATEGORIES}, at


def _get_part(recording: Recording, moment: int) -> str:
    """Return the name of the part of the step that ``moment`` is in."""
    return [name for begin, name in recording.marks if begin <= moment][-1]


def _add_up_traffic(recording: Recording, device: Device, overlapped_axes: Collection[str]) -> list[Traffic]:
    """Add up the collectives by kind and axis, and sort the sums by time, slowest first."""
    calls: dict[Any, list[Operation]] = {}
    for operation in recording.operations:
        if (call := operation.collective) is not None:
            overlaps = call.is_of_unit or call.axis in overlapped_axes or call.kind in TRANSFERS
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
    """Divide the step into ``samples`` intervals of equal length, and return the moment of highest memory in each.

    If several micro-batches run the same operations, the step contains only one of them.
    """
    current: Counter[str] = Counter()
    highest: dict[int, tuple[int, Moment]] = {}
    for moment, category, size, _ in recording.changes:
        current[category] += size
        stretch, total = int(samples * starts[moment] / (starts[-1] or 1)), current.total()
        if stretch not in highest or total > highest[stretch][0]:
            bytes_now = {name: current[name] for name in CATEGORIES}
            highest[stretch] = total, Moment(seconds=starts[moment], bytes=bytes_now)
    return [moment for _, moment in highest.values()]
