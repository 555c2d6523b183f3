"""A run goes on when nothing can be written to standard output."""

import os
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer

from lightning_fsdp2 import FSDP2Strategy
from lightning_fsdp2.callbacks import ModelSummary, TrainingProgressBar
from lightning_fsdp2.callbacks.standard_output import StandardOutput


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
