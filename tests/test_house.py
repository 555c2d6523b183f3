"""Files, folders and functions stay small enough to be read; `tools/count_house.py` counts more."""

from helpers import house


def test_files_are_short() -> None:
    assert house.find_long_files() == {}


def test_folders_are_small() -> None:
    assert house.find_full_folders() == {}


def test_functions_are_short() -> None:
    assert house.find_long_functions() == {}
