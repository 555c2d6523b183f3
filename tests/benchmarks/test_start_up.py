"""The benchmark of the start runs each command, and has a row for it."""

import math

import pytest

from benchmarks.start_up import BASELINE, COMMANDS, main, run


@pytest.mark.slow
def test_every_command_has_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rounds", "2"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [BASELINE, *(f"lightning-fsdp2 {words}" for words in COMMANDS), "python -m lightning_fsdp2 --help"]
    assert [row[0] for row in rows[1:]] == [name for name in names for _ in ("wall", "CPU")]
    numbers = [float(number) for row in rows[3:] for number in row[2:5]]
    assert all(math.isfinite(number) and number > 0 for number in numbers)


def test_a_command_that_ends_differently_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended with 0"):
        run(["true"], code=2)
