"""A run goes on when nothing can be written to standard output."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer
from rich.console import Console
from torch import nn

from lightning_fsdp2 import FSDP2Strategy
from lightning_fsdp2.callbacks import ModelSummary, TrainingProgressBar
from lightning_fsdp2.callbacks.standard_output import StandardOutput

TEXT = "0:01 • 0:02 Größe"


def break_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    set_output(writer)


def fill_disk() -> None:
    set_output(os.open("/dev/full", os.O_WRONLY))


def close() -> None:
    set_output(os.open(os.devnull, os.O_WRONLY))
    sys.stdout.close()


def hang_up() -> None:
    terminal, writer = os.openpty()
    set_output(writer)
    os.close(terminal)


def leave_out() -> None:
    sys.stdout = None  # type: ignore[assignment]


def set_output(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


@pytest.mark.parametrize("make_callback", [ModelSummary, TrainingProgressBar])
@pytest.mark.parametrize("lose", [break_pipe, fill_disk, close, hang_up, leave_out])
def test_a_run_does_without_its_output(lose: Callable[[], None], make_callback: type[pl.Callback]) -> None:
    def run() -> int:
        lose()
        has_bar = make_callback is TrainingProgressBar
        trainer = make_trainer(FSDP2Strategy(), callbacks=[make_callback()], enable_progress_bar=has_bar, max_steps=2)
        trainer.fit(Regressor(), make_loader(make_batches(4)))
        if trainer.is_global_zero and lose in (break_pipe, fill_disk, hang_up):
            sys.stdout.write("The end.")
            sys.stdout.flush()  # as Python does at the end
        return trainer.global_step

    assert run_ranks(run, 2) == [2, 2]


def test_a_terminal_that_is_gone_in_a_run_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> tuple[list[str], bool]:
        terminal, writer = os.openpty()
        set_output(writer)
        output = StandardOutput()
        was_terminal = output.isatty()
        output.write("here\n")
        output.flush()
        os.close(terminal)
        for _ in range(3):
            output.write("gone\n")
            output.flush()
        assert not output.isatty()
        assert output.encoding.lower() == "utf-8"
        return caplog.messages, was_terminal

    messages, was_terminal = run_ranks(run, 1, group=False)[0]
    assert was_terminal
    assert messages == [
        "Nothing can be written to standard output ([Errno 5] Input/output error). The run goes on without it."
    ]


def test_what_can_be_written_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    output: Any = StandardOutput()
    assert output.write("text") == 4
    output.flush()
    assert capsys.readouterr().out == "text"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "0:01 ? 0:02 Gr??e"), ("latin-1", "0:01 ? 0:02 Größe"), ("utf-8", TEXT)]
)
def test_characters_that_the_encoding_lacks_are_replaced(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = io.BytesIO()
    stream = io.TextIOWrapper(file, encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    output: Any = StandardOutput()
    Console(file=output).print(TEXT)
    stream.write("the user's own")
    stream.flush()
    assert file.getvalue().decode(encoding) == f"{shown}\nthe user's own"
    assert not caplog.messages


def test_the_table_has_names_that_the_encoding_lacks(caplog: pytest.LogCaptureFixture) -> None:
    class Größe(Regressor):
        def build(self) -> None:
            super().build()
            self.größe = nn.Linear(2, 2)

    def run() -> str:
        file = io.BytesIO()
        with redirect_stdout(io.TextIOWrapper(file, "ascii")):
            trainer = make_trainer(FSDP2Strategy(), callbacks=[ModelSummary()], max_steps=1)
            trainer.fit(Größe(), make_loader(make_batches(2)))
            assert not [message for message in caplog.messages if "standard output" in message]
            return file.getvalue().decode()

    assert "gr??e" in run_ranks(run, 1)[0]


def test_a_file_of_the_users_own_is_left_to_the_user(tmp_path: Path) -> None:
    """After an error, what the process writes to its standard output still arrives."""
    reader, writer = os.pipe()

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("No space left on device")

        def fileno(self) -> int:
            return file.fileno()

    def run() -> str:
        os.dup2(writer, 1)
        with redirect_stdout(Full()):
            StandardOutput().write("lost")
        os.write(1, b"arrives")
        file.write("arrives")
        file.flush()
        return os.read(reader, 100).decode()

    with open(tmp_path / "log", "w") as file:
        assert run_ranks(run, 1, group=False) == ["arrives"]
    assert (tmp_path / "log").read_text() == "arrives"
