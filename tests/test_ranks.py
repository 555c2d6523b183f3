"""The helper that runs ranks: what it tries again, and what it does not."""

import ctypes
import faulthandler
import time
from pathlib import Path

import pytest
from helpers.ranks import RankError, run_ranks


def start_native_thread_at_nothing() -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.c_void_p(), None)
    time.sleep(30)


def crash_first(marker: Path) -> str:
    if not marker.exists():
        marker.touch()
        start_native_thread_at_nothing()
    return "second"


def test_a_crash_in_a_native_thread_is_tried_again_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="tried again: rank 0 died in a native thread"):
        assert run_ranks(crash_first, 1, tmp_path / "marker") == ["second"]
    with pytest.warns(UserWarning, match="tried again"), pytest.raises(RankError, match="rank 0 died or hung"):
        run_ranks(start_native_thread_at_nothing, 1)


def test_a_crash_in_a_thread_of_python_is_not(tmp_path: Path) -> None:
    def crash() -> None:
        (tmp_path / str(time.monotonic_ns())).touch()
        faulthandler._sigsegv()

    with pytest.raises(RankError, match="Segmentation fault"):
        run_ranks(crash, 1)
    assert len(list(tmp_path.iterdir())) == 1
