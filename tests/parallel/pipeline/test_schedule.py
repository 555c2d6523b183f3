"""Orders of the pipeline schedules: against torch's, against closed forms, and executed with transfers that block."""

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from lightning_fsdp2.parallel.pipeline.schedule import (
    Action,
    Event,
    Kind,
    build_orders,
    check_rows,
    check_schedule,
    compute_bubble,
    count_in_flight,
    get_micro_batches,
    get_optional_warning,
    get_rank,
    run_in_time,
    run_in_unit_time,
)

_PLAIN = [(schedule, p, m, 1) for schedule in ("1f1b", "gpipe") for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 16)]
_INTERLEAVED = [
    ("interleaved_1f1b", p, m, v)
    for p, ms in ((1, (1, 3)), (2, (1, 2, 3, 4, 6)), (4, (1, 2, 4, 7, 8, 10)), (8, (3, 8, 24)))
    for m in ms
    for v in (2, 3)
]
_CASES = [*_PLAIN, *_INTERLEAVED]


def _build(schedule: str, p: int, m: int, v: int) -> list[list[Action]]:
    return build_orders(schedule, ranks=p, micro_batches=m, stages_per_rank=v)


def _spell(order: list[Action]) -> str:
    """Spell computations as ``F0``: forward of micro-batch 0. Transfers are left out."""
    letters = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
    return " ".join(f"{letters[action.kind]}{action.micro_batch}" for action in order if action.kind in letters)


def _compute_only(order: list[Action]) -> list[tuple[int, str, int]]:
    computations = (Kind.FORWARD, Kind.BACKWARD)
    return [(action.stage, action.kind.name, action.micro_batch) for action in order if action.kind in computations]


def _get_peer(action: Action) -> Action | None:
    """Return the action of the other rank that a transfer pairs with."""
    return {
        Kind.SEND_FORWARD: Action(Kind.RECEIVE_FORWARD, action.stage + 1, action.micro_batch),
        Kind.RECEIVE_FORWARD: Action(Kind.SEND_FORWARD, action.stage - 1, action.micro_batch),
        Kind.SEND_BACKWARD: Action(Kind.RECEIVE_BACKWARD, action.stage - 1, action.micro_batch),
        Kind.RECEIVE_BACKWARD: Action(Kind.SEND_BACKWARD, action.stage + 1, action.micro_batch),
    }.get(action.kind)


def _check_inputs(action: Action, done: set[Action], stages: int, p: int) -> None:
    """Check that what ``action`` needs is already on its rank."""
    stage, number = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD and stage > 0:
        sent = Kind.RECEIVE_FORWARD if p > 1 else Kind.FORWARD
        assert Action(sent, stage if p > 1 else stage - 1, number) in done
    if action.kind is Kind.BACKWARD:
        assert Action(Kind.FORWARD, stage, number) in done
        if stage < stages - 1:
            sent = Kind.RECEIVE_BACKWARD if p > 1 else Kind.BACKWARD
            assert Action(sent, stage if p > 1 else stage + 1, number) in done
    if action.kind is Kind.SEND_FORWARD:
        assert Action(Kind.FORWARD, stage, number) in done
    if action.kind is Kind.SEND_BACKWARD:
        assert Action(Kind.BACKWARD, stage, number) in done


@pytest.mark.parametrize(("schedule", "p", "m", "v"), _CASES)
def test_orders_finish_when_every_transfer_waits_for_the_other_rank(schedule: str, p: int, m: int, v: int) -> None:
    orders = _build(schedule, p, m, v)
    positions, done = [0] * p, [set[Action]() for _ in range(p)]

    def get_next(rank: int) -> Action | None:
        return orders[rank][positions[rank]] if positions[rank] < len(orders[rank]) else None

    def finish(rank: int, action: Action) -> None:
        _check_inputs(action, done[rank], p * v, p)
        done[rank].add(action)
        positions[rank] += 1

    moved = True
    while moved:
        moved = False
        for rank in range(p):
            action = get_next(rank)
            if action is None:
                continue
            peer = _get_peer(action)
            other = None if peer is None else get_rank(peer.stage, p)
            assert other != rank
            if other is None:
                finish(rank, action)
            elif get_next(other) == peer:
                finish(rank, action)
                finish(other, peer)
            else:
                continue
            moved = True
    assert positions == [len(order) for order in orders]
    for rank, order in enumerate(orders):
        assert {action.stage for action in order} == set(range(rank, p * v, p))
        computed = sorted(_compute_only(order))
        assert computed == sorted(
            (s, kind, n) for s in range(rank, p * v, p) for kind in ("FORWARD", "BACKWARD") for n in range(m)
        )
        assert len(done[rank]) == len(order)
    boundaries = p * v - 1 if p > 1 else 0
    assert sum(map(len, orders)) == 2 * p * v * m + 4 * boundaries * m


@pytest.mark.parametrize(("schedule", "p", "m", "v"), _INTERLEAVED)
def test_interleaved_computes_in_the_order_of_torch(schedule: str, p: int, m: int, v: int) -> None:
    theirs = SimpleNamespace(
        n_local_stages=v,
        pp_group_size=p,
        _n_microbatches=m,
        number_of_rounds=max(1, m // p),
        microbatches_per_round=m // max(1, m // p),
    )
    for rank, order in enumerate(_build(schedule, p, m, v)):
        expected = ScheduleInterleaved1F1B._calculate_single_rank_operations(theirs, rank)
        assert _compute_only(order) == [
            (one.stage_index, one.computation_type.name.removeprefix("FULL_"), one.microbatch_index)
            for one in expected
            if one is not None
        ]


def test_1f1b_warms_up_with_one_forward_per_later_stage() -> None:
    orders = _build("1f1b", 3, 4, 1)
    assert [_spell(order) for order in orders] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [_spell(order) for order in _build("1f1b", 4, 2, 1)] == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


def test_gpipe_runs_all_forwards_first() -> None:
    assert [_spell(order) for order in _build("gpipe", 2, 3, 1)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_transfers_follow_what_they_send_and_precede_what_they_feed() -> None:
    f, b = Kind.FORWARD, Kind.BACKWARD
    assert _build("1f1b", 2, 1, 1) == [
        [Action(f, 0, 0), Action(Kind.SEND_FORWARD, 0, 0), Action(Kind.RECEIVE_BACKWARD, 0, 0), Action(b, 0, 0)],
        [Action(Kind.RECEIVE_FORWARD, 1, 0), Action(f, 1, 0), Action(b, 1, 0), Action(Kind.SEND_BACKWARD, 1, 0)],
    ]


def test_stages_of_one_rank_need_no_transfers() -> None:
    [order] = _build("interleaved_1f1b", 1, 2, 2)
    assert {action.kind for action in order} == {Kind.FORWARD, Kind.BACKWARD}


def test_unit_time_starts_each_action_when_its_input_and_its_rank_are_ready() -> None:
    f, b = Kind.FORWARD, Kind.BACKWARD
    assert run_in_unit_time(_build("1f1b", 2, 2, 1)) == [
        Event(0, Action(f, 0, 0), 0, 1),
        Event(0, Action(f, 0, 1), 1, 2),
        Event(1, Action(f, 1, 0), 1, 2),
        Event(1, Action(b, 1, 0), 2, 4),
        Event(1, Action(f, 1, 1), 4, 5),
        Event(0, Action(b, 0, 0), 4, 6),
        Event(1, Action(b, 1, 1), 5, 7),
        Event(0, Action(b, 0, 1), 7, 9),
    ]


def test_transfers_take_time_only_between_ranks() -> None:
    def get_duration(action: Action) -> float:
        return 10.0 if action.stage == 1 else 1.0

    two = run_in_time(_build("1f1b", 2, 1, 1), get_duration, transfer=3.0)
    assert [(event.start, event.end) for event in two] == [(0, 1), (4, 14), (14, 24), (27, 28)]
    one = run_in_time(_build("interleaved_1f1b", 1, 1, 2), get_duration, transfer=3.0)
    assert [(event.start, event.end) for event in one] == [(0, 1), (1, 11), (11, 21), (21, 22)]


@pytest.mark.guarantees("bubble")
@pytest.mark.parametrize(("schedule", "p", "m", "v"), _CASES)
def test_bubble_is_that_of_the_closed_form(schedule: str, p: int, m: int, v: int) -> None:
    if m % p == 0 or v == 1:
        assert compute_bubble(_build(schedule, p, m, v)) == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.guarantees("micro-batches-in-flight")
@pytest.mark.parametrize("m", [4, 8, 16])
def test_micro_batches_in_flight(m: int) -> None:
    assert [count_in_flight(order) for order in _build("1f1b", 4, m, 1)] == [4, 3, 2, 1]
    assert [count_in_flight(order) for order in _build("gpipe", 4, m, 1)] == [m] * 4


def test_micro_batches_in_flight_when_interleaved_or_few() -> None:
    assert [count_in_flight(order) for order in _build("interleaved_1f1b", 2, 4, 2)] == [5, 3]
    assert [count_in_flight(order) for order in _build("1f1b", 4, 2, 1)] == [2, 2, 2, 1]


@pytest.mark.guarantees("number-of-micro-batches")
@pytest.mark.parametrize(
    ("rows", "schedule", "p", "v", "expected"),
    [
        (64, "1f1b", 4, 1, 8),
        (64, "interleaved_1f1b", 4, 2, 16),
        (12, "1f1b", 4, 1, 6),
        (7, "gpipe", 4, 1, 7),
        (22, "gpipe", 4, 1, 2),
        (3, "1f1b", 4, 1, 3),
        (18, "interleaved_1f1b", 4, 2, 6),  # 9 would be two rounds of 4.5
        (9, "interleaved_1f1b", 4, 2, 3),
    ],
)
def test_number_of_micro_batches(rows: int, schedule: str, p: int, v: int, expected: int) -> None:
    assert get_micro_batches(None, rows=rows, schedule=schedule, ranks=p, stages_per_rank=v) == expected
    assert get_micro_batches(5, rows=rows, schedule=schedule, ranks=p, stages_per_rank=v) == 5


def test_one_row_is_refused_unless_asked_for() -> None:
    with pytest.raises(ValueError, match=r"only one row.*pp_microbatches=1"):
        get_micro_batches(None, rows=1, schedule="1f1b", ranks=2)
    assert get_micro_batches(1, rows=1, schedule="1f1b", ranks=2) == 1


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "message"),
    [
        ("zero_bubble", 2, 2, 1, r"pp_schedule='zero_bubble'"),
        ("1f1b", 0, 2, 1, "pp_size=0 is too small"),
        ("1f1b", 2, 0, 1, "pp_microbatches=0 is too small"),
        ("1f1b", 2, 2, 0, "pp_stages_per_rank=0 must be an int >= 1"),
        ("1f1b", 2, 2, 2, "pp_stages_per_rank=2 with pp_schedule='1f1b': this schedule has one stage"),
        ("gpipe", 2, 2, 3, "pp_stages_per_rank=3 with pp_schedule='gpipe': this schedule has one stage"),
        ("interleaved_1f1b", 2, 2, 1, "only several stages on each rank can be interleaved"),
        ("interleaved_1f1b", 4, 9, 2, "pp_microbatches=9 is not a multiple of the 2 rounds.*such as 8"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(schedule: str, p: int, m: int, v: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule, ranks=p, micro_batches=m, stages_per_rank=v)
    with pytest.raises(ValueError, match=message):
        _build(schedule, p, m, v)


def test_torch_refuses_the_same_numbers_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_schedules._PipelineScheduleRuntime, "__init__", lambda self, **options: None)
    monkeypatch.setattr(ScheduleInterleaved1F1B, "_calculate_single_rank_operations", lambda self, rank: [])
    monkeypatch.setattr(ScheduleInterleaved1F1B, "_prepare_schedule_with_comms", lambda self, actions: None)

    def is_refused(build: Callable[[], object]) -> bool:
        try:
            build()
        except ValueError:
            return True
        return False

    for p, m in product((2, 3, 4), range(1, 20)):
        stages = [SimpleNamespace(group_size=p, group_rank=0)] * 2
        ours = is_refused(partial(check_schedule, "interleaved_1f1b", ranks=p, micro_batches=m, stages_per_rank=2))
        assert ours == is_refused(partial(ScheduleInterleaved1F1B, stages, m)), (p, m)


def test_rows_that_micro_batches_do_not_divide_are_refused() -> None:
    check_rows(12, 4)
    with pytest.raises(ValueError, match=r"pp_microbatches=4 does not divide the 10 rows.*such as 2.*drop_last"):
        check_rows(10, 4)


def test_few_micro_batches_are_worth_a_warning_that_names_the_bubble() -> None:
    assert get_optional_warning("1f1b", ranks=4, micro_batches=4) is None
    warning = get_optional_warning("1f1b", ranks=4, micro_batches=2)
    assert warning is not None
    assert "pp_microbatches=2" in warning
    assert "waits for 60% of the time" in warning
