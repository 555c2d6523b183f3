"""How large the package's files, folders and functions are."""

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_fsdp2

PACKAGE = Path(lightning_fsdp2.__file__).parent

MOST_LINES = 500
"""Lines of a file."""

MOST_FILES = 14
"""Files of a folder."""

MOST_LINES_OF_FUNCTION = 50
"""Lines of a function, with its signature and without its docstring."""

LONG_FILES = {"config.py"}
"""Files that are lists of flags with their texts."""

FULL_FOLDERS = {"callbacks"}
"""Folders of files that have nothing to do with each other."""


def find_long_files() -> dict[str, int]:
    """Return the files with too many lines, with that number."""
    sizes = {_get_name(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    return {name: size for name, size in sizes.items() if size > MOST_LINES and name not in LONG_FILES}


def find_full_folders() -> dict[str, int]:
    """Return the folders with too many files, with that number."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    sizes = {_get_name(folder): len(list(folder.glob("*.py"))) for folder in folders}
    return {name: size for name, size in sizes.items() if size > MOST_FILES and name not in FULL_FOLDERS}


def find_long_functions() -> dict[str, int]:
    """Return the functions with too many lines, with that number."""
    sizes = {
        f"{_get_name(path)}:{name}": size
        for path in PACKAGE.rglob("*.py")
        for name, size in _measure_functions(ast.parse(path.read_text()))
    }
    return {name: size for name, size in sizes.items() if size > MOST_LINES_OF_FUNCTION}


def _get_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _measure_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _measure_functions(node, prefix)
            continue
        if not isinstance(node, ast.ClassDef):
            docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            yield prefix + node.name, _count_lines(node) - (_count_lines(docstring) if docstring else 0)
        yield from _measure_functions(node, f"{prefix}{node.name}.")


def _count_lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1
