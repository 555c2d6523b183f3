import json
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import pytest

from lightning_fsdp2 import FSDP2Config
from lightning_fsdp2._refusals import has_mistake
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
