"""Every figure of ``docs/flags.md``, measured."""

import pytest
from helpers.flags import FLAGS, Setting, measure
from helpers.ranks import run_ranks

from tools.flags import PAGE, make_page

SETTINGS = [
    pytest.param(setting, id=f"{flag.name}-{setting.value}", marks=pytest.mark.slow if setting.is_slow else ())
    for flag in FLAGS
    for setting in flag.settings
    if flag.measured
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_value_of_a_flag_has_the_figures_of_the_page(setting: Setting, compile_without_code: None) -> None:
    figures = run_ranks(measure, setting.ranks, setting)[0]
    assert {name: figures[name] for name in setting.figures} == setting.figures


def test_the_page_says_so() -> None:
    assert PAGE.read_text() == make_page(), "run `python tools/flags.py`"
