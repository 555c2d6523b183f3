"""Each guarantee has a test, and its numbers are those of the parity pages."""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.documents import ROOT

from tools import guarantees
from tools.supported_models import get_page

TEXT = " ".join((ROOT / "docs/guarantees.md").read_text().split())

COMPARED = {
    r"compares (\d+) causal": "parity.md",
    r"for the (\d+) families tested there": "parity-transformers-5.17.md",
    r"\. (\d+) families are \[compared with one process\]\(parity-context": "parity-context-parallel.md",
    r"The (\d+) causal language model families that pack": "parity-expert-parallel.md",
    r"and (\d+) multimodal mixtures": "parity-expert-parallel-images.md",
    r"(\d+) families are also \[compared on": "parity-expert-parallel-transformers-5.17.md",
    r"\. (\d+) causal language model families are": "parity-pipeline-parallel.md",
}
"""Where the text has the number of families that a page compares."""


def test_each_sentence_is_held_and_each_mark_has_a_sentence() -> None:
    assert guarantees.list_mistakes() == []


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs/guaranteed-by.md").read_text()
    assert guarantees.write_page() == page, "run tools/guarantees.py"


COLLECT = """
import sys
import pytest

class Tiers:
    def pytest_collection_finish(self, session):
        for item in session.items:
            mark = next((name for name in ("release", "slow") if item.get_closest_marker(name)), "")
            print("TIER", item.nodeid.partition("[")[0], mark)

sys.exit(pytest.main(["--collect-only", "-q", "tests"], plugins=[Tiers()]))
"""


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_notes_are_those_of_the_cases_that_are_collected() -> None:
    command = [sys.executable, "-c", COLLECT]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    marks = defaultdict(set)
    for test, mark in re.findall(r"^TIER (\S+) (\w*)$", result.stdout, re.MULTILINE):
        marks[test].add(mark)
    wrong = []
    for test in {test for tests in guarantees.find_tests().values() for test in tests}:
        names = [f"{test.path}::{test.name}"]
        if test.name == guarantees.WHOLE_FILE:
            names = [name for name in marks if name.startswith(f"{test.path}::")]
        exact = guarantees.write_note({mark for name in names for mark in marks[name]})
        if test.tier != exact:
            wrong.append((test, exact))
    assert wrong == []


MODULE = """
from helpers.cover import Matrix
from helpers.marks import SHARED, mark_all, mark_some

MANY = Matrix("many", CELLS)
SOME = Matrix("some", CELLS, fast=("a",))
WHOLE = Matrix("whole", CELLS, fast=("a",), whole=True)
LISTED = [pytest.param(1, marks=(needs_compiler, pytest.mark.slow)), *(pytest.param(x, marks=MANY.mark(x)) for x in X)]
by_name = pytest.mark.parametrize("x", SHARED)

{tests}
"""

MARKS = """
SHARED = [pytest.param(1, marks=pytest.mark.slow if X else pytest.mark.release)]

def mark_all(names):
    return [pytest.param(name, marks=[pytest.mark.slow]) for name in names]

def mark_some(names):
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]
"""

SOME_IN_MATRICES = "`make test-all`; all cases: `make matrices`"
NOTES = {
    "parametrize('x', [1, 2])": "",
    "slow": "`make test-all`",
    "release": "`make matrices`",
    "parametrize('x', [1, pytest.param(2, marks=pytest.mark.release)])": "all cases: `make matrices`",
    "parametrize('x', [pytest.param(2, marks=pytest.mark.slow)])": "`make test-all`",
    "parametrize('x', [pytest.param(2)])": "",
    "parametrize('x', [pytest.param(x, marks=pytest.mark.slow) if x else x for x in X])": "all cases: `make test-all`",
    "parametrize('x', MANY.list_parameters(CELLS))": SOME_IN_MATRICES,
    "parametrize('x', SOME.list_parameters(CELLS))": "all cases: `make matrices`",
    "parametrize('x', WHOLE.list_parameters(CELLS))": "all cases: `make test-all`",
    "parametrize('x', LISTED)": SOME_IN_MATRICES,
    "parametrize('x', mark_all(X))": "`make test-all`",
    "parametrize('x', mark_some(X))": "all cases: `make test-all`",
    "by_name": SOME_IN_MATRICES,
}
"""Notes on tests by one of their marks."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for tests of which find_tests() reads the marks, beside others that have some of the values."""
    monkeypatch.setattr(guarantees, "ROOT", tmp_path)
    monkeypatch.setattr(guarantees, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(guarantees, "find_tests", guarantees.find_tests.__wrapped__)
    helpers = tmp_path / "tests/helpers"
    helpers.mkdir(parents=True)
    (helpers / "marks.py").write_text(MARKS)
    shutil.copy(ROOT / "tests/helpers/cover.py", helpers)
    return tmp_path / "tests/test_marks.py"


def test_notes_say_which_command_runs_some_cases_and_which_all(module: Path) -> None:
    marks = [mark if mark == "by_name" else f"pytest.mark.{mark}" for mark in NOTES]
    tests = [f"@{mark}\n@pytest.mark.guarantees('{i}')\ndef test_{i}():\n    pass\n" for i, mark in enumerate(marks)]
    module.write_text(MODULE.format(tests="\n".join(tests)))
    found = guarantees.find_tests()
    assert {mark: found[str(i)][0].tier for i, mark in enumerate(NOTES)} == NOTES


@pytest.mark.parametrize(
    ("marks", "note"),
    [
        ("[pytest.mark.guarantees('a')]", "all cases: `make test-all`"),
        ("pytest.mark.guarantees('a')", "all cases: `make test-all`"),
        ("[pytest.mark.guarantees('a'), pytest.mark.slow]", "`make test-all`"),
    ],
)
def test_the_note_on_a_whole_file_is_that_of_all_its_tests(marks: str, note: str, module: Path) -> None:
    tests = "def test_a():\n    pass\n\n@pytest.mark.slow\ndef test_b():\n    pass\n"
    module.write_text(f"pytestmark = {marks}\n\n{tests}")
    assert guarantees.find_tests() == {"a": [guarantees.Test("tests/test_marks.py", guarantees.WHOLE_FILE, note)]}


def test_missing_tests_and_unknown_marks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    claims, tests = guarantees.read_claims(), {**guarantees.find_tests()}
    first = next(claim for claim in claims if claim.slug in tests and not claim.results)
    tests["unknown"] = tests.pop(first.slug)
    monkeypatch.setattr(guarantees, "find_tests", lambda: tests)
    monkeypatch.setattr(guarantees, "read_claims", lambda: claims[1:])
    assert guarantees.list_mistakes() == [
        f"not in guarantees.yaml: {claims[0].says}",
        f"no test is marked with {first.slug!r}: {first.says}",
        f"no sentence is called 'unknown': {tests['unknown'][0].path}",
    ]


@pytest.mark.guarantees(
    "compared-families",
    "compared-on-the-oldest-transformers",
    "context-parallel-families",
    "expert-parallel-families",
    "expert-parallel-on-the-oldest-transformers",
    "pipeline-parallel-families",
)
@pytest.mark.parametrize(("number", "name"), COMPARED.items(), ids=COMPARED.values())
def test_as_many_families_are_compared_as_the_page_says(number: str, name: str) -> None:
    page = get_page(name)
    compared = [family for family in page.families if any(is_number(page.cells[family, x]) for x in page.layouts)]
    assert re.findall(number, TEXT) == [str(len(compared))]


@pytest.mark.guarantees("refused-pipeline-families")
def test_six_layouts_and_ten_refusals() -> None:
    assert "on six layouts" in TEXT
    assert len(get_page("parity-expert-parallel.md").layouts) == 6
    assert "Ten other families are refused" in TEXT
    page = get_page("parity-pipeline-parallel.md")
    assert sum(page.cells[family, page.layouts[0]] == "refused" for family in page.families) == 10


@pytest.mark.guarantees("reasons-of-refusals")
@pytest.mark.parametrize("name", [*COMPARED.values(), "parity-images.md", "parity-megatron.md"])
def test_each_refusal_has_its_reason(name: str) -> None:
    page = get_page(name)
    assert {family for (family, _), cell in page.cells.items() if not is_number(cell)} == page.reasons.keys()


def is_number(cell: str) -> bool:
    return re.fullmatch(r"\de-\d\d", cell) is not None
