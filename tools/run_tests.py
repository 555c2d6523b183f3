"""Run tests, two files at a time, and continue where an interrupted run stopped.

``fast``, ``all`` and ``matrices`` run the tests of ``make test``, ``make test-all`` and ``make matrices``. Each test
file has a ledger under ``.test/``, with a line for every finished test. The ledger's name is a hash of the versions
and of all files that the test file can reach (:mod:`helpers.reach`). So after a change, only test files that can reach
the changed files run again. Tests that have passed are left out. ``all`` and ``matrices`` write a page under ``docs/``.

``changed`` runs those of ``all`` that a change can reach, the most likely to fail first, within a given time.

Other arguments go to pytest, which then runs by itself.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  imported once here, instead of in each fork
import pytest
from helpers.fork_server import get_python
from helpers.ledger import hold, run_jobs
from helpers.reach import MATRICES_PAGE, PAGE, ROOT, find_reach
from helpers.results import OUTCOMES, TEMPORARY, TIERS, FileLedger, open_ledger, read_seconds

from tools import result_pages
from tools.changes import find_changed, order_by_likelihood

FOLDER = ROOT / ".test"
FORK_SERVER = ROOT / "tests/helpers/fork_server.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests that are left, and return 1 if a test failed, now or when it last ran."""
    options, for_pytest = parse(arguments)
    if for_pytest:
        left_out = {"fast": ["-m", "not (slow or release)"], "matrices": []}.get(options.what, ["-m", "not release"])
        return int(pytest.main([*left_out, *for_pytest]))
    with hold(FOLDER):
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        ledgers = [open_ledger(file, FOLDER) for file in files]
        if options.what == "changed":
            return run_changed(ledgers, options)
        return run_tier(ledgers, options.what, again=options.again)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the command line, and the arguments for pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TIERS, "changed"])
    parser.add_argument("--again", action="store_true", help="also run tests that have passed")
    parser.add_argument("--since", help="changed: the commit before the change; main, or else the last one, by default")
    parser.add_argument("--seconds", type=float, help="changed: the time within which tests end, 600 by default")
    parser.add_argument("--list", action="store_true", help="changed: name the files, but run nothing")
    options, others = parser.parse_known_args(arguments)
    if options.what != "changed" and (options.since or options.seconds is not None or options.list):
        parser.error(f"--since, --seconds and --list are for changed, not for {options.what}; leave them out.")
    return options, others


def run_tier(ledgers: list[FileLedger], tier: str, *, again: bool) -> int:
    """Run the tests of a tier, the files that take longest first, and write the tier's page.

    Tests that have passed are left out, unless ``again`` is true.
    """
    start = time.monotonic()
    kinds = TIERS[tier]
    if again:
        for ledger in ledgers:
            ledger.clear(kinds)
    seconds = read_seconds(ledgers, kinds)
    left = [ledger for ledger in ledgers if not ledger.is_done(kinds)]
    left.sort(key=lambda ledger: -seconds.get(ledger.name, sys.maxsize))  # new files come before all others
    print(f"{len(left)} of {len(ledgers)} test files to run", flush=True)
    run_files([(ledger, kinds) for ledger in left], start)
    spent = time.monotonic() - start
    if tier == "all":
        PAGE.write_text(result_pages.summarize(ledgers, spent, len(left)))
    if tier == "matrices":
        MATRICES_PAGE.write_text(result_pages.summarize_matrices(ledgers))
    return conclude(ledgers, kinds, spent)


def run_changed(ledgers: list[FileLedger], options: argparse.Namespace) -> int:
    """Run what a change can reach, the most likely to fail first, until the time is over."""
    start, limit = time.monotonic(), 600.0 if options.seconds is None else options.seconds
    order = order_by_likelihood(ledgers, find_changed(options.since))
    reached = list(dict.fromkeys(ledger for ledger, _ in order))
    if options.again and not options.list:
        for ledger in reached:
            ledger.clear(TIERS["all"])
    steps = [(ledger, kind) for ledger, kind in order if options.again or not ledger.is_done([kind])]
    if options.list:
        seconds = {kind: read_seconds(reached, [kind]) for kind in TIERS["all"]}
        for ledger, kind in steps:
            print(f"{seconds[kind].get(ledger.name, 0):6.0f} s  {ledger.name}, {kind} tests")
        return 0
    run_files([(ledger, [kind]) for ledger, kind in steps], start, deadline=start + limit)
    for ledger, kind in steps:
        if not ledger.has_ended([kind]) and not ledger.list_failed([kind]):
            print(f"not all run in {limit:.0f} s: {ledger.name}, {kind} tests")
    return conclude(reached, TIERS["all"], time.monotonic() - start)


def run_files(steps: list[tuple[FileLedger, Sequence[str]]], start: float, deadline: float = float("inf")) -> None:
    """Run each file's tests of the given kinds in a fork, print how each ended, and show the output of what failed."""
    named = {f"{ledger.name}{'-slow' if kinds == ['slow'] else ''}": (ledger, kinds) for ledger, kinds in steps}
    jobs = {name: partial(ledger.run, kinds, deadline) for name, (ledger, kinds) in named.items()}
    if any(FORK_SERVER in find_reach(ledger.file) for ledger, _ in steps):
        get_python()  # for the programs that tests start, once for all files
    # one for all jobs, which this process removes, because a job that dies leaves its own folder
    temporary = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    with temporary as folder, patch.dict(os.environ, {TEMPORARY: folder}):
        for number, (name, status, seconds) in enumerate(run_jobs(jobs, FOLDER), 1):
            ledger, kinds = named[name]
            log = FOLDER / f"{name}.log"
            ledger.note_end(kinds, status, log)
            line = f"{number:3}/{len(jobs)}  {ledger.describe(kinds, seconds)}"
            print(f"{time.monotonic() - start:6.0f} s  {line}", flush=True)
            if ledger.list_failed(kinds):
                print(log.read_text(errors="replace"), flush=True)


def conclude(ledgers: Sequence[FileLedger], kinds: Sequence[str], seconds: float) -> int:
    """Print what failed or was repeated, and the counts, and return the exit status."""
    for ledger in ledgers:
        print(*(f"failed: {test}\n" for test in ledger.list_failed(kinds)), sep="", end="")
        repeated = (name for name, result in ledger.select(kinds).items() if result.get("tried_again"))
        print(*(f"repeated: {test}\n" for test in repeated), sep="", end="")
    counts = Counter(result["outcome"] for ledger in ledgers for result in ledger.select(kinds).values())
    print(f"{seconds:.0f} s")
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
