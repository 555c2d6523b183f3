import os
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest

from lightning_fsdp2 import FSDP2Config
from lightning_fsdp2.plan.workers import run_in_processes


def test_results_come_with_the_numbers_of_their_tasks() -> None:
    own = os.getpid()
    tasks = [lambda number=number: (number, os.getpid()) for number in range(5)]
    results = dict(run_in_processes(tasks, processes=2))
    assert [results[number][0] for number in range(5)] == [0, 1, 2, 3, 4]
    assert own not in {process for _, process in results.values()}


def run(task: Callable[[], object]) -> list[object]:
    return list(run_in_processes([task]))


def test_a_refusal_is_raised_as_it_is_and_a_bug_with_its_traceback() -> None:
    with pytest.raises(ValueError, match="fsdp2_forward_prefetch_depth=-1"):
        run(lambda: FSDP2Config(fsdp2_forward_prefetch_depth=-1))

    def fail() -> NoReturn:
        raise KeyError("nobody expected it")

    with pytest.raises(RuntimeError, match=r"(?s)in fail.*KeyError: 'nobody expected it'"):
        run(fail)


def test_a_process_that_is_killed_is_told_of() -> None:
    with pytest.raises(RuntimeError, match="died with exit code -9; -9 usually means out of memory"):
        run(lambda: os.kill(os.getpid(), signal.SIGKILL))
