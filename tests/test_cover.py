"""A matrix by cover tries every combination that the whole tries, and its marks say who runs which cell."""

from itertools import combinations, product
from pathlib import Path

import pytest
from helpers.cover import Matrix
from helpers.results import FileLedger

from tools.result_pages import build_matrix_row

VALUES = {"mesh": ["dp2", "tp2", "cp2"], "clip": [None, 0.1], "tied": [False, True], "precision": ["32", "16", "8"]}
CELLS = {
    "-".join(map(str, cell)): dict(zip(VALUES, cell, strict=True))
    for cell in product(*VALUES.values())
    if cell[0] != "cp2" or cell[3] != "8"
}


@pytest.mark.guarantees("sample-of-comparisons")
def test_every_combination_of_the_whole_is_in_the_chosen() -> None:
    matrix = Matrix("example", CELLS)
    for features in combinations(VALUES, 2):
        whole = {tuple(cell[feature] for feature in features) for cell in CELLS.values()}
        tried = {tuple(CELLS[name][feature] for feature in features) for name in matrix.chosen}
        assert tried == whole
    assert len(matrix.chosen) <= 11 < len(CELLS)


def test_each_value_is_tried_with_and_without_each_feature() -> None:
    cells = {"a": {"mesh": "dp2"}, "b": {"mesh": "dp2", "clip": 1}, "c": {"mesh": "tp2", "clip": 1}}
    assert Matrix("example", cells).chosen == {"a", "b", "c"}
    cells["d"] = {"clip": 1, "mesh": "tp2"}
    assert Matrix("example", cells).chosen == {"a", "b", "c"}


def test_cells_of_one_feature_are_chosen_too() -> None:
    assert Matrix("example", {"a": {"mesh": "dp2"}, "b": {"mesh": "tp2"}}).chosen == {"a", "b"}
    assert Matrix("example", {"plain": {}, "a": {"mesh": "dp2"}}).chosen == {"plain", "a"}


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


def test_all_of_a_whole_matrix_is_chosen() -> None:
    cells = {"a": {"tp": 1, "sp": 1}, "b": {"tp": 1, "sp": 1}}
    assert Matrix("m", cells).chosen == {"a"}
    assert Matrix("m", cells, whole=True).chosen == {"a", "b"}


def test_cells_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="example: gone is no cell"):
        Matrix("example", CELLS, always=["gone"])


def test_tests_of_several_cells_have_the_marks_of_each() -> None:
    cells = {"fast": {"a": 1, "b": 1}, "new": {"a": 2, "b": 1}, "other": {"a": 1, "b": 2}}
    matrix = Matrix("example", cells, fast=["fast"])
    group = matrix.make_group("group", ["new", "other"], 1, 2)
    assert (group.id, group.values, group.marks) == ("group", (1, 2), matrix.mark("new"))
    assert matrix.groups == {"group": ["new", "other"]}
    with pytest.raises(ValueError, match="example: the cells of mixed run in different tiers"):
        matrix.make_group("mixed", ["fast", "new"])


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped"])
def test_the_page_counts_pairs_of_cells_that_passed(outcome: str, tmp_path: Path) -> None:
    cells = {f"{a}{b}": {"a": a, "b": b} for a in (1, 2) for b in (1, 2)}
    matrix = Matrix("example", cells, fast=["11"])
    matrix.groups["group"] = ["21", "22"]
    ledger = FileLedger(Path(__file__), tmp_path / "ledger.jsonl")
    result = {"outcome": "passed", "seconds": 2.0, "matrix": "example"}
    ledger.add("test_cover.py::test_one[11]", kind="fast", **result)
    ledger.add("test_cover.py::test_one[12]", kind="release", **result)
    ledger.add("test_cover.py::test_several[group]", kind="slow", **{**result, "outcome": outcome})
    ledger.add("test_cover.py::test_other[22]", kind="slow", **{**result, "matrix": "another"})
    passed = "4 | 4 | 3" if outcome == "passed" else "4 | 2 | 1"
    assert build_matrix_row(ledger, matrix) == f"| example | `tests/test_cover.py` | 4 | 4 | 1 | {passed} | 6 | 4 |"
