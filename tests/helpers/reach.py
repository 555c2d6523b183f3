"""The files that decide the outcome of a test file: what it imports, names or runs, closed over their imports."""

import ast
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "lightning_fsdp2"

PAGE = ROOT / "docs" / "test-all.md"
MATRICES_PAGE = ROOT / "docs" / "matrices.md"
"""What runs of all tests and of whole matrices write, which decides nothing."""

FOR_ALL = ("pyproject.toml", "constraints.txt", "tests/helpers/limits.py")
"""Files that decide every test."""

RUNS_THE_PACKAGE = re.compile(rf"lightning-fsdp2|-m {PACKAGE}|^{PACKAGE}$|(from|import) {PACKAGE}")
"""Text in the strings of a test that starts the command line, or a script: either can reach all of the package."""

NOT_FOLLOWED = ("tests/conftest.py", "tests/helpers/limits.py")
"""Files of all tests whose imports are not followed, nor are those of any ``__init__.py``."""

FILE_NAME = re.compile(r"\w+\.(py|js|sh)")
"""Name of a program, which a string may name if it is beside the file that runs it."""

CLASS_PATH = re.compile(rf"{PACKAGE}(?:\.\w+)+")


def find_reach(path: Path, deleted: Collection[Path] = ()) -> dict[Path, int]:
    """Return ``path`` and every file of the repository that it can reach, each with its distance in steps.

    Followed are imports, those inside of functions too; class paths in strings and configs; files and folders of the
    repository named in strings, such as ``"configs"``; files beside a test, named in strings; and each ``conftest.py``
    on the way down. A name that comes from the ``__init__.py`` of a package leads to the module that defines it, not to
    all that the package imports.

    Args:
        path: The file to begin with.
        deleted: Modules that no longer exist, but are reached by whoever still imports them.
    """
    reached: dict[Path, int] = {}
    for_all = [*(ROOT / name for name in FOR_ALL), *(folder / "conftest.py" for folder in path.parents)]
    waiting = deque([(path, 0), *((file, 1) for file in for_all if file.is_relative_to(ROOT))])
    while waiting:
        file, distance = waiting.popleft()
        if file not in reached and (file.is_file() or file in deleted):
            reached[file] = distance
            waiting += ((below, distance + 1) for below in _find_next(file))
    return reached


@cache
def _find_next(file: Path) -> tuple[Path, ...]:
    if file.suffix in (".yaml", ".yml"):
        return tuple(_find_modules(CLASS_PATH.findall(file.read_text())))
    is_followed = file.name != "__init__.py" and str(file.relative_to(ROOT)) not in NOT_FOLLOWED
    if file.suffix != ".py" or not is_followed or not file.is_file():
        return ()
    tree = ast.parse(file.read_text())
    names = [*_list_imports(tree, file), *_list_uses_of_package(tree)]
    strings = set(_list_strings(tree))
    if file.is_relative_to(ROOT / PACKAGE):
        # in longer strings it tells people of other parts of itself
        return tuple(_find_modules([*names, *filter(CLASS_PATH.fullmatch, strings)]))
    names += [name for string in strings for name in CLASS_PATH.findall(string)]
    found = [below for string in strings if _is_path(string) for below in _list_files(ROOT / string)]
    found += [file.with_name(string) for string in strings if FILE_NAME.fullmatch(string)]
    if f"{PACKAGE}.__file__" in names or any(map(RUNS_THE_PACKAGE.search, strings)):
        found += _list_files(ROOT / PACKAGE)
    return (*_find_modules(names), *found)


def _list_imports(tree: ast.AST, file: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            home = file.parents[node.level - 1].relative_to(ROOT).parts if node.level else ()
            home = ".".join([*home, *([node.module] if node.module else [])])
            yield from (f"{home}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            # what is taken from the package itself is seen where it is taken
            yield from (alias.name for alias in node.names if alias.name != PACKAGE)


def _list_uses_of_package(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE:
            yield f"{PACKAGE}.{node.attr}"


def _list_strings(tree: ast.AST) -> Iterator[str]:
    """Yield all strings but docstrings."""
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.value


def _find_modules(names: Iterable[str]) -> Iterator[Path]:
    """Yield the file of each dotted name: the module, or those that the package of this name takes its names from."""
    for name in names:
        folder, parts = ROOT, name.split(".")
        if not (ROOT / parts[0]).exists():
            folder = ROOT / "tests"
        while parts and (folder / parts[0]).is_dir():
            folder = folder / parts.pop(0)
        init = folder / "__init__.py"
        module = folder / f"{parts[0]}.py" if parts else init
        yield init
        if parts:
            yield module
        if not (parts and module.is_file()) and init.is_file():
            exports = _find_exports(init)
            wanted = [parts[0]] if parts else list(exports)
            yield from _find_modules(exports[part] for part in wanted if part in exports)


@cache
def _find_exports(init: Path) -> dict[str, str]:
    """Return where each name of a package's ``__init__.py`` or of its stub comes from, as a dotted name."""
    files = [file for file in (init, init.with_suffix(".pyi")) if file.is_file()]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    package = f"{init.parent.relative_to(ROOT)}.".replace("/", ".")
    homes = {node: f"{package if node.level else ''}{node.module}" for node in imports}
    return {alias.name: f"{home}.{alias.name}" for node, home in homes.items() for alias in node.names}


def _is_path(text: str) -> bool:
    """Return whether a string names something in the repository, from its top.

    Tests are imported, and their names stand in tables; of them only the whole folder counts, with a slash.
    """
    top, slash, rest = text.partition("/")
    if top == "tests":
        return bool(slash and not rest)
    return bool(re.fullmatch(r"\.?\w[\w./-]*", text)) and top in _list_top() and (ROOT / text).exists()


@cache
def _list_top() -> frozenset[str]:
    """Return the names at the top of the repository, but for environments, caches and what a build leaves."""
    ours = {".ci", ".github", ".dockerignore", ".pre-commit-config.yaml"}
    shown = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    return frozenset(ours | shown - {"tests", "site", "build", "dist"})


def _list_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else path.rglob("*")
    return [file for file in files if file.suffix != ".pyc" and file not in (PAGE, MATRICES_PAGE)]


def forget() -> None:
    """Look at the files anew."""
    for cached in (_find_next, _find_exports, _list_top):
        cached.cache_clear()
