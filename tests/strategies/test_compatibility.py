"""Every option of the Trainer, every stock callback and the Tuner work under each strategy, or are refused by name.

The table is in ``helpers/trainer_options.py`` and ``helpers/callback_options.py``; ``make compatibility`` writes
docs/compatibility.md from it.
"""

import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
from helpers import callback_options, trainer_options  # noqa: F401 - they fill the table
from helpers.compatibility import OPTIONS, try_options
from helpers.strategies import STRATEGIES
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner

from tools.compatibility import HEADINGS, describe_options

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def get_names(group: str) -> list[str]:
    return [option.name for option in OPTIONS if option.group == group]


@pytest.mark.guarantees("every-option-is-tried")
def test_no_argument_of_the_trainer_is_missing() -> None:
    assert get_names("Trainer") == list(inspect.signature(pl.Trainer.__init__).parameters)[1:]


@pytest.mark.guarantees("every-option-is-tried")
def test_no_callback_is_missing() -> None:
    assert get_names("callbacks") == sorted(callbacks.__all__, key=str.lower)


@pytest.mark.guarantees("every-option-is-tried")
def test_no_method_of_the_tuner_is_missing() -> None:
    assert get_names("Tuner") == sorted(name for name in vars(Tuner) if not name.startswith("_"))


@pytest.mark.guarantees("options-work-or-are-refused")
def test_the_document_is_what_the_table_says() -> None:
    made_with = DOCUMENT.read_text().splitlines()[2]
    assert DOCUMENT.read_text() == describe_options(made_with)


@pytest.mark.guarantees("options-work-or-are-refused")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("group", HEADINGS)
def test_options_do_what_they_say_or_are_refused(strategy: str, group: str, tmp_path: Path) -> None:
    try_options(strategy, [option for option in OPTIONS if option.group == group and not option.slow], tmp_path)


@pytest.mark.guarantees("options-work-or-are-refused")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_further_options(strategy: str, tmp_path: Path) -> None:
    """What other fast tests see too."""
    try_options(strategy, [option for option in OPTIONS if option.slow], tmp_path)
