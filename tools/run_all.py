"""Run all tests, including those marked ``slow``, two files at a time, and continue where an interrupted run stopped.

Each test file has a ledger under ``.test-all/``, with a line for every finished test. The ledger's name is a hash of
the versions and of all files that the test file can reach (:mod:`helpers.reach`). So after a change, only test files
that can reach the changed files run again. Other tests that have passed are skipped. The run writes
``docs/test-all.md`` when it ends.
"""

import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  imported once here, instead of in each fork
import pytest
from helpers.ledger import VERSIONS, Ledger, get_commit, get_key, hold, run_jobs
from helpers.reach import RESULTS, ROOT, find_reach

FOLDER = ROOT / ".test-all"
OUTCOMES = ("passed", "failed", "skipped")
END = "end"
"""Entry of a ledger which shows that the test file has run to its end."""


def main() -> int:
    """Run the remaining tests, write the page, and return 1 if a test failed."""
    start = time.monotonic()
    with hold(FOLDER):
        ledgers = {ledger.name: ledger for ledger in map(open_ledger, sorted((ROOT / "tests").rglob("test_*.py")))}
        left = {name: ledger for name, ledger in ledgers.items() if not ledger.is_done}
        print(f"{len(left)} of {len(ledgers)} test files to run", flush=True)
        jobs = {name: partial(run_file, left[name]) for name in order_by_seconds(left)}
        for number, (name, status, seconds) in enumerate(run_jobs(jobs, FOLDER), 1):
            ledger = ledgers[name] = FileLedger(left[name].file, left[name].path)
            ledger.note_crash(status)
            print(f"{time.monotonic() - start:6.0f} s  {number:3}/{len(jobs)}  {ledger.describe(seconds)}", flush=True)
        RESULTS.write_text(summarize(ledgers, time.monotonic() - start, len(jobs)))
        print(f"wrote {RESULTS.relative_to(ROOT)}")
    return int(any(ledger.failed for ledger in ledgers.values()))


def open_ledger(file: Path) -> "FileLedger":
    """Return the ledger of a test file for the current state of all files that it can reach."""
    return FileLedger(file, FOLDER / file.relative_to(ROOT) / f"{get_key(find_reach(file))}.jsonl")


def run_file(ledger: "FileLedger", *options: str) -> int:
    """Run the tests of a file that have not passed before, and return the exit status."""
    standard = ["--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    status = pytest.main([*standard, *options, str(ledger.file)], plugins=[ledger])
    # an earlier run may have left nothing to do, which pytest reports as an error
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        ledger.add(END, commit=get_commit())
        return 0
    return int(status)


class FileLedger(Ledger):
    """Ledger of a test file, and a pytest plugin that writes the ledger and leaves out tests that have passed."""

    def __init__(self, file: Path, path: Path) -> None:
        super().__init__(path)
        self.file = file
        self.name = str(file.relative_to(ROOT))
        self.end = self.results.pop(END, None)

    @property
    def failed(self) -> list[str]:
        return [test for test, result in self.results.items() if result["outcome"] == "failed"]

    @property
    def is_done(self) -> bool:
        return self.end is not None and not self.failed

    def note_crash(self, status: int) -> None:
        """Count the file as failed if its process has died."""
        if status:
            log = self.path.parent.relative_to(ROOT)
            self.results[f"{self.name} (ended with {status}, see {log}.log)"] = {
                "outcome": "failed",
                "seconds": 0.0,
            }

    def describe(self, seconds: float) -> str:
        counts = Counter(result["outcome"] for result in self.results.values())
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        return "\n          ".join([f"{self.name}: {words} in {seconds:.0f} s", *self.failed])

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = {test for test, result in self.results.items() if result["outcome"] == "passed"}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        start = get_cpu_seconds()
        result = yield
        self.results[item.nodeid]["cpu"] = get_cpu_seconds() - start
        self.add(item.nodeid, **self.results[item.nodeid])
        return result

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.results[nodeid] = {"outcome": "passed", "seconds": 0.0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.results[report.nodeid]
        result["seconds"] += report.duration
        if report.failed:
            result["outcome"] = "failed"
        elif report.skipped:
            result["outcome"] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            result["reason"] = reason.removeprefix("Skipped: ")


def get_cpu_seconds() -> float:
    """Return the processor seconds that this process and its ended children have used."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def order_by_seconds(names: Iterable[str]) -> list[str]:
    """Sort files by their time in the last run, the longest first. New files come before all others."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    seconds = {name: int(number) for name, number in re.findall(r"^\| `(\S+)` .* (\d+) \|$", text, re.MULTILINE)}
    return sorted(names, key=lambda name: -seconds.get(name, sys.maxsize))


def summarize(ledgers: dict[str, FileLedger], seconds: float, ran: int) -> str:
    """Return the page as Markdown: versions, counts and seconds per file, failures, and reasons for skipped tests."""
    by_file = {name: list(ledger.results.values()) for name, ledger in ledgers.items()}
    results = [result for file in by_file.values() for result in file]
    failed = [test for ledger in ledgers.values() for test in ledger.failed]
    skipped = Counter(result["reason"] for result in results if result["outcome"] == "skipped")
    earlier = Counter(ledger.end["commit"] for ledger in ledgers.values() if ledger.end)
    earlier.pop(get_commit(), None)
    lines = [
        "# The last run of `make test-all`",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, commit {get_commit()}, "
        + ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
        + f". {ran} of {len(ledgers)} files ran, two at a time, in {seconds:.0f} s.",
        *(
            f"{count} files that no later change can reach ran at commit {commit}."
            for commit, count in earlier.most_common()
        ),
        "",
        "| file | passed | failed | skipped | seconds |",
        "|---|--:|--:|--:|--:|",
        *(table_row(f"`{name}`", by_file[name]) for name in sorted(by_file)),
        table_row("all", results),
    ]
    if failed:
        lines += ["", "## Failed", "", *(f"- `{test}`" for test in failed)]
    if skipped:
        lines += ["", "## Skipped", "", *(f"- {reason}: {count}" for reason, count in skipped.most_common())]
    return "\n".join(lines) + "\n"


def table_row(title: str, results: list[dict[str, Any]]) -> str:
    """Return a row of the page, with the counts of outcomes and the seconds."""
    counts = Counter(result["outcome"] for result in results)
    seconds = sum(result["seconds"] for result in results)
    return f"| {title} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} | {seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
