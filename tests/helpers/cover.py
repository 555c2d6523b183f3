"""Choose a few cells of a matrix that together still try every pair of values that occurs anywhere in it.

Most bugs need one value or two together, so a covering array finds nearly all that the whole product does, at a small
part of its cost (Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", 2004).
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import pytest

Cell = Mapping[str, Hashable]
"""The value of each feature. A feature that is off, or does not apply to a cell, may be left out: its value is None.

So the cover has each value with and without each feature. A default is given as a value where a cell may name it too.
"""

Pair = frozenset[tuple[str, Hashable]]


class Matrix:
    """A matrix of test cells, divided into what every change, `make test-all` and `make matrices` run.

    Args:
        name: The name in the table of docs/matrices.md.
        cells: The features of each cell, by the id of its test. Cells that are impossible are left out.
        fast: Ids of cells that `make test` runs.
        always: Ids of cells that `make test-all` runs in any case: each feature alone, and each cell that has ever
            failed.
        whole: Whether `make test-all` runs all cells. Use it for a small matrix, or one whose cells have few pairs in
            common.
        costs: What a cell costs compared with others, by id, 1 where nothing is given. Cheap cells are preferred.
    """

    def __init__(
        self,
        name: str,
        cells: Mapping[str, Cell],
        *,
        fast: Collection[str] = (),
        always: Collection[str] = (),
        whole: bool = False,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        unknown = sorted({*fast, *always} - cells.keys())
        if unknown:
            raise ValueError(f"{name}: {', '.join(unknown)} is no cell of the matrix")
        self.name = name
        self.cells = cells
        self.fast = fast
        self.always = cells.keys() if whole else always
        self.costs = costs or {}
        self.groups: dict[str, Sequence[str]] = {}
        """The cells of each test that has several, by the test's id. All other tests have the id of their cell."""

    @cached_property
    def chosen(self) -> frozenset[str]:
        """Ids of the cells that `make test-all` runs.

        Cells are taken one by one, each time the one that adds most pairs for its cost.
        """
        chosen = {*self.fast, *self.always}
        left = self.list_pairs(self.cells) - self.list_pairs(chosen)
        new = {name: pairs & left for name, pairs in self.pairs.items()}
        while left:
            best = max(new, key=lambda name: len(new[name]) / self.costs.get(name, 1))
            chosen.add(best)
            left -= new[best]
            new = {name: rest for name, pairs in new.items() if (rest := pairs & left)}
        return frozenset(chosen)

    @cached_property
    def pairs(self) -> dict[str, set[Pair]]:
        """The pairs of values of each cell. In a matrix of one feature, a value stands alone."""
        nothing = dict.fromkeys(feature for cell in self.cells.values() for feature in cell)
        size = min(len(nothing), 2)
        return {
            name: set(map(frozenset, combinations({**nothing, **cell}.items(), size)))
            for name, cell in self.cells.items()
        }

    def list_pairs(self, names: Iterable[str]) -> set[Pair]:
        """Return every pair of values that occurs in the cells of these names."""
        return {pair for name in names for pair in self.pairs[name]}

    def mark(self, name: str) -> tuple[pytest.MarkDecorator, ...]:
        """Return the marks of a cell's test."""
        own = pytest.mark.matrix(self.name)
        if name in self.fast:
            return (own,)
        return own, pytest.mark.slow if name in self.chosen else pytest.mark.release

    def list_parameters(self, values: Mapping[str, tuple[Any, ...]]) -> list[Any]:
        """Return the arguments of `pytest.mark.parametrize`: for each cell its ``values``, id and marks."""
        return [pytest.param(*values[name], id=name, marks=self.mark(name)) for name in self.cells]

    def make_group(self, name: str, cells: Sequence[str], *values: Any) -> Any:
        """Return an argument of `pytest.mark.parametrize` for a test of several cells, whose marks are the same."""
        marks = [self.mark(cell) for cell in cells]
        if any(other != marks[0] for other in marks):
            raise ValueError(f"{self.name}: the cells of {name} run in different tiers")
        self.groups[name] = cells
        return pytest.param(*values, id=name, marks=marks[0])


def join_flags(table: Mapping[str, Mapping[str, Any]], names: str) -> dict[str, Any]:
    """Return the flags of several ``names``, such as "compiled+offloaded", of a table with the flags of each name."""
    return {flag: value for name in names.split("+") for flag, value in table[name].items()}
