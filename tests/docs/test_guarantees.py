"""Each sentence of the guarantees has a test that holds it, and has the numbers of the pages of parity."""

import re
import subprocess
import sys
from collections import defaultdict

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
def test_no_case_runs_later_than_the_note_says() -> None:
    command = [sys.executable, "-c", COLLECT]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
    marks = defaultdict(set)
    for test, mark in re.findall(r"^TIER (\S+) (\w*)$", result.stdout, re.MULTILINE):
        marks[test].add(mark)
    order = ["", *guarantees.TIERS]
    commands = ["", *guarantees.TIERS.values()]
    wrong = []
    for test in {test for tests in guarantees.find_tests().values() for test in tests}:
        found = {order.index(mark) for mark in marks[f"{test.path}::{test.name}"]}
        noted = commands.index(test.tier.removeprefix(guarantees.PART))
        is_part = test.tier.startswith(guarantees.PART)
        if not found or max(found) > noted or not (is_part or found == {noted}):
            wrong.append((test, found))
    assert wrong == []


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
