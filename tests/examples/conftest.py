"""The folders in which examples run."""

import sys
from functools import cache
from pathlib import Path

import datasets
import pytest
from helpers.examples import LORA, OWN_MODULE, Finish, Run, list_commands, run_command, run_example
from helpers.fork_server import get_python

FRESH = {next(command for command in list_commands(migrating=False) if command.startswith("torchrun ")), LORA}
"""Commands whose processes are not forked, one of each launcher."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script in an empty folder on ranks as torchrun starts them; returns what each has printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return run_example


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> Finish:
    """Runs a command once, in a folder of its own with what it reads of others; returns the folder."""

    @cache
    def finish(command: str) -> Path:
        folder = tmp_path_factory.mktemp("command")
        (folder / "outputs").mkdir()
        for name, earlier in (("own_module", OWN_MODULE), ("lora", LORA)):
            if f"outputs/{name}" in command:
                (folder / "outputs" / name).symlink_to(finish(earlier) / "outputs" / name)
        run_command(command, folder, sys.executable if command in FRESH else get_python())
        return folder

    return finish
