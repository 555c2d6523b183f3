"""A test without a mark may use two processor seconds, so that `make test` stays as short as it is."""

import time
from collections.abc import Generator

import pytest

from helpers.results import get_kind, get_processor_seconds

LIMIT_SECONDS = 2.0
LOOP_SECONDS = 0.024
"""What :func:`measure_slowness` takes on the machine for which the limit was chosen."""

START = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Note when a test begins."""
    item.stash[START] = get_processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that is unmarked and used too much, in this process and in those that it started.

    A shared fixture counts for the test that uses it first.
    """
    result = yield
    used = get_processor_seconds() - item.stash[START]
    if get_kind(item) == "fast" and used > LIMIT_SECONDS and used > LIMIT_SECONDS * measure_slowness():
        pytest.fail(
            f"used {used:.1f} processor seconds; a test may use {LIMIT_SECONDS}, unless it is marked slow",
            pytrace=False,
        )
    return result


def measure_slowness() -> float:
    """Return how much longer than usual a fixed loop takes on this machine now, as a factor."""
    start = time.process_time()
    sum(range(2_000_000))
    return (time.process_time() - start) / LOOP_SECONDS
