"""The allocator's rules, as its source and ``torch.cuda.memory_stats`` have them, and what is added to it."""

from collections.abc import Sequence

import pytest
import torch

from lightning_fsdp2.plan.simulation.recorder import (
    ACTIVATIONS,
    COMMUNICATION_BUFFERS,
    Attention,
    Collective,
    Group,
    MemoryChange,
    Operation,
    Recording,
)
from lightning_fsdp2.plan.simulation.reserved import Reserved, estimate_reserved, extrapolate_reserved, play_through

MIB = 2**20


def make_changes(sizes: Sequence[tuple[int, float]], category: str = ACTIVATIONS) -> list[MemoryChange]:
    """Storages, by number, and the MiB by which each grows."""
    return [MemoryChange(0, category, int(size * MIB), number) for number, size in sizes]


@pytest.mark.guarantees("held-memory")
@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([(0, 0.5)], 2),  # small requests share segments of 2 MiB
        ([(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5)], 2),
        ([(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5), (4, 0.001)], 4),
        ([(0, 3)], 20),  # those below 10 MiB share segments of 20 MiB
        ([(0, 3), (1, 9), (2, 8)], 20),
        ([(0, 3), (1, 9), (2, 9)], 40),
        ([(0, 11)], 12),  # others have one of their own, of a multiple of 2 MiB
        ([(0, 12), (0, -12), (1, 11)], 12),  # what is free is used again
        ([(0, 12), (1, 30), (0, -12), (1, -30), (2, 12)], 42),  # the smallest that is large enough, whose rest stays
        ([(0, 30), (0, -30), (1, 12), (2, 12)], 30),  # and is split
        ([(0, 30), (0, -30), (1, 29), (2, 0.9)], 32),  # not for a rest of 1 MiB, nor for small requests
        ([(0, 30), (0, -30), (1, 10), (2, 10), (3, 10), (2, -10), (1, -10), (4, 20)], 30),  # neighbours join
        ([(0, 30), (0, -30), (1, 10), (2, 10), (3, 10), (1, -10), (3, -10), (4, 20)], 50),  # others do not
        ([(0, 10), (0, 10)], 30),  # a storage that grows moves
    ],
)
def test_segments_are_those_of_the_allocator(sizes: list[tuple[int, float]], reserved: int) -> None:
    assert play_through(make_changes(sizes)) == reserved * MIB


def test_a_stream_uses_its_own_blocks() -> None:
    first = make_changes([(0, 12), (0, -12)])
    assert play_through([*first, *make_changes([(1, 12)])]) == 12 * MIB
    assert play_through([*first, *make_changes([(1, 12)], COMMUNICATION_BUFFERS)]) == 24 * MIB


def test_groups_and_attention_take_memory_of_their_own() -> None:
    def estimate(*operations: Operation) -> tuple[int, int]:
        reserved = estimate_reserved(Recording(list(operations), make_changes([(0, 12)]), [], []))
        return reserved.least, reserved.most

    def make_call(kind: str, *ranks: int) -> Operation:
        return Operation(0, 0, None, Collective(kind, Group((), ranks), False, 8))

    least, most = estimate()
    assert 12 * MIB < least < most < 2**30 + 100 * MIB
    assert estimate(make_call("all-reduce", 5)) == (least, most)  # alone a rank needs no other
    one = estimate(make_call("all-reduce", 0, 1), make_call("all-gather", 0, 1))
    two = estimate(make_call("all-reduce", 0, 1), make_call("all-reduce", 0, 1, 2, 3))
    assert one == (least + 544 * 10**6, most + 688 * 10**6)
    assert two == (least + 2 * 544 * 10**6, most + 2 * 688 * 10**6)
    exchanged = estimate(make_call("all-to-all", 0, 1))
    assert exchanged == (one[0], one[1] + 3280 * 10**6)
    backward = Operation(1, 1, torch.bfloat16, attention=Attention(64, 512, 1000, True, True))
    assert estimate(backward, backward) == (least, most + 4000)


def test_what_a_long_model_holds_follows_from_two_short_ones() -> None:
    """Llama 3 70B on 64 ranks with 4, 5 and 80 layers, all simulated; in GiB."""
    few, more, whole = (
        Reserved(*(round(size * 2**30) for size in sizes))
        for sizes in ((36.893, 55.055), (40.355, 58.639), (300.0, 350.0))
    )
    extrapolated = extrapolate_reserved(few, more, 76)
    assert extrapolated.least == pytest.approx(whole.least, rel=0.001)
    assert extrapolated.most == pytest.approx(whole.most, rel=0.02)


def test_the_upper_end_is_never_below_the_lower_end() -> None:
    """Although the longer of two models may have fewer unused parts of segments."""
    extrapolated = extrapolate_reserved(Reserved(40, 60), Reserved(43, 59), 76)
    assert extrapolated.least == 40 + 76 * 3
    assert extrapolated.most >= extrapolated.least + 20
