"""Choose a few cells of a matrix that together still try every pair of values that occurs anywhere in it.

Most bugs need one value or two together, so a covering array finds nearly all that the whole product does, at a small
part of its cost (Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", 2004).
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import cached_property
from itertools import combinations
from typing import Any

import pytest

Cell = Mapping[str, Hashable]
"""The value of each feature. A feature that does not apply to a cell is left out."""

Combination = frozenset[tuple[str, Hashable]]


class Matrix:
    """A matrix of test cells, divided into what every change, `make test-all` and `make matrices` run.

    Args:
        name: The name in the table of docs/matrices.md.
        cells: The features of each cell, by the id of its test. Cells that are impossible are left out.
        fast: Ids of cells that `make test` runs.
        always: Ids of cells that `make test-all` runs in any case: each feature alone, and each cell that has ever
            failed.
        strength: How many values have to be tried together: 2 for pairs, 3 for triples.
        costs: What a cell costs compared with others, by id, 1 where nothing is given. Cheap cells are preferred.
    """

    def __init__(
        self,
        name: str,
        cells: Mapping[str, Cell],
        *,
        fast: Collection[str] = (),
        always: Collection[str] = (),
        strength: int = 2,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        unknown = sorted({*fast, *always} - cells.keys())
        if unknown:
            raise ValueError(f"{name}: {', '.join(unknown)} is no cell of the matrix")
        self.name = name
        self.cells = cells
        self.fast = fast
        self.always = always
        self.strength = strength
        self.costs = costs or {}

    @cached_property
    def chosen(self) -> frozenset[str]:
        """Ids of the cells that `make test-all` runs.

        Cells are taken one by one, each time the one that adds most combinations for its cost.
        """
        chosen = {*self.fast, *self.always}
        left = self.list_combinations(self.cells) - self.list_combinations(chosen)
        new = {name: combine(cell, self.strength) & left for name, cell in self.cells.items()}
        while left:
            best = max(new, key=lambda name: len(new[name]) / self.costs.get(name, 1))
            chosen.add(best)
            left -= new[best]
            new = {name: rest for name, combinations in new.items() if (rest := combinations & left)}
        return frozenset(chosen)

    def list_combinations(self, names: Iterable[str]) -> set[Combination]:
        """Return every combination of values that occurs in the cells of these names."""
        return {combination for name in names for combination in combine(self.cells[name], self.strength)}

    def mark(self, name: str) -> tuple[pytest.MarkDecorator, ...]:
        """Return the marks of a cell's test."""
        own = pytest.mark.matrix(self.name)
        if name in self.fast:
            return (own,)
        return own, pytest.mark.slow if name in self.chosen else pytest.mark.release

    def list_parameters(self, values: Mapping[str, tuple[Any, ...]]) -> list[Any]:
        """Return the arguments of `pytest.mark.parametrize`: for each cell its ``values``, id and marks."""
        return [pytest.param(*values[name], id=name, marks=self.mark(name)) for name in self.cells]


def combine(cell: Cell, strength: int) -> set[Combination]:
    """Return the combinations of ``strength`` values of a cell."""
    return set(map(frozenset, combinations(cell.items(), strength)))
