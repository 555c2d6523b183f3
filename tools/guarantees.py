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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
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
"""Where pages are of which claims are listed. The ledger of tests reads here which files decide theirs."""

TIERS = {"slow": "`make test-all`", "release": "`make matrices`"}
"""What runs the tests with a mark, and not those without."""

PART = "all cases: "
"""How a note begins about a test with cases that no other command may run."""

INTRODUCTION = """\
# What holds each guarantee

Written by tools/guarantees.py from the marks of the tests. The first table has every sentence of [what you can rely
on](guarantees.md), the others have claims of further pages. A test runs for every change, unless a note names the
command that runs it, or that runs all of its cases. Comparisons of all families, and results of GPUs, are on pages that
other commands have written.

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
    """What runs it, or empty if every change does."""


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
    sentences = []
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
    tree = _parse(path)
    name = str(path.relative_to(ROOT))
    of_module = _get_definitions(path).get("pytestmark")
    module_marks = [] if of_module is None else [of_module]
    for slug in _find_slugs(module_marks):
        yield slug, Test(name, "all of its tests", "")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            for slug in _find_slugs(node.decorator_list):
                yield slug, Test(name, node.name, _get_tier(path, node.decorator_list + module_marks))


def _find_slugs(marks: list[ast.expr]) -> Iterator[str]:
    for mark in marks:
        for node in ast.walk(mark):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.guarantees":
                yield from (ast.literal_eval(argument) for argument in node.args)


def _get_tier(path: Path, marks: list[ast.expr]) -> str:
    """Say what runs a test with these marks, by the marks themselves and by those of its parameters."""
    own = {ast.unparse(node) for mark in marks for node in _list_marks(mark)}
    found = _find_marks(path, marks)
    for mark, tier in reversed(TIERS.items()):
        if f"pytest.mark.{mark}" in own:
            return tier
        if mark in found:
            return PART + tier
    return ""


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
    definition = _get_definitions(path).get(name)
    if not isinstance(definition, ast.ImportFrom):
        return (set(), set()) if definition is None else _read_names(path, definition)
    module = TESTS / f"{(definition.module or '').replace('.', '/')}.py"
    return _read_definition(module, name) if module.exists() else (set(), set())


def _read_names(path: Path, code: ast.AST) -> tuple[set[str], set[tuple[Path, str]]]:
    """Return the marks of tiers in a piece of code, and the names that it uses of its file."""
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
