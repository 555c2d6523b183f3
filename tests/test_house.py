"""Files, folders and functions stay small enough to be read; `tools/count_house.py` counts more."""

import pytest
from helpers import house


@pytest.mark.guarantees("sizes-of-files")
def test_files_are_short() -> None:
    assert house.find_long_files() == {}


@pytest.mark.guarantees("sizes-of-files")
def test_folders_are_small() -> None:
    assert house.find_full_folders() == {}


@pytest.mark.guarantees("sizes-of-files")
def test_functions_are_short() -> None:
    assert house.find_long_functions() == {}
