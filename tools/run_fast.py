"""Run the tests that every change must pass, which are all tests not marked ``slow``, two files at a time.

Arguments are those of pytest, such as ``-k name``. If they name files or folders, pytest itself runs only these. If
tests of a file fail, the output of the file is shown when it ends.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  imported once here, instead of in each fork
import pytest
from helpers.ledger import hold, run_jobs
from helpers.reach import ROOT

from tools.run_all import OUTCOMES, FileLedger, order_by_seconds, run_file

FOLDER = ROOT / ".test"


def main(arguments: Sequence[str] = ()) -> int:
    """Run all files, and return 1 if a test failed or none ran."""
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return int(pytest.main(["-m", "not slow", *arguments]))
    start = time.monotonic()
    with hold(FOLDER):
        ledgers = {ledger.name: ledger for ledger in map(open_ledger, sorted((ROOT / "tests").rglob("test_*.py")))}
        options = ("-m", "not slow", *arguments)
        jobs = {name: partial(run_file, ledgers[name], *options) for name in order_by_seconds(ledgers)}
        for number, (name, status, seconds) in enumerate(run_jobs(jobs, FOLDER), 1):
            ledger = ledgers[name] = FileLedger(ledgers[name].file, ledgers[name].path)
            ledger.note_crash(status)
            print(f"{time.monotonic() - start:6.0f} s  {number:3}/{len(jobs)}  {ledger.describe(seconds)}", flush=True)
            if ledger.failed:
                print((FOLDER / f"{name}.log").read_text(errors="replace"), flush=True)
    counts = Counter(result["outcome"] for ledger in ledgers.values() for result in ledger.results.values())
    for ledger in ledgers.values():
        print(*(f"failed: {test}\n" for test in ledger.failed), sep="", end="")
    print(f"{time.monotonic() - start:.0f} s")
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    return int(counts["failed"] > 0 or not counts)  # a wrong `-k` must not look like success


def open_ledger(file: Path) -> FileLedger:
    """Return an empty ledger of a test file."""
    path = FOLDER / file.relative_to(ROOT) / "results.jsonl"
    path.unlink(missing_ok=True)
    return FileLedger(file, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
