"""Progress on stderr, from the first second on."""

import io
import sys
import time

import pytest

from lightning_fsdp2.cli import progress
from lightning_fsdp2.cli.progress import show_progress


@pytest.mark.guarantees("progress-of-plans")
def test_lines_say_that_work_has_begun_and_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 0.05)
    with show_progress("planning") as report:
        assert capsys.readouterr().err == "planning ...\n"
        time.sleep(0.2)
        assert "planning: 0 s\n" in capsys.readouterr().err
        report(2, 7)
        time.sleep(0.2)
        assert "planning: 2 of 7, 0 s\n" in capsys.readouterr().err
    time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress("planning") as report:
        report(2, 7)
    assert "planning" in terminal.getvalue()
    assert "2/7" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased
