"""The page on planning says of its runs what the commands say that it shows."""

import pytest

from benchmarks.plans import PAGE, build_row, plan, read_commands

COMMANDS = read_commands()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_says_what_its_commands_say(name: str) -> None:
    assert f"| {' | '.join(build_row(name, plan(COMMANDS[name])))} |" in PAGE.read_text().splitlines()


def test_the_page_has_the_runs() -> None:
    assert len(COMMANDS) == 5
    rows = [line.split(" | ")[0].strip("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[2:] == [*COMMANDS]
