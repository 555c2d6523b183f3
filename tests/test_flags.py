"""Every figure of ``docs/flags.md``, measured."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.flags import FLAGS, Setting, measure
from helpers.pipeline_flags import PIPELINE_FLAGS, measure_stages
from helpers.ranks import run_ranks
from torch._dynamo.utils import counters

from tools.flags import PAGE, make_page

SETTINGS = [
    pytest.param(setting, id=f"{flag.name}-{setting.value}", marks=pytest.mark.slow if setting.is_slow else ())
    for flag in FLAGS
    for setting in flag.settings
    if flag.measured
]


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """Figures of the values that are the defaults, all in one run."""

    def run() -> dict[str, Any]:
        counters.clear()  # of the tests before
        return measure(Setting(value="", figures={}))

    return run_ranks(run, 2)[0]


@pytest.mark.guarantees("effects-of-flags", "list-of-flags", "deferred-reduction", "flags-are-asserted")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_value_of_a_flag_has_the_figures_of_the_page(
    setting: Setting, compile_without_code: None, defaults: dict[str, Any]
) -> None:
    is_default = replace(setting, value="", figures={}) == Setting(value="", figures={}) and setting.value != "chunked"
    figures = defaults if is_default else run_ranks(measure, setting.ranks, setting)[0]
    assert {name: figures[name] for name in setting.figures} == setting.figures


STAGES = [
    pytest.param(setting, id=f"{flag.name}-{setting.value}") for flag in PIPELINE_FLAGS for setting in flag.settings
]


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    """Figures of pipelines by their flags, which several settings share."""
    return {}


@pytest.mark.guarantees("effects-of-flags")
@pytest.mark.slow
@pytest.mark.parametrize("setting", STAGES)
def test_a_value_of_a_flag_of_pipelines_has_the_figures_of_the_page(
    setting: Setting, measured: dict[str, dict[str, Any]]
) -> None:
    key = repr(setting.flags)
    if key not in measured:
        measured[key] = run_ranks(measure_stages, setting.ranks, setting)[0]
    assert measured[key] == setting.figures


@pytest.mark.guarantees("effects-of-flags", "flags-page")
def test_the_page_says_so() -> None:
    assert PAGE.read_text() == make_page(), "run `python tools/flags.py`"
