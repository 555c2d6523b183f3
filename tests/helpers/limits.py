"""A test without a mark may use two processor seconds, so that `make test` stays as short as it is."""

import os
import time
from collections.abc import Generator
from pathlib import Path
from statistics import mean

import pytest

from helpers.results import get_kind, get_processor_seconds

LIMIT_SECONDS = 2.0
LOOP_SECONDS = 0.024
"""What the loop of :func:`measure_slowness` takes on the machine for which the limit was chosen."""

USUAL_LOAD = 2.5
"""Processes for each of two processors while tests of two and four ranks run, two files at a time."""

LOAD_FILE = Path("/proc/loadavg")
READINGS = 20
"""Half a second of loops, so that one moment does not decide."""

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
    check(item, used, f"the fixture {fixturedef.argname} of its {fixturedef.scope} used")
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that is unmarked and used too much, in this process and in those that it started."""
    result = yield
    check(item, get_processor_seconds() - item.stash[START], "used")
    return result


def check(item: pytest.Item, seconds: float, what: str) -> None:
    """Fail an unmarked test if ``seconds`` of the processor are too many. The message begins with ``what``."""
    if get_kind(item) == "fast" and seconds > LIMIT_SECONDS and seconds > LIMIT_SECONDS * measure_slowness():
        pytest.fail(
            f"{what} {seconds:.1f} processor seconds; a test may use {LIMIT_SECONDS}, unless it is marked slow",
            pytrace=False,
        )


def measure_slowness() -> float:
    """Return how much longer than usual the same work takes now, as a factor: by a fixed loop, or by the load.

    The loop lives in the caches of a processor. Most tests do not, and use more when many processes share it.
    """
    loops, running = [], []
    for _ in range(READINGS):
        start = time.process_time()
        sum(range(2_000_000))
        loops.append(time.process_time() - start)
        running.append(count_running())
    load = max(os.getloadavg()[0], mean(running))
    return max(mean(loops) / LOOP_SECONDS, load / (os.cpu_count() or 1) / USUAL_LOAD)


def count_running() -> int:
    """Return how many threads of the whole machine run or wait for a processor, or 0 where no file tells.

    The load average of the last minute learns only slowly that other work has begun.
    """
    if not LOAD_FILE.exists():
        return 0
    return int(LOAD_FILE.read_text().split()[3].split("/")[0])
