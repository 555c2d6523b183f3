"""Run all tests, those marked ``slow`` included, and go on where an interrupted run stopped.

Every finished test is a line in a ledger under ``.test-all/``. The ledger's name is a hash of the code, the tests and
the versions they ran with, so a change of any of them starts afresh, while a second run of the same skips what has
passed. A run that reaches its end writes ``docs/test-all.md``.
"""

import hashlib
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "docs" / "test-all.md"
TESTED = ("lightning_fsdp2", "tests", "configs", "examples", "pyproject.toml", "constraints.txt")
OUTCOMES = ("passed", "failed", "skipped")


def main() -> int:
    versions = {"Python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "lightning", "transformers")}
    ledger = Ledger(ROOT / ".test-all" / f"{content_hash(versions)}.jsonl")
    exit_code = pytest.main(["--rootdir", str(ROOT), str(ROOT / "tests")], plugins=[ledger])
    # an earlier run may have left nothing to do, which pytest reports as an error
    finished = exit_code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if not finished or not ledger.results:
        return int(exit_code) or 1
    SUMMARY.parent.mkdir(exist_ok=True)
    SUMMARY.write_text(summarize(ledger.results, versions))
    print(f"wrote {SUMMARY.relative_to(ROOT)}")
    return int(any(result["outcome"] == "failed" for result in ledger.results.values()))


class Ledger:
    """A pytest plugin that records each test as it ends, and leaves out those that have passed before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        if not text.endswith("\n") and text:
            text = text[: text.rfind("\n") + 1]  # an interruption cut off the last line
            path.write_text(text)
        self.results: dict[str, dict[str, Any]] = {
            entry.pop("test"): entry for entry in map(json.loads, text.splitlines())
        }

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = {test for test, result in self.results.items() if result["outcome"] == "passed"}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]

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

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"test": nodeid, **self.results[nodeid]}) + "\n")


def content_hash(versions: dict[str, str]) -> str:
    """Hash what decides the outcome of a test; a commit would not see uncommitted changes, and would see the docs."""
    digest = hashlib.sha256(repr(versions).encode())
    for path in tested_files():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def tested_files() -> Iterable[Path]:
    for name in TESTED:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def summarize(results: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    """Return the Markdown page: versions, counts and seconds per file, what failed, and why tests were skipped."""
    by_file: dict[str, list[dict[str, Any]]] = {}
    for test, result in results.items():
        by_file.setdefault(test.partition("::")[0], []).append(result)
    failed = [test for test, result in results.items() if result["outcome"] == "failed"]
    skipped = Counter(result["reason"] for result in results.values() if result["outcome"] == "skipped")
    lines = [
        "# The last run of `make test-all`",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, commit {commit()}, "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + ".",
        "",
        "| file | passed | failed | skipped | seconds |",
        "|---|--:|--:|--:|--:|",
        *(table_row(f"`{file}`", by_file[file]) for file in sorted(by_file)),
        table_row("all", list(results.values())),
    ]
    if failed:
        lines += ["", "## Failed", "", *(f"- `{test}`" for test in failed)]
    if skipped:
        lines += ["", "## Skipped", "", *(f"- {reason}: {count}" for reason, count in skipped.most_common())]
    return "\n".join(lines) + "\n"


def table_row(title: str, results: list[dict[str, Any]]) -> str:
    counts = Counter(result["outcome"] for result in results)
    seconds = sum(result["seconds"] for result in results)
    return f"| {title} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} | {seconds:.0f} |"


def commit() -> str:
    """The checked out commit, with a note if tracked files differ from it."""
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty=, with changes"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return git.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
