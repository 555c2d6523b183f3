"""Write the page that names, for each sentence of the guarantees, the tests that hold it.

Tests are marked with ``pytest.mark.guarantees("slug", ...)``. The slugs and their sentences are in
tests/guarantees.yaml. Marks are read from the source, without importing it.

Usage: python tools/guarantees.py [--output docs/guaranteed-by.md]
"""

import argparse
import ast
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests/"
CLAIMS = TESTS / "guarantees.yaml"

WHOLE_PAGE = "docs/guarantees.md"
"""The page of which every sentence is listed; of other pages, the list has the sentences that are claims."""

OTHER_PAGES = (
    "docs/",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "configs/README.md",
    "examples/README.md",
)
"""Pages that may have claims. The ledger of tests finds here the files that decide this test."""

TIERS = {"slow": "`make test-all`", "release": "`make matrices`"}
"""What runs the tests with a mark, and not those without."""

PART = "all cases: "
"""Prefix of the note on a test of which some cases run only in a later tier."""

WHOLE_FILE = "all of its tests"
"""Name of a test that stands for a whole file of tests."""

INTRODUCTION = """\
# What holds each guarantee

Written by tools/guarantees.py from the marks of the tests. The first table has every sentence of [what you can rely
on](guarantees.md), the others have claims of further pages. A test runs for every change, unless a note names the
command that runs it. If a note names a command for all cases, the command before it runs some of them, or every change
does if there is none before it. Comparisons of all families, and results of GPUs, are on pages that other commands have
written.

<div class="names-of-tests" markdown>
"""


@dataclass(frozen=True)
class Claim:
    """A sentence of a page, and what holds it apart from tests."""

    slug: str
    page: str
    says: str
    results: dict[str, str] = field(default_factory=dict)
    """Commands by the pages of results that they write."""

    claims_nothing: str = ""
    """Why no test is needed; empty for claims."""


class Test(NamedTuple):
    """A test function, or a whole file of tests."""

    path: str
    name: str
    tier: str
    """What runs it, and all of its cases if these are not the same; empty if every change runs all of them."""


def read_claims() -> list[Claim]:
    """Return the sentences of tests/guarantees.yaml in their order."""
    pages = yaml.safe_load(CLAIMS.read_text())
    return [
        Claim(slug, page, **({"says": entry} if isinstance(entry, str) else entry))
        for page, entries in pages.items()
        for slug, entry in entries.items()
    ]


@cache
def list_sentences(page: str) -> list[str]:
    """Return the sentences and the table rows of a page without their markup, in their order."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(#.*|!\[.*\]\(.*\)|\|.*\n\|[ :|-]*\|)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    sentences: list[str] = []
    for block in re.split(r"\n\s*\n|^ *(?:[*-]|\d+\.) |(?=^\|)", text, flags=re.MULTILINE):
        words = " ".join(block.split())
        sentences += [words] if words.startswith("|") else re.split(r"(?<=[.?!])\s+", words)
    return [sentence for sentence in sentences if sentence]


@cache
def find_tests() -> dict[str, list[Test]]:
    """Return the tests that are marked with each slug."""
    tests = defaultdict(list)
    with _no_garbage_collection():
        for path in sorted(TESTS.rglob("test_*.py")):
            if "mark.guarantees(" in path.read_text():
                for slug, test in _read_marks(path):
                    tests[slug].append(test)
    return dict(tests)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Do not look for garbage: syntax trees consist of many objects, and would be searched again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def list_mistakes() -> list[str]:
    """Return what is wrong with the list of sentences and the marks, in words."""
    claims, tests = read_claims(), find_tests()
    listed = [claim.says for claim in claims if claim.page == WHOLE_PAGE]
    on_page = list_sentences(WHOLE_PAGE)
    mistakes = [f"not in {CLAIMS.name}: {sentence}" for sentence in on_page if sentence not in listed]
    for claim in claims:
        held = claim.slug in tests or claim.results
        if not claim.page.startswith(OTHER_PAGES):
            mistakes.append(f"{claim.page} is none of the pages that have claims")
        if claim.says not in (on_page if claim.page == WHOLE_PAGE else list_sentences(claim.page)):
            mistakes.append(f"{claim.page} does not say (any more): {claim.says}")
        if not held and not claim.claims_nothing:
            mistakes.append(f"no test is marked with {claim.slug!r}: {claim.says}")
        if held and claim.claims_nothing:
            mistakes.append(f"{claim.slug!r} is said to claim nothing, but something holds it")
    slugs = [claim.slug for claim in claims]
    mistakes += [f"two sentences are called {slug!r}" for slug in sorted({*slugs}) if slugs.count(slug) > 1]
    mistakes += [f"no sentence is called {slug!r}: {tests[slug][0].path}" for slug in sorted(tests.keys() - slugs)]
    return mistakes


def write_page() -> str:
    """Return the text of the page."""
    claims, tests = read_claims(), find_tests()
    lines = [INTRODUCTION]
    for page in dict.fromkeys(claim.page for claim in claims):
        title = re.search(r"^# (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert title is not None
        lines += [f"## [{title[1]}]({_get_link(page)})", "", "| sentence | held by |", "|---|---|"]
        lines += [
            f"| {_escape(claim.says)} | {'<br>'.join(_list_holders(claim, tests.get(claim.slug, [])))} |"
            for claim in claims
            if claim.page == page
        ]
        lines.append("")
    return "\n".join([*lines, "</div>", ""])


def _list_holders(claim: Claim, tests: list[Test]) -> Iterator[str]:
    if claim.claims_nothing:
        yield f"*{claim.claims_nothing}*"
    for page, command in claim.results.items():
        yield f"[{page.removeprefix('docs/').partition('#')[0]}]({_get_link(page)}), written by `{command}`"
    for path in dict.fromkeys(test.path for test in tests):
        yield f"[{path}]({_get_link(path)})"
        yield from (f"`{test.name}`{test.tier and f' ({test.tier})'}" for test in tests if test.path == path)


def _get_link(path: str) -> str:
    """Return a link from the folder of the page."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"


def _escape(sentence: str) -> str:
    return sentence.strip("| ").replace("|", r"\|")


def _read_marks(path: Path) -> Iterator[tuple[str, Test]]:
    name = str(path.relative_to(ROOT))
    of_module = _get_definitions(path).get("pytestmark")
    module_marks = _list_marks(of_module) if isinstance(of_module, ast.expr) else []
    functions = [node for node in _parse(path).body if isinstance(node, ast.FunctionDef)]
    tests = {node.name: node.decorator_list for node in functions if node.name.startswith("test")}
    tiers = {test: _find_tiers(path, marks + module_marks) for test, marks in tests.items()}
    for slug in _find_slugs(module_marks):
        yield slug, Test(name, WHOLE_FILE, write_note(set().union(*tiers.values())))
    for test, marks in tests.items():
        for slug in _find_slugs(marks):
            yield slug, Test(name, test, write_note(tiers[test]))


def _find_slugs(marks: list[ast.expr]) -> Iterator[str]:
    for mark in marks:
        for node in ast.walk(mark):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.guarantees":
                yield from (ast.literal_eval(argument) for argument in node.args)


def write_note(tiers: Set[str]) -> str:
    """Say what runs a test.

    Args:
        tiers: Marks of its cases that decide what runs them; "" stands for none of :data:`TIERS`.
    """
    first, *_, last = [tier for tier in ("", *TIERS) if tier in tiers] * 2
    commands = {"": "", **TIERS}
    if first == last:
        return commands[first]
    return "; ".join(filter(None, (commands[first], PART + commands[last])))


def _find_tiers(path: Path, marks: list[ast.expr]) -> set[str]:
    """Return what :func:`write_note` wants, for the marks of a test."""
    found = _find_marks(path, marks)
    if "release" in map(_get_mark, marks):
        return {"release"}
    if "slow" in map(_get_mark, marks):
        return found
    is_marked = any(_is_marked(*values) for mark in marks for values in _find_values(path, mark))
    return found if is_marked else {"", *found}


def _get_mark(node: ast.expr) -> str:
    return ast.unparse(node).removeprefix("pytest.mark.")


def _find_values(path: Path, mark: ast.AST | None) -> Iterator[tuple[Path, ast.expr]]:
    """Yield the values for which a mark, or what its name stands for, repeats the test, and their file."""
    if isinstance(mark, ast.Name):
        yield from _find_values(*_find_definition(path, mark.id))
    elif isinstance(mark, ast.Call) and _get_mark(mark.func) == "parametrize":
        yield path, mark.args[1]


def _is_marked(path: Path, node: ast.AST | None, join: Callable[[Iterable[bool]], bool] = all) -> bool:
    """Return whether values of parameters have marks by which no case runs for every change.

    What the source does not tell counts as not marked. A test of `make matrices` compares the notes with all cases.

    Args:
        path: The file.
        node: Code for values, or for the marks of a value.
        join: ``all`` for values, each of which needs a mark, and ``any`` for marks.
    """
    is_marked = partial(_is_marked, path, join=join)
    match node:
        case ast.Attribute():
            return _get_mark(node) in TIERS
        case ast.IfExp():
            return is_marked(node.body) and is_marked(node.orelse)
        case ast.List() | ast.Tuple():
            return join(map(is_marked, node.elts))
        case ast.Starred():
            return is_marked(node.value)
        case ast.ListComp() | ast.GeneratorExp():
            return is_marked(node.elt)
        case ast.Call(func=ast.Attribute(attr="param")):
            marks = [keyword.value for keyword in node.keywords if keyword.arg == "marks"]
            return any(_is_marked(path, mark, any) for mark in marks)
        case ast.Call(func=ast.Attribute(attr="list_parameters" | "mark", value=ast.Name(id=name))):
            _, matrix = _find_definition(path, name)
            return isinstance(matrix, ast.Call) and "fast" not in [keyword.arg for keyword in matrix.keywords]
        case ast.Call(func=ast.Name(id=name)):
            file, function = _find_definition(path, name)
            last = function.body[-1] if isinstance(function, ast.FunctionDef) else None
            return isinstance(last, ast.Return) and _is_marked(file, last.value, join)
        case ast.Name(id=name):
            return _is_marked(*_find_definition(path, name), join)
    return False


def _list_marks(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]


def _find_marks(path: Path, nodes: list[ast.expr]) -> set[str]:
    """Return the marks of tiers that code mentions, or that the names in it stand for, in whatever file."""
    marks: set[str] = set()
    names: set[tuple[Path, str]] = set()
    waiting = [_read_names(path, node) for node in nodes]
    while waiting:
        mentioned, used = waiting.pop()
        marks |= mentioned
        waiting += [_read_definition(*name) for name in used - names]
        names |= used
    return marks


@cache
def _read_definition(path: Path, name: str) -> tuple[set[str], set[tuple[Path, str]]]:
    file, definition = _find_definition(path, name)
    return (set(), set()) if definition is None else _read_names(file, definition)


def _find_definition(path: Path, name: str) -> tuple[Path, ast.AST | None]:
    """Return the file that defines what a file calls ``name``, and the code, or None if it is not in the tests."""
    definition = _get_definitions(path).get(name)
    if not isinstance(definition, ast.ImportFrom):
        return path, definition
    module = TESTS / f"{(definition.module or '').replace('.', '/')}.py"
    return _find_definition(module, name) if module.exists() else (path, None)


def _read_names(path: Path, code: ast.AST) -> tuple[set[str], set[tuple[Path, str]]]:
    """Return the marks of tiers in a piece of code, and the names that it uses of its file."""
    if isinstance(code, ast.Call) and any(ast.unparse(keyword) == "whole=True" for keyword in code.keywords):
        return {"slow"}, set()  # a matrix that leaves no cell to a later tier
    nodes = list(ast.walk(code))
    marks = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in TIERS and ast.unparse(node.value) == "pytest.mark"
    }
    return marks, {(path, node.id) for node in nodes if isinstance(node, ast.Name)}


@cache
def _get_definitions(path: Path) -> dict[str, ast.AST]:
    """Return what a file defines or imports at its top level, by name."""
    found: dict[str, ast.AST] = {}
    for node in _parse(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return found


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/guaranteed-by.md")
    arguments = parser.parse_args()
    if mistakes := list_mistakes():
        raise SystemExit("\n".join(mistakes))
    arguments.output.write_text(write_page())
