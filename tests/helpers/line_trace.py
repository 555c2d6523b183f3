"""Plugins of pytest for `tools/mutate.py`: which lines of the package a test runs, and which test fails first."""

import json
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Generator
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class _Unlimited:
    """A plugin that sets no limit to the processor time of tests whose lines are traced or broken."""

    def pytest_sessionstart(self) -> None:
        if limits := sys.modules.get("helpers.limits"):  # which is that of the tests that run
            limits.LIMIT_SECONDS = math.inf  # type: ignore[attr-defined]


class FirstFailure(_Unlimited):
    """A plugin that writes the name of the test, or the file, that fails first."""

    def __init__(self, report: Path) -> None:
        self.report = report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.report.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


class LineTracer(_Unlimited):
    """A plugin that writes the seconds of each test that passes, and the lines that it and its forked ranks run.

    The marks are in memory that forks share. What a fixture of more than one test runs counts for all of its tests.

    Args:
        folder: Folder of the files whose lines count.
        report: File that gets the result, as JSON.
    """

    def __init__(self, folder: Path, report: Path) -> None:
        files = sorted(folder.rglob("*.py"))
        sizes = [len(file.read_bytes().splitlines()) + 2 for file in files]
        self._starts = dict(zip(files, accumulate([0, *sizes]), strict=False))
        self._sizes = dict(zip(files, sizes, strict=True))
        self._marks = mmap.mmap(-1, sum(sizes))
        self._root, self._report = folder.parent, report
        self._local = {str(file): self._make_local(start) for file, start in self._starts.items()}
        self._shared: dict[str, dict[str, list[int]]] = {}
        self._tests: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self._left_out: set[str] = set()

    def _make_local(self, start: int) -> Callable[..., Any]:
        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            self._marks[start + frame.f_lineno] = 1
            return trace

        return trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._local.get(frame.f_code.co_filename)

    def _take(self) -> dict[str, list[int]]:
        found = {}
        for file, start in self._starts.items():
            marks = self._marks[start : start + self._sizes[file]]
            if any(marks):
                found[str(file.relative_to(self._root))] = [line for line, mark in enumerate(marks) if mark]
        self._marks[:] = bytes(len(self._marks))
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        before = self._take()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._shared[fixturedef.argname] = self._take()
            for file, lines in before.items():
                for line in lines:
                    self._marks[self._starts[self._root / file] + line] = 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        self._take()
        start = time.monotonic()
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            lines = self._take()
            for name in item.fixturenames:
                for file, shared in self._shared.get(name, {}).items():
                    lines[file] = sorted({*lines.get(file, ()), *shared})
            self._tests[item.nodeid] = (round(time.monotonic() - start, 2), lines)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self._left_out.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {name: result for name, result in self._tests.items() if name not in self._left_out}
        self._report.write_text(json.dumps(passed))
