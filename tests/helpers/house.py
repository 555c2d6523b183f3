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

FLAG_LISTS = {"parallelizer.py", "recipes/nvfsdp.py"}
"""Files whose functions have a parameter for each flag, by contract; their signatures do not count."""

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
        for name, size in _measure_functions(
            ast.parse(path.read_text()), with_signature=_get_name(path) not in FLAG_LISTS
        )
    }
    return {name: size for name, size in sizes.items() if size > MOST_LINES_OF_FUNCTION}


def _get_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _measure_functions(tree: ast.AST, prefix: str = "", *, with_signature: bool) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _measure_functions(node, prefix, with_signature=with_signature)
            continue
        if not isinstance(node, ast.ClassDef):
            signature = node.body[0].lineno - node.lineno if with_signature else 0
            yield prefix + node.name, signature + _count_lines_of_body(node)
        yield from _measure_functions(node, f"{prefix}{node.name}.", with_signature=with_signature)


def _count_lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1 if body else 0
