"""Which stages of a pipeline a plan looks at, and how long its ranks wait."""

from typing import Any

import pytest
import torch

from lightning_fsdp2.parallel.pipeline.schedule import Action, Kind
from lightning_fsdp2.plan.pipeline import ActionTime, Pipeline, group_operations
from lightning_fsdp2.plan.simulation.recorder import Collective, Group, Operation, Recording
from lightning_fsdp2.plan.timing.devices import get_device


def make(layers: tuple[int, ...], schedule: str = "1f1b", **options: Any) -> Pipeline:
    stages_per_rank = options.pop("stages_per_rank", 1)
    return Pipeline(
        schedule=schedule,
        ranks=len(layers) // stages_per_rank,
        stages_per_rank=stages_per_rank,
        rows=1,
        layers=layers,
        **{"micro_batches": 8, **options},
    )


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((4, 4), [0, 1]),
        ((4, 4, 4), [0, 1, 2]),
        ((4, 4, 4, 4, 4), [0, 1, 4]),  # rank 1 keeps 4 micro-batches, rank 2 only 3
        ((4, 4, 4, 9, 4), [0, 3, 4]),  # 2 micro-batches of 9 layers are more than 4 of 4
    ],
)
def test_the_ends_and_the_fullest_rank_between_them_are_looked_at(layers: tuple[int, ...], expected: list[int]) -> None:
    assert make(layers).choose_ranks() == expected


def test_with_equal_stages_ranks_wait_for_the_bubble() -> None:
    pipeline = make((2,) * 8, "interleaved_1f1b", stages_per_rank=2)
    seconds = {(stage, is_backward): 1.0 + is_backward for stage in range(8) for is_backward in (False, True)}
    _, waiting = pipeline.compute_waiting(seconds)
    busy = 2 * 8 * 3
    assert pipeline.bubble == pytest.approx(3 / (2 * 8 + 3))
    assert [time / (time + busy) for time in waiting] == pytest.approx([pipeline.bubble] * 4)


def test_others_wait_for_a_slow_last_stage() -> None:
    pipeline = make((2, 2, 2, 2), micro_batches=100)
    inner = {(stage, is_backward): 1.0 + is_backward for stage in (0, 1) for is_backward in (False, True)}
    _, waiting = pipeline.compute_waiting({**inner, (3, False): 2.0, (3, True): 4.0})
    # the last rank is always busy, except for the first forwards and the last backwards of the others
    assert waiting == pytest.approx([309, 309, 309, 9])


def test_stages_between_the_ends_are_derived_by_their_layers() -> None:
    pipeline = make((1, 2, 4, 1), micro_batches=1)
    seconds = {(0, False): 0.0, (0, True): 0.0, (1, False): 1.0, (1, True): 2.0, (3, False): 0.0, (3, True): 0.0}
    busy = {1: 3.0, 2: 6.0}
    assert pipeline.compute_waiting(seconds) == (9, pytest.approx([9, 9 - busy[1], 9 - busy[2], 9]))
    assert pipeline.compute_waiting(seconds, transfer=1.0) == (15, pytest.approx([15, 12, 9, 15]))


def test_forwards_and_backwards_of_a_stage_are_averaged() -> None:
    device = get_device("a100")
    second = Operation(312 * 10**12, 0, torch.bfloat16)
    gather = Operation(0, 0, None, Collective("all-gather", Group(("dp_shard",), (0, 1)), True, 600 * 10**9))
    sent = Operation(0, 0, None, Collective("send", Group(("pipeline_parallel",), (0, 2)), False, 10**12))
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    recording = Recording(
        [gather, second, sent, second, second, second, second, second],
        [],
        [],
        [],
        [
            (0, 2, forward),
            (2, 3, Action(Kind.SEND_FORWARD, 0, 0)),
            (3, 4, Action(Kind.FORWARD, 0, 1)),
            (4, 6, backward),
            (6, 8, Action(Kind.BACKWARD, 0, 1)),
        ],
    )
    reached = 1 / device.rates.products
    actions, rest = group_operations(recording)
    assert rest == [sent]
    assert [action.get_time(device, overlapped_axes=()) for action in actions] == [
        ActionTime(
            stage=0, is_backward=False, at_least=1.0, estimate=pytest.approx(reached + 0.5 / device.rates.links)
        ),
        ActionTime(stage=0, is_backward=True, at_least=2.0, estimate=pytest.approx(2 * reached)),
    ]
