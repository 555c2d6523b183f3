import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from lightning_fsdp2 import FSDP2Config
from lightning_fsdp2._refusals import has_mistake
from lightning_fsdp2.plan.simulation.workers import add_up_progress, run_in_processes


def test_results_come_with_the_numbers_of_their_tasks() -> None:
    own = os.getpid()
    tasks = [lambda number=number: (number, os.getpid()) for number in range(5)]
    results = dict(run_in_processes(tasks, processes=2))
    assert [results[number][0] for number in range(5)] == [0, 1, 2, 3, 4]
    assert own not in {process for _, process in results.values()}


def test_tasks_that_run_at_the_end_are_stopped_and_no_task_starts_after_it(tmp_path: Path) -> None:
    tasks = [partial(time.sleep, 0), partial(time.sleep, 600), (tmp_path / "started").touch]
    results = list(run_in_processes(tasks, processes=1, end=time.monotonic() + 3))
    assert results in ([(0, None)], [])  # whether the first is done depends on the machine
    assert not (tmp_path / "started").exists()
    assert list(run_in_processes([(tmp_path / "started").touch], end=time.monotonic())) == []
    assert not (tmp_path / "started").exists()


def test_progress_on_several_lists_of_tasks_adds_up() -> None:
    reports: list[tuple[int, int]] = []
    report = add_up_progress(lambda done, total: reports.append((done, total)))
    for done, total in ((1, 2), (2, 2), (1, 1)):
        report(done, total)
    assert reports == [(1, 2), (2, 2), (3, 3)]


def run(task: Callable[[], object]) -> list[object]:
    return list(run_in_processes([task]))


def test_a_refusal_is_raised_as_it_is_and_a_bug_with_its_traceback() -> None:
    with pytest.raises(ValueError, match="fsdp2_forward_prefetch_depth=-1"):
        run(lambda: FSDP2Config(fsdp2_forward_prefetch_depth=-1))

    def fail() -> NoReturn:
        raise KeyError("nobody expected it")

    with pytest.raises(RuntimeError, match=r"(?s)in fail.*KeyError: 'nobody expected it'") as caught:
        run(fail)
    assert not has_mistake(caught.value), "the command line would print its traceback as a mistake of the user"


def test_a_mistake_that_a_library_finds_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^JSONDecodeError: Expecting .* \(raised by json.decoder; ") as caught:
        run(partial(json.loads, "no JSON"))
    assert has_mistake(caught.value)


def test_a_process_that_is_killed_is_told_of() -> None:
    with pytest.raises(RuntimeError, match="died with exit code -9; -9 usually means out of memory"):
        run(lambda: os.kill(os.getpid(), signal.SIGKILL))
