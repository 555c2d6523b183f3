"""The resident memory that a step of training adds, measured in a program that has no huge pages.

The targets of make let processes use huge pages, which count as resident as a whole once one byte is used.
"""

import json
import pickle
import subprocess
from pathlib import Path

from benchmarks.memory import Run, Variant
from helpers.fork_server import get_python
from helpers.reach import ROOT

PROGRAM = """
import json, pickle, sys
from functools import partial
from benchmarks.memory import run_forked, train

run, variant, folder = pickle.loads(bytes.fromhex(sys.argv[1]))
print(json.dumps(run_forked(partial(train, run, variant, folder), run.ranks)))
"""


def measure_added(run: Run, variant: Variant, folder: Path) -> list[int]:
    """Return the bytes that a step adds at its peak on each rank."""
    added: list[int] = json.loads(run_program(PROGRAM, pickle.dumps((run, variant, str(folder))).hex()))
    return added


def run_program(code: str, *arguments: str) -> str:
    """Run a program without huge pages, and return what it prints."""
    command = [get_python(), "-c", code, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return ended.stdout
