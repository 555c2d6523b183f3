"""The benchmark of checkpoints runs at toy size, through the launcher that it is written for."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fork_server import get_python

from benchmarks import checkpoint
from benchmarks.checkpoint import DISK, MEASURES, SHARE_OF_DISK, SPEED, TARGETS, THEIRS, VARIANTS

SCRIPT = Path(checkpoint.__file__)


@pytest.mark.slow
def test_every_row_has_its_numbers_and_no_file_is_left(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    options = ["--directory", str(tmp_path), "--parameters", "2e6", "--repeats", "1", "--variants", ",".join(VARIANTS)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PL_", "TORCHELASTIC"))}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run([get_python(), *command, *options], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-6000:]

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ended.stdout.splitlines() if line[:2] == "| "]
    header, *measured = rows[: len(MEASURES) + 1]
    ours = [variant for variant in VARIANTS if variant not in (THEIRS, DISK)]
    assert header == ["", *VARIANTS, *(f"{variant} / {THEIRS}" for variant in ours)]
    assert [row[0] for row in measured] == list(MEASURES)
    for name, *cells in measured:
        numbers, ratios = dict(zip(VARIANTS, cells, strict=False)), cells[len(VARIANTS) :]
        assert all(is_number(numbers[variant]) for variant in (THEIRS, *ours))
        assert is_number(numbers[DISK]) == (name in (checkpoint.DURABLE, SPEED, SHARE_OF_DISK))
        # what a small checkpoint needs may be too little to be seen
        assert all(is_number(ratio.split()[0]) for ratio in ratios) or float(numbers[THEIRS]) == 0
    targets = rows[len(MEASURES) + 2 :]
    assert len(targets) == len(TARGETS)
    assert all(is_number(is_) and verdict in ("pass", "fail") for _, is_, _, verdict in targets)
    assert not list(tmp_path.iterdir())


def is_number(text: str) -> bool:
    return text != "-" and math.isfinite(float(text)) and float(text) >= 0


def test_an_unknown_variant_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", "--directory", ".", "--variants", "theirs,fast"])
    with pytest.raises(SystemExit):
        checkpoint.parse_args()
    assert "unknown: fast; choose from theirs,sync" in capsys.readouterr().err


def test_the_model_has_as_many_parameters_as_asked_for():
    for parameters in (50e6, 500e6):
        assert checkpoint.get_checkpoint_bytes(parameters) == pytest.approx(12 * parameters, rel=0.02)
