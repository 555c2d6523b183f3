"""What the tables of mistakes begin with."""

import io
from contextlib import redirect_stdout

import pytest
from helpers.mistakes import Case, train_checkpoint, write_run

from lightning_fsdp2.cli import FSDP2CLI


@pytest.fixture(scope="session")
def _parsed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parse a config before processes are forked, so that each of them finds what jsonargparse keeps."""
    folder = tmp_path_factory.mktemp("parsed")
    write_run(folder, Case(""))
    with redirect_stdout(io.StringIO()), pytest.raises(SystemExit, match="0"):
        FSDP2CLI(["fit", f"--config={folder / 'run.yaml'}", "--print_config"])


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory, _parsed: None) -> None:
    """Write the checkpoint with which some mistakes begin."""
    train_checkpoint(tmp_path_factory.mktemp("trained"))
