"""The page on planning says of its runs what the commands say that it shows, and that is near what was measured."""

from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.plans import (
    PAGE,
    PIPELINES,
    PUBLISHED,
    PUBLISHED_RUNS,
    PUBLISHED_UTILISATION,
    RUNS,
    build_pipeline_row,
    build_published_row,
    build_row,
    plan,
    read_commands,
)

COMMANDS, PUBLISHED_COMMANDS = read_commands(RUNS), read_commands(PUBLISHED_RUNS)
PIPELINE_COMMANDS = read_commands(PIPELINES)
MATCHED = [name for name in PUBLISHED_COMMANDS if PUBLISHED[name[0]].is_matched]


IN_TEST_ALL = ("8B, 64 shards", "A: 8B, 8 shards")
"""Rows that `make test-all` plans again. All the others take six minutes, and only a release needs them."""


def mark_rows(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.slow if name in IN_TEST_ALL else pytest.mark.release) for name in names
    ]


def read_row(name: str) -> list[str]:
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.guarantees("table-of-plans")
@pytest.mark.parametrize("name", mark_rows(COMMANDS))
def test_the_page_says_what_its_commands_say(name: str) -> None:
    assert read_row(name) == build_row(name, plan(COMMANDS[name]))


@pytest.mark.guarantees("published-runs")
@pytest.mark.parametrize("name", mark_rows(MATCHED))  # the others cost as much again and decide nothing
def test_the_page_says_of_published_runs_what_their_commands_say(name: str) -> None:
    assert read_row(name) == build_published_row(name, plan(PUBLISHED_COMMANDS[name]))


@pytest.mark.guarantees("published-pipelines")
@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PIPELINE_COMMANDS)
def test_the_page_says_of_pipelines_what_their_commands_say(name: str) -> None:
    assert read_row(name) == build_pipeline_row(name, plan(PIPELINE_COMMANDS[name]))


@pytest.mark.guarantees("published-pipelines")
@pytest.mark.parametrize("name", PIPELINE_COMMANDS)
def test_what_was_published_of_pipelines_is_between_bound_and_estimate(name: str) -> None:
    _, published, about, at_most, *_ = (cell.rstrip("%") for cell in read_row(name))
    assert int(published) == round(100 * PUBLISHED_UTILISATION[name.partition(":")[0]])
    assert 0.75 * int(published) < int(about) <= int(published) < int(at_most)


def test_the_page_has_the_runs() -> None:
    assert len(COMMANDS) == 5
    assert [name[0] for name in PUBLISHED_COMMANDS] == [*PUBLISHED]
    for name in (*COMMANDS, *PUBLISHED_COMMANDS):
        read_row(name)


@pytest.mark.guarantees("bounds", "published-runs")
@pytest.mark.parametrize("name", MATCHED)
def test_bounds_hold_and_estimates_are_near_what_was_measured(name: str) -> None:
    _, _, at_most, _, ratio, _, _, held, verdict = read_row(name)
    published = PUBLISHED[name[0]]
    assert int(at_most.replace(",", "")) > max(published.tokens)
    assert float(ratio) == pytest.approx(1, abs=0.25 if name[0] in "AB" else 0.35)
    assert float(held.split(" to ")[1]) > max(published.gibibytes, default=0)
    assert verdict != "does not fit"
