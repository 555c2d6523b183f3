"""A warning for a transformers that is newer than the newest that was checked."""

import logging
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_fsdp2.startup.versions import CHECKED, warn_of_newer_transformers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("installed", "warns"),
    [
        ("5.17.0", False),
        ("5.24.3", False),
        ("5.24rc1", False),
        ("5", False),
        ("no version", False),
        ("5.25.0.dev0", True),
        ("5.25rc1", True),
        ("6.0.0", True),
        ("6", True),
    ],
)
def test_only_a_newer_version_is_warned_of(installed: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with (
        patch("lightning_fsdp2.startup.versions.version", return_value=installed),
        caplog.at_level(logging.WARNING, "lightning_fsdp2"),
    ):
        warn_of_newer_transformers()
    assert [record.getMessage().startswith(f"transformers {installed} is newer") for record in caplog.records] == [
        True
    ] * warns


def test_a_missing_transformers_is_no_error() -> None:
    with patch("lightning_fsdp2.startup.versions.version", side_effect=PackageNotFoundError):
        warn_of_newer_transformers()


def test_the_pin_and_the_upper_end_are_those_that_were_checked() -> None:
    assert re.search(rf'"transformers>=[\d.]+,<{CHECKED[0]}\.{CHECKED[1] + 1}"', (ROOT / "pyproject.toml").read_text())
    assert f"\ntransformers=={CHECKED[0]}.{CHECKED[1]}." in (ROOT / "constraints.txt").read_text()
