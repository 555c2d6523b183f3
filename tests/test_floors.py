"""Imports go down: what a module knows of is on a floor below its own, and in no circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_fsdp2

PACKAGE = Path(lightning_fsdp2.__file__).parent

FLOORS = (
    {"_refusals", "compat", "config", "data", "schedulers"},
    {"mesh", "_cli_types"},
    {"modules", "ranks"},
    {"weights"},
    {"parallel"},
    {"parallelizer", "checkpoint"},
    {"export"},
    {"managers", "callbacks"},
    {"models", "loggers"},
    {"strategies"},
    {"plan"},
    {"cli"},
    {"__main__"},
)
"""From the ground up; ``__init__`` is the door to all of them."""


def find_imports(path: Path) -> Iterator[str]:
    """The parts of the package that a file imports, but for annotations."""
    tree = ast.parse(path.read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    guarded = {inner for guard in guards for inner in ast.walk(guard)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node not in guarded
            and (node.module or "").startswith("lightning_fsdp2.")
        ):
            yield str(node.module).split(".")[1]


def get_floor(part: str) -> int:
    [floor] = [number for number, parts in enumerate(FLOORS) if part in parts]
    return floor


def test_imports_go_down() -> None:
    climbing = []
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own != "__init__":
            others = {part for part in find_imports(path) if part != own}
            climbing += [(path.name, part) for part in others if get_floor(part) >= get_floor(own)]
    assert climbing == []
