"""The results of a test file: what has passed, how long it took, and which tests of which tier are left."""

import os
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from helpers.fork_server import FORKED_SECONDS
from helpers.ledger import Ledger, get_commit, get_key
from helpers.reach import PAGE, ROOT, find_reach

TIERS = {"fast": ("fast",), "all": ("fast", "slow"), "matrices": ("fast", "slow", "release")}
"""The kinds of tests that each run includes. A test is "fast" without one of the other two marks."""

OUTCOMES = ("passed", "failed", "skipped")
TEMPORARY = "PYTEST_DEBUG_TEMPROOT"
"""Variable by which pytest knows the folder for its temporary folders."""

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
        return {result["commit"] for result in self.results.values()}

    def select(self, kinds: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the results of tests of these kinds."""
        return {name: result for name, result in self.tests.items() if result["kind"] in kinds}

    def list_failed(self, kinds: Collection[str]) -> list[str]:
        return [name for name, result in self.select(kinds).items() if result["outcome"] == "failed"]

    def is_done(self, kinds: Collection[str]) -> bool:
        """Return whether all tests of these kinds have passed. One that was skipped may run where something is new."""
        outcomes = {result["outcome"] for result in self.select(kinds).values()}
        return self.has_ended(kinds) and outcomes <= {"passed"}

    def has_ended(self, kinds: Collection[str]) -> bool:
        """Return whether all tests of these kinds have run, however they ended."""
        return all(END + kind in self.results for kind in kinds)

    def run(self, kinds: Collection[str], deadline: float = float("inf")) -> int:
        """Run the tests of these kinds that have not passed, and return the exit status.

        Args:
            kinds: Some of "fast", "slow" and "release".
            deadline: Time, as of :func:`time.monotonic`, after which no test should end.
        """
        self.kinds, self.deadline = kinds, deadline
        if time.monotonic() > deadline or self.is_done(kinds):
            return 0
        # otherwise pytest would look for plugins in all that is installed
        plugins = ["--disable-plugin-autoload", "-p", "pytest_timeout", "-p", "pytest_rerunfailures"]
        options = ["--rootdir", str(ROOT), "-p", "no:cacheprovider", *plugins]
        # a folder for each file, because two runs of pytest that clean a common one up at once can fail
        with tempfile.TemporaryDirectory(dir=os.environ.get(TEMPORARY), ignore_cleanup_errors=True) as folder:
            seconds = Path(folder, "forked-seconds")
            seconds.touch()
            variables = {FORKED_SECONDS: str(seconds), TEMPORARY: folder}
            with patch.dict(os.environ, variables):
                status = pytest.main([*options, str(self.file)], plugins=[self])
        if self.is_cut_off:
            return 0
        # an earlier run may have left nothing to do, which pytest reports as an error
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return int(status)
        for kind in kinds:
            self.add(END + kind, commit=get_commit())
        return 0

    def note_end(self, kinds: Sequence[str], status: int, log: Path) -> None:
        """Read what the process that ran tests of these kinds has written, and count a failure if it died."""
        self.read()
        if status:
            name = f"{self.name} (ended with {status}, see {log.relative_to(ROOT)})"
            self.crash[name] = {"kind": kinds[0], "outcome": "failed", "seconds": 0.0, "commit": get_commit()}

    def clear(self, kinds: Collection[str]) -> None:
        """Forget the results of tests of these kinds, but not how long they take."""
        self.earlier |= self.results
        kept = {name: r for name, r in self.results.items() if r.get("kind", name.removeprefix(END)) not in kinds}
        self.path.unlink(missing_ok=True)
        self.results = {}
        for name, result in kept.items():
            self.add(name, **result)

    def sum_seconds(self) -> dict[str, float]:
        """Return how long the tests of each kind took when they last ran."""
        seconds: Counter[str] = Counter()
        for name, result in (self.earlier | self.results).items():
            seconds[result.get("kind", name.removeprefix(END))] += result.get("seconds", 0.0)
        return seconds

    def describe(self, kinds: Collection[str], seconds: float) -> str:
        counts = Counter(result["outcome"] for result in self.select(kinds).values())
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        return "\n          ".join([f"{self.name}: {words} in {seconds:.0f} s", *self.list_failed(kinds)])

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = {name for name, result in self.results.items() if result.get("outcome") == "passed"}
        for kind in {*TIERS["matrices"]} - {get_kind(item) for item in items}:
            self.add(END + kind, commit=get_commit())  # there are none
        left = [item for item in items if get_kind(item) in self.kinds and item.nodeid not in passed]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.end_in_time(session, next(iter(session.items), None))

    def end_in_time(self, session: pytest.Session, following: pytest.Item | None) -> None:
        """Stop before a test that would end after the deadline."""
        if following and time.monotonic() + self.earlier.get(following.nodeid, {}).get("seconds", 0) > self.deadline:
            self.is_cut_off = True
            session.shouldstop = "out of time"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        facts = {"kind": get_kind(item), "commit": get_commit()}
        if matrix := item.get_closest_marker("matrix"):
            facts["matrix"] = matrix.args[0]
        self.results[item.nodeid] = {"outcome": "passed", "seconds": 0.0, **facts}
        start = get_processor_seconds()
        result = yield
        self.results[item.nodeid]["processor_seconds"] = round(get_processor_seconds() - start, 3)
        self.add(item.nodeid, **self.results[item.nodeid])
        self.end_in_time(item.session, nextitem)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.results[report.nodeid]
        result["seconds"] += report.duration
        if report.outcome == "rerun":
            result["tried_again"] = True
        elif report.failed:
            result["outcome"] = "failed"
        elif report.skipped and result["outcome"] != "failed":
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
    """Return the processor seconds that this process, its ended children and programs of the fork server have used."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    file = os.environ.get(FORKED_SECONDS)
    forked = map(float, Path(file).read_text().split()) if file else ()
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(forked)


def read_seconds(ledgers: Iterable[FileLedger], kinds: Collection[str]) -> dict[str, float]:
    """Return how long each file's tests of these kinds take: by its ledger, or by the page of the last whole run.

    Files of which neither knows any of these kinds are left out.
    """
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = re.findall(r"^\| `(\S+)` \|.* (\d+) \| (\d+) \|$", text, re.MULTILINE)
    on_page = {name: {"fast": float(fast), "slow": float(total) - float(fast)} for name, fast, total in rows}
    seconds = {}
    for ledger in ledgers:
        known = on_page.get(ledger.name, {}) | ledger.sum_seconds()
        if known.keys() & {*kinds}:
            seconds[ledger.name] = sum(known.get(kind, 0.0) for kind in kinds)
    return seconds
