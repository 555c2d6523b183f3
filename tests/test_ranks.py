"""The helper that runs ranks: how it tells crashes apart, and how long it waits."""

import ctypes
import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import ranks
from helpers.ranks import NativeCrash, RankError, raises_on_all_ranks, run_ranks


def start_native_thread_at_nothing() -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.c_void_p(), None)
    time.sleep(30)


def test_a_crash_in_a_native_thread_is_told_apart() -> None:
    with pytest.raises(NativeCrash, match="rank 0 died in a native thread"):
        run_ranks(start_native_thread_at_nothing, 1)


def test_a_damaged_heap_is_told_apart() -> None:
    def free_wrongly() -> None:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(ctypes.addressof(ctypes.create_string_buffer(24)) + 8)  # nothing was allocated there

    with pytest.raises(NativeCrash, match="rank 0 died of a damaged heap"):
        run_ranks(free_wrongly, 1)


def test_a_crash_in_a_thread_of_python_is_a_failure_of_the_rank() -> None:
    with pytest.raises(RankError, match="Segmentation fault"):
        run_ranks(faulthandler._sigsegv, 1)


def test_ranks_have_as_long_as_they_are_given() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 died or hung without a result.*Timeout.*in sleep_for_a_minute"):
        run_ranks(sleep_for_a_minute, 1, seconds=1)


def sleep_for_a_minute() -> None:
    time.sleep(60)


def test_ranks_end_with_the_test_that_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "rank"

    def write_and_sleep() -> None:
        marker.with_suffix(".new").write_text(str(os.getpid()))
        marker.with_suffix(".new").rename(marker)
        time.sleep(60)

    def time_out(*_: object, **__: object) -> None:
        while not marker.exists():
            time.sleep(0.01)
        raise TimeoutError

    monkeypatch.setattr(ranks, "wait", time_out)
    with pytest.raises(TimeoutError):
        run_ranks(write_and_sleep, 1, group=False)
    assert not Path("/proc", marker.read_text()).exists()


def test_an_error_is_demanded_of_all_ranks() -> None:
    def fail() -> None:
        dist.barrier()
        raise ValueError("both")

    with raises_on_all_ranks(ValueError, match="^both$"):
        run_ranks(fail, 2)


@pytest.mark.parametrize(
    ("end", "how", "patience"),
    [
        (lambda: None, "it returned", 60),
        (lambda: os._exit(3), "it died or hung", 60),
        (lambda: time.sleep(60), "it died or hung", 0.2),
        (dist.barrier, "RuntimeError", 60),
        (lambda: int("other"), "invalid literal", 60),
    ],
    ids=["returns", "dies", "hangs", "loses its peer", "another message"],
)
def test_an_error_of_one_rank_is_not_one_of_all(end: Callable[[], object], how: str, patience: float) -> None:
    def run() -> None:
        if dist.get_rank() == 0:
            raise ValueError("one")
        end()

    with (
        pytest.raises(AssertionError, match=rf"rank 1 did not raise ValueError\('one'\), but: .*{how}"),
        raises_on_all_ranks(ValueError, match="one"),
    ):
        run_ranks(run, 2, patience=patience)
