"""Write the pages with the results of ``make test-all`` and ``make matrices``."""

import runpy
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from helpers.cover import Matrix
from helpers.ledger import STREAMS, VERSIONS, get_commit
from helpers.results import OUTCOMES, TIERS, FileLedger


def summarize(ledgers: list[FileLedger], seconds: float, ran: int) -> str:
    """Return the page of all tests as Markdown: versions, counts and seconds of each file, and what went wrong.

    Args:
        ledgers: One for each test file.
        seconds: Wall time of the run.
        ran: Number of files that ran. The results of the others stand from earlier runs.
    """
    results = {ledger.name: list(ledger.select(TIERS["all"]).values()) for ledger in ledgers}
    every = list(chain.from_iterable(results.values()))
    lines = [
        "# The last run of `make test-all`",
        "",
        f"{describe_versions()} {ran} of {len(ledgers)} files ran, {STREAMS} at a time, in {seconds:.0f} s.",
        *describe_earlier(ledgers),
        "",
        "| file | passed | failed | skipped | seconds of `make test` | seconds |",
        "|---|--:|--:|--:|--:|--:|",
        *(build_row(f"`{name}`", results[name]) for name in sorted(results)),
        build_row("all", every),
        *describe_failures(ledgers, TIERS["all"]),
        *describe_repetitions(ledgers),
    ]
    skipped = Counter(result["reason"] for result in every if result["outcome"] == "skipped")
    if skipped:
        lines += ["", "## Skipped", "", *(f"- {reason}: {count}" for reason, count in skipped.most_common())]
    return "\n".join(lines) + "\n"


def build_row(title: str, results: list[dict[str, Any]]) -> str:
    """Return a row of the page of all tests, with the counts of outcomes and the seconds."""
    counts = Counter(result["outcome"] for result in results)
    fast = sum(result["seconds"] for result in results if result["kind"] == "fast")
    total = sum(result["seconds"] for result in results)
    return f"| {title} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} | {fast:.0f} | {total:.0f} |"


def summarize_matrices(ledgers: list[FileLedger]) -> str:
    """Return the page of `make matrices` as Markdown: for each matrix its cells, pairs and seconds."""
    matrices = [(ledger, matrix) for ledger in ledgers for matrix in load_matrices(ledger.file)]
    checks = {ledger.name: list_checks(ledger) for ledger in ledgers}
    return "\n".join(
        [
            "# The last run of `make matrices`",
            "",
            describe_versions(),
            *describe_earlier(ledgers),
            "",
            "Each pair of values that occurs in a cell of a matrix occurs in a cell that `make test-all` runs. `make"
            " matrices` runs all cells. A pair has passed if a cell with it has passed.",
            "",
            "| matrix | file | cells | `test-all` | `test` | pairs | passed | in `test-all` | seconds | `test-all` |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
            *(build_matrix_row(ledger, matrix) for ledger, matrix in matrices),
            "",
            "Other tests that run only here:",
            "",
            *(f"- `{name}`: {len(own)}, {sum(own):.0f} s" for name, own in checks.items() if own),
            *describe_failures(ledgers, TIERS["matrices"]),
            "",
        ]
    )


def build_matrix_row(ledger: FileLedger, matrix: Matrix) -> str:
    """Return a matrix's row of the page."""
    results = {name: result for name, result in ledger.tests.items() if result.get("matrix") == matrix.name}
    cover = {name: result for name, result in results.items() if result["kind"] != "release"}
    tried = [matrix.cells, list_passed(results, matrix), list_passed(cover, matrix)]
    pairs = [len(matrix.list_pairs(cells)) for cells in tried]
    seconds = [f"{sum(result['seconds'] for result in some.values()):.0f}" for some in (results, cover)]
    numbers = [len(matrix.cells), len(matrix.chosen), len(matrix.fast), *pairs, *seconds]
    return f"| {matrix.name} | `{ledger.name}` | {' | '.join(map(str, numbers))} |"


def list_passed(results: dict[str, dict[str, Any]], matrix: Matrix) -> list[str]:
    """Return the cells of a matrix whose tests have passed."""
    passed = [name for name, result in results.items() if result["outcome"] == "passed"]
    tests = [name.partition("[")[2].removesuffix("]") for name in passed]
    return [cell for test in tests for cell in matrix.groups.get(test, [test])]


def list_checks(ledger: FileLedger) -> list[float]:
    """Return the seconds of each test that only `make matrices` runs and that is no cell of a matrix."""
    return [result["seconds"] for result in ledger.select(["release"]).values() if "matrix" not in result]


def load_matrices(file: Path) -> list[Matrix]:
    """Return the matrices that a test file defines."""
    if "Matrix(" not in file.read_text():
        return []
    return [value for value in runpy.run_path(str(file)).values() if isinstance(value, Matrix)]


def describe_versions() -> str:
    """Return date, commit and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    return f"{datetime.now(timezone.utc):%Y-%m-%d}, commit {get_commit()}, {versions}."


def describe_earlier(ledgers: Iterable[FileLedger]) -> list[str]:
    """Return a line for each earlier commit whose results stand."""
    earlier = Counter(commit for ledger in ledgers for commit in ledger.commits)
    earlier.pop(get_commit(), None)
    return [
        f"Results of {count} files are from commit {name}; no later change can reach these files."
        for name, count in earlier.most_common()
    ]


def describe_failures(ledgers: Iterable[FileLedger], kinds: Iterable[str]) -> list[str]:
    """Return the list of failed tests with its heading, or nothing."""
    failed = [test for ledger in ledgers for test in ledger.list_failed(tuple(kinds))]
    return ["", "## Failed", "", *(f"- `{test}`" for test in failed)] if failed else []


def describe_repetitions(ledgers: Iterable[FileLedger]) -> list[str]:
    """Return a list of the tests that were repeated once (see ``pyproject.toml``) with its heading, or nothing."""
    names = [name for ledger in ledgers for name, result in ledger.tests.items() if result.get("tried_again")]
    return ["", "## Repeated", "", *(f"- `{name}`" for name in names)] if names else []
