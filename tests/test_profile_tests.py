"""The profile of tests has a row for each file, with the time of its ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.reach import ROOT

TEST = """
import time

from helpers.ranks import run_ranks


def spin():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass


def test_ranks():
    run_ranks(spin, 2, group=False)
"""


@pytest.mark.slow
def test_a_file_has_a_row_with_the_time_of_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_spins.py").write_text(TEST)
    command = [sys.executable, "tools/profile_tests.py", f"--rootdir={tmp_path}", str(tmp_path / "test_spins.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [row] = [line for line in ended.stdout.splitlines() if "test_spins.py" in line]
    cells = [cell.strip() for cell in row.strip(" │┃|").split("│")]
    assert 0.6 <= float(cells[-1]) < 60, row
