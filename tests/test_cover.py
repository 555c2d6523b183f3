"""A matrix by cover tries every combination that the whole tries, and its marks say who runs which cell."""

from itertools import combinations, product

import pytest
from helpers.cover import Matrix

VALUES = {"mesh": ["dp2", "tp2", "cp2"], "clip": [None, 0.1], "tied": [False, True], "precision": ["32", "16", "8"]}
CELLS = {
    "-".join(map(str, cell)): dict(zip(VALUES, cell, strict=True))
    for cell in product(*VALUES.values())
    if cell[0] != "cp2" or cell[3] != "8"
}


@pytest.mark.guarantees("sample-of-comparisons")
@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_of_the_whole_is_in_the_chosen(strength: int) -> None:
    matrix = Matrix("example", CELLS, strength=strength)
    for features in combinations(VALUES, strength):
        whole = {tuple(cell[feature] for feature in features) for cell in CELLS.values()}
        tried = {tuple(CELLS[name][feature] for feature in features) for name in matrix.chosen}
        assert tried == whole
    assert len(matrix.chosen) <= {2: 11, 3: 25}[strength] < len(CELLS)


def test_features_that_do_not_apply_are_left_out() -> None:
    cells = {"a": {"mesh": "dp2"}, "b": {"mesh": "dp2", "clip": 1}, "c": {"mesh": "tp2", "clip": 1}}
    assert Matrix("example", cells).chosen == {"b", "c"}


def test_cheap_cells_are_preferred() -> None:
    cells = {name: {"mesh": "dp2", "clip": 1} for name in ("dear", "cheap")}
    assert Matrix("example", cells, costs={"dear": 8.0}).chosen == {"cheap"}


@pytest.mark.guarantees("sample-of-comparisons")
def test_marks_say_who_runs_a_cell() -> None:
    cells = {"fast": {"a": 1, "b": 1}, "failed": {"a": 1, "b": 1}, "new": {"a": 2, "b": 1}, "same": {"a": 2, "b": 1}}
    matrix = Matrix("example", cells, fast=["fast"], always=["failed"])
    assert matrix.chosen == {"fast", "failed", "new"}
    marks = {
        parameter.id: [mark.name for mark in parameter.marks]
        for parameter in matrix.list_parameters({name: (name,) for name in cells})
    }
    assert marks == {
        "fast": ["matrix"],
        "failed": ["matrix", "slow"],
        "new": ["matrix", "slow"],
        "same": ["matrix", "release"],
    }


def test_cells_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="example: gone is no cell"):
        Matrix("example", CELLS, always=["gone"])
