"""A test without a mark may use two processor seconds, so that `make test` stays as short as it is."""

import os
import time
from collections.abc import Generator
from statistics import mean
from typing import NoReturn

import psutil
import pytest

from helpers.results import get_kind, get_processor_seconds

LIMIT_SECONDS = 2.0
LOOP_SECONDS = 0.024
"""What the loop of :func:`measure_slowness` takes on the machine for which the limit was chosen."""

LOOP_EXPONENT = 1.5
"""What slows the loop slows tests of several processes more. On a machine where it took 2.2 times as long, five tests
that had kept the limit used 3.7 to 5.9 seconds."""

READINGS = 10
"""A quarter of a second of loops, so that one moment does not decide."""

RUN = os.getpid()
"""The process that imports this file: the whole run. Its test files and their ranks are forks of it."""

START = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Note when a test begins."""
    item.stash[START] = get_processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Check a shared fixture by itself, so that it does not matter which test uses it first."""
    if fixturedef.scope == "function":
        return (yield)
    item = request._pyfuncitem
    before = get_processor_seconds() - item.stash[START]
    result = yield
    used = get_processor_seconds() - item.stash[START] - before
    item.stash[START] += used
    if is_too_much(item, used):
        fixturedef.finish(request)  # a test that is repeated sets it up again
        fail(used, f"the fixture {fixturedef.argname} of its {fixturedef.scope} used")
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that is unmarked and used too much, in this process and in those that it started."""
    result = yield
    used = get_processor_seconds() - item.stash[START]
    if is_too_much(item, used):
        fail(used, "used")
    return result


def is_too_much(item: pytest.Item, seconds: float) -> bool:
    """Return whether a test is unmarked, and used more seconds of the processor than it may use on this machine now."""
    return get_kind(item) == "fast" and seconds > LIMIT_SECONDS and seconds > LIMIT_SECONDS * measure_slowness()


def fail(seconds: float, what: str) -> NoReturn:
    """Fail a test, which is then repeated once (see ``pyproject.toml``). The message begins with ``what``."""
    pytest.fail(
        f"{what} {seconds:.1f} processor seconds; a test may use {LIMIT_SECONDS}, unless it is marked slow",
        pytrace=False,
    )


def measure_slowness() -> float:
    """Return how much longer than usual the same work takes now, as a factor: by a fixed loop, or by other processes.

    The loop lives in the caches of a processor. Most tests do not, and use more when other work shares the caches. An
    average load would not do, because it learns slowly that other work has begun.
    """
    loops, busy = [], []
    for _ in range(READINGS):
        start = time.process_time()
        sum(range(2_000_000))
        loops.append(time.process_time() - start)
        busy.append(count_busy_processes())
    return max((mean(loops) / LOOP_SECONDS) ** LOOP_EXPONENT, 1 + mean(busy) / (os.cpu_count() or 1))


def count_busy_processes() -> int:
    """Return how many processes that are not of this run use a processor or wait for one."""
    own = {RUN, *(process.pid for process in psutil.Process(RUN).children(recursive=True))}
    busy = (p for p in psutil.process_iter(["status"]) if p.info["status"] == psutil.STATUS_RUNNING)
    return sum(process.pid not in own for process in busy)
