"""Which of several ranks writes the line about a mistake that all of them find."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fsdp2.cli import errors

LAUNCHERS = {
    "torchrun": {"LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    "lightning": {"LOCAL_RANK": "1", "MASTER_PORT": "29500"},  # which deletes WORLD_SIZE at the end
    "srun": {"SLURM_LOCALID": "1"},
}

END = """from lightning_fsdp2.cli.errors import exit_with_error
print("ready", flush=True)
exit_with_error("a mistake", waits=True)"""


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(errors, "_PATIENCE", 0.1)


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "5"}, {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}], ids=str)
def test_the_first_rank_writes_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        errors.exit_with_error("a\nmistake")
    assert capsys.readouterr().err == "error: a mistake\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_another_rank_writes_what_the_first_has_not_found(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        errors.exit_with_error("a mistake")
    assert capsys.readouterr().err == "", "a mistake of the command line, which all ranks have"
    with pytest.raises(SystemExit, match="2"):
        errors.exit_with_error("a mistake", waits=True)
    assert capsys.readouterr().err == "error: local rank 1: a mistake\n"


def test_another_rank_ends_with_the_first() -> None:
    """Here the first rank is a process that starts the other one and ends."""
    start = f"""import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {END!r}], stdout=subprocess.PIPE).stdout.readline()
time.sleep(1)  # until the other process waits"""
    environment = {"PYTHONPATH": str(Path(errors.__file__).parents[2]), **LAUNCHERS["lightning"]}
    result = subprocess.run(
        [sys.executable, "-c", start], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stderr == ""  # read until the other process has ended, too


@pytest.mark.slow
def test_two_processes_of_a_run_write_one_line(tmp_path: Path) -> None:
    """The mistake is found by both, after the process group is there."""
    command = [sys.executable, "-m", "lightning_fsdp2", "quickstart", "--trainer.strategy.pp_size=2"]
    command += ["--trainer.accelerator=cpu", "--trainer.devices=2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 2
    [line] = [line for line in result.stderr.splitlines() if "error" in line]
    assert line.startswith("error: RunReport(prompt='def '): with pp_size=2")
