"""The results of a test file: what has passed, how long it took, and which tests of which tier are left."""

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.ledger import Ledger, get_commit, get_key
from helpers.reach import PAGE, ROOT, find_reach

TIERS = {"fast": ("fast",), "all": ("fast", "slow"), "matrices": ("fast", "slow", "release")}
"""The kinds of tests that each run includes. A test is "fast" without one of the other two marks."""

OUTCOMES = ("passed", "failed", "skipped")
END = "end "
"""Beginning of the entries which show that all tests of a kind have run."""


class FileLedger(Ledger):
    """Ledger of a test file, and a pytest plugin that writes the ledger and leaves out tests that have passed.

    Args:
        file: The test file.
        path: Where the results are, for the current state of all files that the test file can reach.
    """

    def __init__(self, file: Path, path: Path) -> None:
        self.file = file
        self.name = str(file.relative_to(ROOT))
        self.crash: dict[str, Any] = {}
        self.kinds: Collection[str] = TIERS["matrices"]
        self.deadline = float("inf")
        self.is_cut_off = False
        super().__init__(path)
        earlier = sorted(set(path.parent.glob("*.jsonl")) - {path}, key=lambda other: other.stat().st_mtime)
        for other in earlier[:-1]:
            other.unlink()
        self.earlier = Ledger(earlier[-1]).results if earlier else {}
        """The results for an earlier state of the files, which say how long a test takes, and what has failed."""

    @property
    def tests(self) -> dict[str, dict[str, Any]]:
        """The results of tests, and of a process that died."""
        return {name: result for name, result in self.results.items() if not name.startswith(END)} | self.crash

    @property
    def commits(self) -> set[str]:
        """The commits at which the tests ran."""
        return {result["commit"] for name, result in self.results.items() if name.startswith(END)}

    def select(self, kinds: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the results of tests of these kinds."""
        return {name: result for name, result in self.tests.items() if result["kind"] in kinds}

    def list_failed(self, kinds: Collection[str]) -> list[str]:
        return [name for name, result in self.select(kinds).items() if result["outcome"] == "failed"]

    def is_done(self, kinds: Collection[str]) -> bool:
        return all(END + kind in self.results for kind in kinds) and not self.list_failed(kinds)

    def run(self, kinds: Collection[str], deadline: float = float("inf")) -> int:
        """Run the tests of these kinds that have not passed, and return the exit status.

        Args:
            kinds: Some of "fast", "slow" and "release".
            deadline: Time, as of :func:`time.monotonic`, after which no test should end.
        """
        self.kinds, self.deadline = kinds, deadline
        if time.monotonic() > deadline:
            return 0
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it would look through all that is installed
        options = ["--rootdir", str(ROOT), "-p", "pytest_timeout", "-p", "no:cacheprovider"]
        status = pytest.main([*options, str(self.file)], plugins=[self])
        if self.is_cut_off:
            return 0
        # an earlier run may have left nothing to do, which pytest reports as an error
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return int(status)
        for kind in kinds:
            self.add(END + kind, commit=get_commit())
        return 0

    def note_end(self, status: int, log: Path) -> None:
        """Read what the process that ran the tests has written, and count the file as failed if it died."""
        self.read()
        if status:
            name = f"{self.name} (ended with {status}, see {log.relative_to(ROOT)})"
            self.crash[name] = {"kind": "fast", "outcome": "failed", "seconds": 0.0}

    def clear(self) -> None:
        """Forget the results, but not how long the tests take."""
        self.earlier |= self.results
        self.results = {}
        self.path.unlink(missing_ok=True)

    def describe(self, kinds: Collection[str], seconds: float) -> str:
        counts = Counter(result["outcome"] for result in self.select(kinds).values())
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        return "\n          ".join([f"{self.name}: {words} in {seconds:.0f} s", *self.list_failed(kinds)])

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = {name for name, result in self.results.items() if result.get("outcome") == "passed"}
        left = [item for item in items if get_kind(item) in self.kinds and item.nodeid not in passed]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        facts = {"kind": get_kind(item)}
        if matrix := item.get_closest_marker("matrix"):
            facts["matrix"] = matrix.args[0]
        self.results[item.nodeid] = {"outcome": "passed", "seconds": 0.0, **facts}
        start = get_processor_seconds()
        result = yield
        self.results[item.nodeid]["processor_seconds"] = round(get_processor_seconds() - start, 3)
        self.add(item.nodeid, **self.results[item.nodeid])
        if nextitem and time.monotonic() + self.earlier.get(nextitem.nodeid, {}).get("seconds", 0) > self.deadline:
            self.is_cut_off = True
            item.session.shouldstop = "out of time"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.results[report.nodeid]
        result["seconds"] += report.duration
        if report.failed:
            result["outcome"] = "failed"
        elif report.skipped:
            result["outcome"] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            result["reason"] = reason.removeprefix("Skipped: ")


def open_ledger(file: Path, folder: Path) -> FileLedger:
    """Return the ledger of a test file, in ``folder``, for the current state of all files that it can reach."""
    return FileLedger(file, folder / file.relative_to(ROOT) / f"{get_key(find_reach(file))}.jsonl")


def get_kind(item: pytest.Item) -> str:
    """Return "release", "slow" or "fast"."""
    return next((kind for kind in ("release", "slow") if item.get_closest_marker(kind)), "fast")


def get_processor_seconds() -> float:
    """Return the processor seconds that this process and its ended children have used."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_seconds(ledgers: Iterable[FileLedger], kinds: Collection[str]) -> dict[str, float]:
    """Return how long each file's tests of these kinds take: by its ledger, or by the page of the last whole run."""
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = re.findall(r"^\| `(\S+)` \|.* (\d+) \| (\d+) \|$", text, re.MULTILINE)
    known = {name: {"fast": float(fast), "slow": float(total) - float(fast)} for name, fast, total in rows}
    seconds = {}
    for ledger in ledgers:
        if results := ledger.earlier | ledger.tests:
            seconds[ledger.name] = sum(r["seconds"] for r in results.values() if r.get("kind") in kinds)
        elif ledger.name in known:
            seconds[ledger.name] = sum(known[ledger.name].get(kind, 0.0) for kind in kinds)
    return seconds
