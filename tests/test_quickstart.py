"""Each one-line change of the quickstart that the README shows runs, and changes nothing but the layout."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest
from helpers.fork_server import get_python

ROOT = Path(__file__).parent.parent

CHANGES = re.findall(r'^make quickstart ARGS="(.*)"$', (ROOT / "README.md").read_text(), re.MULTILINE)


@cache
def get_initial_loss(folder: Path, arguments: str) -> str:
    """Train for two steps; return the loss of the whole validation set before them, with the digits of the report."""
    command = [get_python(), "-m", "lightning_fsdp2", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml")]
    short = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    result = subprocess.run(
        [*command, *short, *shlex.split(arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    losses = re.findall(r"before training: (\S+)\)", result.stderr)
    assert len(losses) == 1  # one rank reports
    return losses[0]


@pytest.mark.guarantees("quickstart-layouts")
@pytest.mark.slow
@pytest.mark.parametrize("arguments", CHANGES)
def test_the_loss_before_training_is_that_of_one_process(
    arguments: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert len(CHANGES) == 3
    expected = get_initial_loss(tmp_path_factory.getbasetemp(), "--trainer.devices=1")
    assert get_initial_loss(tmp_path, arguments) == expected
