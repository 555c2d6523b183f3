"""Arithmetic of pipelines: which ranks to simulate, and how long ranks wait for each other."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from lightning_fsdp2.parallel.pipeline.schedule import (
    Action,
    Kind,
    build_orders,
    compute_bubble,
    count_in_flight,
    run_in_time,
)
from lightning_fsdp2.plan.simulation.recorder import Operation, Recording
from lightning_fsdp2.plan.simulation.reserved import Reserved
from lightning_fsdp2.plan.simulation.stages import Boundary
from lightning_fsdp2.plan.timing.devices import Device
from lightning_fsdp2.plan.timing.roofline import get_step_time


@dataclass(frozen=True, kw_only=True)
class ActionTime:
    """Average time of the forwards, or the backwards, of a stage. Each of them computes one micro-batch."""

    stage: int
    is_backward: bool

    at_least: float
    """Lower bound in seconds, at the rates of the data sheet and with all possible overlap."""

    estimate: float
    """Estimate in seconds, at the rates that kernels reach and without any overlap."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline of stages that compute the micro-batches of each batch."""

    schedule: str
    ranks: int
    stages_per_rank: int

    micro_batches: int
    """Number of micro-batches of a batch."""

    rows: int
    """Number of samples of a micro-batch."""

    layers: tuple[int, ...]
    """Number of layers of each stage."""

    @cached_property
    def orders(self) -> list[list[Action]]:
        """Actions of each pipeline rank."""
        return build_orders(
            self.schedule,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            stages_per_rank=self.stages_per_rank,
        )

    @cached_property
    def bubble(self) -> float:
        """Fraction of the time in which ranks wait for each other, if all stages take equally long."""
        return compute_bubble(self.orders)

    @cached_property
    def in_flight(self) -> list[int]:
        """Largest number of micro-batches whose activations each rank keeps, counted once for each of its stages."""
        return [count_in_flight(order) for order in self.orders]

    def get_stages(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank."""
        return list(range(rank, len(self.layers), self.ranks))

    def choose_ranks(self) -> list[int]:
        """Return the pipeline ranks whose simulation shows the most: the first, the last, and one between them.

        The first rank has the embedding, and the last rank has the head and the loss. Of the others, the one that keeps
        the activations of the most layers is chosen.
        """
        kept = [
            self.in_flight[rank] * sum(self.layers[stage] for stage in self.get_stages(rank))
            for rank in range(self.ranks)
        ]
        inner = range(1, self.ranks - 1)
        middle = [max(inner, key=lambda rank: kept[rank])] if inner else []
        return sorted({0, *middle, self.ranks - 1})

    def compute_waiting(
        self, seconds: Mapping[tuple[int, bool], float], *, transfer: float = 0.0
    ) -> tuple[float, list[float]]:
        """Return how many seconds a batch takes, and for how many of them each rank waits for other ranks.

        Args:
            seconds: Times of a forward (False) and a backward (True) of some of the stages. Times of the other stages
                are derived from the nearest stage between the first and the last, in proportion to the number of
                layers.
            transfer: Seconds in which a tensor gets from one rank to the next.
        """

        def get_duration(action: Action) -> float:
            known = self._find_alike(action.stage, {stage for stage, _ in seconds})
            return seconds[known, action.kind is Kind.BACKWARD] * self.layers[action.stage] / self.layers[known]

        events = run_in_time(self.orders, get_duration, transfer=transfer)
        busy = [0.0] * self.ranks
        for event in events:
            busy[event.rank] += event.end - event.start
        return events[-1].end, [events[-1].end - time for time in busy]

    def _find_alike(self, stage: int, known: Collection[int]) -> int:
        if stage in known:
            return stage
        inner = set(known) - {0, len(self.layers) - 1}
        return min(sorted(inner or known), key=lambda other: abs(other - stage))


@dataclass(frozen=True, kw_only=True)
class ActionOperations:
    """Operations of the forwards, or the backwards, of a stage in a step."""

    stage: int
    is_backward: bool
    runs: int
    """Number of forwards or backwards."""

    operations: list[Operation]
    """Operations of all of them."""

    def get_time(self, device: Device, *, overlapped_axes: Collection[str]) -> ActionTime:
        """Return the average time; see :func:`~lightning_fsdp2.plan.timing.roofline.get_step_time`."""
        bound, reached = (
            get_step_time(self.operations, device, overlapped_axes=overlapped_axes, as_reached=as_reached)
            for as_reached in (False, True)
        )
        return ActionTime(
            stage=self.stage,
            is_backward=self.is_backward,
            at_least=(bound.compute + bound.exposed) / self.runs,
            estimate=reached.longest / self.runs,
        )


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """Summary of a step of a pipeline rank: its memory at the peak, and its operations without their order."""

    peak_bytes: int
    reserved: Reserved
    actions: list[ActionOperations]
    rest: list[Operation]
    """Operations that belong to no forward or backward of a stage."""

    layers: tuple[int, ...]
    """Number of layers of each stage of the pipeline."""

    boundary: Boundary | None
    num_experts: int
    """Number of experts of each mixture, or the largest number that divides all of them; 0 for dense models."""


def group_operations(recording: Recording) -> tuple[list[ActionOperations], list[Operation]]:
    """Return the operations of the forwards and backwards of a pipeline rank's stages, and all other operations."""
    groups: dict[tuple[int, bool], list[Operation]] = defaultdict(list)
    runs: Counter[tuple[int, bool]] = Counter()
    rest: list[Operation] = []
    done = 0
    for begin, end, action in recording.actions:
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            key = action.stage, action.kind is Kind.BACKWARD
            groups[key] += recording.operations[begin:end]
            runs[key] += recording.operations[begin].times
            rest += recording.operations[done:begin]
            done = end
    rest += recording.operations[done:]
    return [
        ActionOperations(stage=key[0], is_backward=key[1], runs=runs[key], operations=operations)
        for key, operations in sorted(groups.items())
    ], rest
