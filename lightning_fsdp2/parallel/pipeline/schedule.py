"""Pipeline schedules: the order in which each rank computes its stages and exchanges tensors with its neighbours.

Stages are numbered along the model, from 0. Stage ``s`` runs on pipeline rank ``s % ranks``, so a rank with several
stages holds every ``ranks``-th one.

The schedules are GPipe (https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/2006.09503) and interleaved 1F1B
(https://arxiv.org/abs/2104.04473). 1F1B is not taken from torch, because torch 2.13 starts it on the last rank with the
second micro-batch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, chain
from math import gcd
from typing import get_args

from lightning_fsdp2.config import PipelineSchedule, check_pipeline_schedule

SCHEDULES = get_args(PipelineSchedule)


class Kind(Enum):
    """Kind of an action."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_FORWARD = "send_forward"
    """Sends the output of a stage to the next stage."""
    RECEIVE_FORWARD = "receive_forward"
    """Receives the input of a stage from the previous stage."""
    SEND_BACKWARD = "send_backward"
    """Sends the gradient of a stage's input to the previous stage."""
    RECEIVE_BACKWARD = "receive_backward"
    """Receives the gradient of a stage's output from the next stage."""


@dataclass(frozen=True)
class Action:
    """Computation or transfer of a rank, for one stage and one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Event:
    """A forward or backward of a schedule, and when it runs."""

    rank: int
    action: Action
    start: float
    end: float


_DURATIONS = {Kind.FORWARD: 1, Kind.BACKWARD: 2}
"""Durations in unit time."""
_IN_FLIGHT = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
_TRANSFERS = {
    Kind.FORWARD: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, 1),
    Kind.BACKWARD: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, -1),
}
"""For each computation: how its result is sent and received, and the distance to the stage that receives it."""


def get_rank(stage: int, ranks: int) -> int:
    """Return the pipeline rank that runs ``stage``."""
    return stage % ranks


def check_schedule(schedule: str, *, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> None:
    """Check that a schedule can run with these numbers.

    Args:
        schedule: One of :data:`SCHEDULES`.
        ranks: Number of pipeline ranks (``pp_size``).
        micro_batches: Number of micro-batches of a batch.
        stages_per_rank: Number of stages of each rank.

    Raises:
        ValueError: When the schedule is not known, a number is smaller than 1, the schedule and the number of stages
            per rank do not fit together, or interleaving cannot divide the micro-batches into rounds.
    """
    check_pipeline_schedule(schedule, stages_per_rank)
    _check_positive("pp_size", ranks)
    _check_positive("pp_microbatches", micro_batches)
    if schedule == "interleaved_1f1b" and micro_batches % _count_rounds(ranks, micro_batches):
        raise ValueError(
            f"pp_microbatches={micro_batches} is not a multiple of the {_count_rounds(ranks, micro_batches)} rounds"
            f' that pp_schedule="interleaved_1f1b" runs (pp_microbatches // pp_size={ranks}); use a multiple of'
            f' pp_size, such as {micro_batches // ranks * ranks}, or pp_schedule="1f1b".'
        )


def build_orders(schedule: str, *, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Build the actions of each pipeline rank, in the order in which the rank starts them.

    The transfers of all ranks are in one global order. So no two ranks wait for each other when every rank performs its
    actions in this order, even if a transfer returns only after the other rank has reached it, too. Stages of the same
    rank exchange tensors without transfers.

    The arguments and errors are those of :func:`check_schedule`.
    """
    check_schedule(schedule, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank)
    orders = [_order_computation(schedule, ranks, rank, micro_batches, stages_per_rank) for rank in range(ranks)]
    return _add_transfers(orders)


def build_forward_orders(*, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Build the actions of each pipeline rank for an evaluation, which runs forwards only.

    Any number of micro-batches is possible. The order is global, as that of :func:`build_orders`.
    """
    return _add_transfers(
        [
            [
                Action(Kind.FORWARD, stage, number)
                for stage in range(rank, ranks * stages_per_rank, ranks)
                for number in range(micro_batches)
            ]
            for rank in range(ranks)
        ]
    )


def run_in_unit_time(orders: Sequence[Sequence[Action]]) -> list[Event]:
    """Run ``orders`` as :func:`run_in_time` does, with a forward that takes 1, a backward that takes 2 and a transfer
    that takes no time.
    """
    return run_in_time(orders, lambda action: _DURATIONS[action.kind])


def run_in_time(
    orders: Sequence[Sequence[Action]], get_duration: Callable[[Action], float], *, transfer: float = 0
) -> list[Event]:
    """Run the forwards and backwards of ``orders`` as early as possible.

    Args:
        orders: Actions of each rank. Their transfers are not looked at: what a stage has computed is with the next one
            after ``transfer``, and ranks compute in the meantime.
        get_duration: Function that returns the duration of a forward or backward.
        transfer: Duration of a transfer.

    Returns:
        The forwards and backwards, sorted by their ends, then by rank.
    """
    last = max(action.stage for order in orders for action in order)
    queues = [deque(action for action in order if action.kind in _DURATIONS) for order in orders]
    clocks: list[float] = [0] * len(orders)
    ends: dict[Action, float] = {}
    events = []
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and (ready := _get_optional_start(queue[0], ends, last, len(orders), transfer)) is not None:
                action = queue.popleft()
                start = max(ready, clocks[rank])
                ends[action] = clocks[rank] = start + get_duration(action)
                events.append(Event(rank, action, start, ends[action]))
    return sorted(events, key=lambda event: (event.end, event.rank))


def compute_bubble(orders: Sequence[Sequence[Action]]) -> float:
    """Return the fraction of the time that ranks wait, when ``orders`` run in unit time.

    For a number of micro-batches ``m`` that is a multiple of the number of ranks ``p``, and ``v`` stages per rank, this
    is ``(p - 1) / (v * m + p - 1)``.
    """
    events = run_in_unit_time(orders)
    return 1 - sum(event.end - event.start for event in events) / (len(orders) * events[-1].end)


def count_in_flight(order: Iterable[Action]) -> int:
    """Return the largest number of forwards in a rank's order that wait for their backward at the same time.

    Each of them keeps the activations of one stage for one micro-batch in memory. Rank ``r`` of ``p`` ranks has
    ``p - r`` in flight under 1F1B, and all micro-batches under GPipe.
    """
    changes = (_IN_FLIGHT.get(action.kind, 0) for action in order)
    return max(accumulate(changes))


def get_micro_batches(
    micro_batches: int | None, *, rows: int, schedule: str, ranks: int, stages_per_rank: int = 1
) -> int:
    """Return the number of micro-batches of a batch.

    Args:
        micro_batches: Value of the option ``pp_microbatches``, which is returned unchanged. None for 2 x ``ranks`` x
            ``stages_per_rank`` if that divides ``rows``, or else for the largest smaller divisor of ``rows`` that the
            schedule can run.
        rows: Number of rows of the batch, the same on all ranks.
        schedule: One of :data:`SCHEDULES`.
        ranks: Number of pipeline ranks.
        stages_per_rank: Number of stages of each rank.

    Raises:
        ValueError: When the schedule cannot run with these numbers, or the batch has only one row and
            ``micro_batches`` is None.
    """
    if micro_batches is not None:
        check_schedule(schedule, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank)
        return micro_batches
    check_schedule(schedule, ranks=ranks, micro_batches=1, stages_per_rank=stages_per_rank)
    if rows == 1:
        raise ValueError(
            f"pp_size={ranks} divides the rows of each batch into micro-batches, but the batch has only one row, so all"
            " stages except one would always wait; use batches of at least two rows, such as data.batch_size=2 (packed"
            " batches of one row cannot be divided), or set pp_microbatches=1 to accept this."
        )
    limit = min(2 * ranks * stages_per_rank, rows)
    rounds = _count_rounds if schedule == "interleaved_1f1b" else lambda ranks, number: 1
    return max(n for n in range(1, limit + 1) if rows % n == 0 and n % rounds(ranks, n) == 0)


def check_rows(rows: int, micro_batches: int) -> None:
    """Check that micro-batches divide the rows of a batch.

    Raises:
        ValueError: When they do not.
    """
    if rows % micro_batches:
        raise ValueError(
            f"pp_microbatches={micro_batches} does not divide the {rows} rows of a batch; use a number that does, such"
            f" as {gcd(rows, micro_batches)}, or a batch_size that is a multiple of {micro_batches}. If only the last"
            " batch of an epoch has fewer rows, give its DataLoader drop_last=True."
        )


def get_optional_warning(schedule: str, *, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> str | None:
    """Return a warning that names the bubble if there are fewer micro-batches than pipeline ranks, or None.

    The arguments and errors are those of :func:`check_schedule`.
    """
    if micro_batches >= ranks:
        return None
    bubble = compute_bubble(
        build_orders(schedule, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank)
    )
    return (
        f"pp_size={ranks} with fewer micro-batches than ranks (pp_microbatches={micro_batches}): each rank waits for"
        f" {bubble:.0%} of the time; use at least {ranks} micro-batches, or a smaller pp_size."
    )


def _order_computation(schedule: str, ranks: int, rank: int, micro_batches: int, stages_per_rank: int) -> list[Action]:
    """Order the forwards and backwards of a rank: some forwards, then a forward and a backward in turn, then the rest.

    Micro-batches run in rounds. In each round, they run through one stage of the rank after the other.
    """
    is_interleaved = schedule == "interleaved_1f1b"
    round_size = micro_batches // (_count_rounds(ranks, micro_batches) if is_interleaved else 1)
    own = range(rank, ranks * stages_per_rank, ranks)
    rounds = [range(first, first + round_size) for first in range(0, micro_batches, round_size)]
    forwards = [Action(Kind.FORWARD, stage, n) for numbers in rounds for stage in own for n in numbers]
    backwards = [Action(Kind.BACKWARD, stage, n) for numbers in rounds for stage in reversed(own) for n in numbers]
    later = ranks - 1 - rank
    warm_up = {
        "gpipe": micro_batches,
        "1f1b": later,
        "interleaved_1f1b": (stages_per_rank - 1) * round_size + 2 * later,
    }[schedule]
    # with fewer micro-batches than later stages, all forwards are warm-up
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return [*forwards[:warm_up], *chain.from_iterable(pairs), *backwards[len(forwards) - warm_up :]]


def _add_transfers(orders: list[list[Action]]) -> list[list[Action]]:
    """Add transfers to ``orders``: when an action ends in unit time, its rank sends and the other rank receives."""
    ranks = len(orders)
    last = max(action.stage for order in orders for action in order)
    full: list[list[Action]] = [[] for _ in orders]
    for event in run_in_unit_time(orders):
        full[event.rank].append(event.action)
        kind, stage, number = event.action.kind, event.action.stage, event.action.micro_batch
        send, receive, step = _TRANSFERS[kind]
        target = stage + step
        if 0 <= target <= last and get_rank(target, ranks) != event.rank:
            full[event.rank].append(Action(send, stage, number))
            full[get_rank(target, ranks)].append(Action(receive, target, number))
    return full


def _get_optional_start(
    action: Action, ends: Mapping[Action, float], last: int, ranks: int, transfer: float
) -> float | None:
    """Return the time when the input of a forward or backward is ready; None if what computes it has not run yet."""
    if action.kind is Kind.FORWARD and action.stage == 0:
        return 0
    if action.kind is Kind.BACKWARD and action.stage == last:
        return ends.get(replace(action, kind=Kind.FORWARD))
    source = replace(action, stage=action.stage - 1 if action.kind is Kind.FORWARD else action.stage + 1)
    if source not in ends:
        return None
    return ends[source] + (transfer if get_rank(source.stage, ranks) != get_rank(action.stage, ranks) else 0)


def _count_rounds(ranks: int, micro_batches: int) -> int:
    return max(1, micro_batches // ranks)


def _check_positive(option: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{option}={value} is too small; use an integer >= 1.")
