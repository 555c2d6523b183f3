"""Mutants change what they should, and the tool reports which test notices each of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import reach
from helpers.ledger import Ledger
from helpers.programs import commit_all

from tools import mutate
from tools.mutants import Mutant, find_mutants, sample

SOURCE = '''"""Docstring 1 + 1."""

import warnings
from typing import TYPE_CHECKING

__all__ = ["f"]
LIMIT = 3
TIMEOUT_SECONDS = 5

if TYPE_CHECKING:
    from x import y


@no_grad()
@property
def f(values: list[int], *, is_last: bool = False, name: str = "a") -> int | None:
    """Return values[0]."""
    if not values:
        raise ValueError(f"{values[0]} not there")
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    group.wait(timeout=1)
    with no_grad():
        log.info("x" + str(1 + 1))
    for value in values:
        if value is None:
            continue
        self.total += value
    assert values[0] == 1
    return max(values[1:]) < LIMIT and is_last
'''

FOUND = """
    7 default: 4
    14 decorator:
    16 default: True
    18 negate: (values)
    19 raise: pass
    20 collective: pass
    20 swap: MIN
    21 call: pass
    22 context: __import__("contextlib").nullcontext()
    25 comparison: (value is not None)
    26 loop: break
    27 assignment: pass
    29 return: return None
    29 and/or: (max(values[1:]) < LIMIT or is_last)
    29 comparison: (max(values[1:]) <= LIMIT)
    29 comparison: (max(values[1:]) >= LIMIT)
    29 swap: min
    29 index: (1) + 1
"""


def test_each_kind_of_mistake_is_made_where_it_matters() -> None:
    found = find_mutants("a.py", SOURCE.encode())
    shown = {f"{mutant.line} {mutant.operator}: {mutant.text}".rstrip() for mutant in found}
    assert shown == {line.strip() for line in FOUND.strip().splitlines()}
    for mutant in found:
        compile(mutant.apply(SOURCE.encode()), "a.py", "exec")
    loop = next(mutant for mutant in found if mutant.operator == "loop")
    assert loop.diff(SOURCE.encode()) == "-            continue\n+            break"
    assert loop.reached_by == (26, 26)


def test_a_sample_has_lines_of_all_files_and_grows() -> None:
    files = {"long.py": b"x = f(1)[0] < 2\n" * 30, "short.py": b"y = 1 < 2\n" * 10}
    mutants = {name: find_mutants(name, source) for name, source in files.items()}
    few, many = (sample(mutants, count, 1) for count in (8, 16))
    assert [mutant.file for mutant in few] == ["long.py"] * 6 + ["short.py"] * 2
    assert set(few) < set(many)
    assert len({(mutant.file, mutant.line) for mutant in many}) == 16
    assert few == sample(mutants, 8, 1) != sample(mutants, 8, 2)


FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'release']\npythonpath = ['.']\n",
    "conftest.py": "",
    "small/__init__.py": "",
    "small/a/__init__.py": "",
    "small/a/numbers.py": """import threading

def largest(values):
    return max(values)

def wait():
    event = threading.Event()
    event.set()
    return event.wait()

def first(values):
    return values[0]

def last(values):
    return values[-1]
""",
    "small/alone.py": "def alone():\n    return 1\n",
    "tests/a/test_numbers.py": """
import os
from pathlib import Path
from small.a.numbers import largest, last, wait

def test_largest():
    process = os.fork()  # lines that run in a fork are known, too
    if process == 0:
        os._exit(largest([1, 3, 2]) != 3)
    assert os.waitpid(process, 0)[1] == 0

def test_rest():
    assert wait()
    last([1])

def test_that_passes_once():
    last([1])
    runs = Path(__file__).with_name("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert runs.read_text() == "x"
""",
    "tests/test_others.py": "from small.a.numbers import first\n\ndef test_first():\n    assert first([1, 2]) == 1\n",
}


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forget before and after the test which files reach which."""
    reach.forget()
    yield
    reach.forget()


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten")
def test_who_notices_a_broken_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    commit_all(tmp_path)
    for module in (mutate, reach):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "PACKAGE", "small")
    monkeypatch.setattr(mutate, "FOLDER", tmp_path / ".mutants")
    monkeypatch.setattr(mutate, "HANG_SECONDS", 1)

    mutate.main(["small", "--others", "60"])
    results = Ledger(tmp_path / ".mutants" / "results.jsonl").results
    by_line = {(result["line"], name.split(":")[1]): result for name, result in results.items()}
    outcomes = {line: result["outcome"] for (line, _), result in by_line.items()}
    assert outcomes == {2: "survived", 4: "mirror", 8: "hang", 9: "mirror", 12: "other", 15: "survived"}
    assert (tmp_path / ".mutants/copy/tests/a/runs").read_text() == "xxx", "traced, with the line broken, and without"
    tests = {line: result.get("test") for (line, _), result in by_line.items()}
    assert tests[4] == "tests/a/test_numbers.py::test_largest"
    assert tests[12] == "tests/test_others.py::test_first"
    assert (tmp_path / ".mutants/copy/small/a/numbers.py").read_text() == FILES["small/a/numbers.py"]

    lines = (tmp_path / ".mutants" / "results.jsonl").read_text()
    mutate.main(["small"])
    assert (tmp_path / ".mutants" / "results.jsonl").read_text() == lines, "what is known was tried again"
    survivor, _ = sorted(name for name, result in results.items() if result["outcome"] == "survived")
    mutate.main(["--equal", survivor, "nobody looks"])
    assert "equal: small/a/numbers.py:15" in mutate.summarise(Ledger(tmp_path / ".mutants" / "results.jsonl"))

    # a helper decides what the tests find, so they are traced anew
    helper = tmp_path / "tests/a/conftest.py"
    helper.write_text("import pytest\n\n@pytest.fixture(autouse=True)\ndef fail():\n    raise ValueError\n")
    commit_all(tmp_path)
    workplace = mutate.Workplace(tmp_path / ".mutants/copy")
    assert workplace.trace("tests/a/test_numbers.py", "small/a/numbers.py")["tests"] == {}


class Scripted(mutate.Workplace):
    """A workplace that runs no tests, but finds what is given, in this order, and keeps what it should have run."""

    def __init__(self, *found: str | None) -> None:
        self.found = list(found)
        self.runs: list[tuple[bool, list[str]]] = []
        self.is_broken = False

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        self.is_broken = True
        yield
        self.is_broken = False

    def run(self, tests: Sequence[str], limit: float) -> str | None:
        self.runs.append((self.is_broken, list(tests)))
        return self.found.pop(0)


MUTANT = find_mutants("a.py", b"x = f(1)[0]\n")[0]


@pytest.mark.parametrize(
    ("found", "noticed", "runs"),
    [
        ((None,), None, [(True, ["t.py::a", "t.py::b"])]),
        (("t.py::b", None), "t.py::b", [(True, ["t.py::a", "t.py::b"]), (False, ["t.py::b"])]),
        (
            ("t.py::a", "t.py::a", "t.py::b", None),
            "t.py::b",
            [(True, ["t.py::a", "t.py::b"]), (False, ["t.py::a"]), (True, ["t.py::b"]), (False, ["t.py::b"])],
        ),
        (("hang", None), "hang", [(True, ["t.py::a", "t.py::b"]), (False, ["t.py::a", "t.py::b"])]),
        (("hang", "hang"), None, [(True, ["t.py::a", "t.py::b"]), (False, ["t.py::a", "t.py::b"])]),
    ],
    ids=["no failure", "failure", "failure without the mutant", "hang", "hang without the mutant"],
)
def test_what_fails_without_the_mutant_has_not_noticed_it(
    found: tuple[str | None, ...], noticed: str | None, runs: list[tuple[bool, list[str]]]
) -> None:
    workplace = Scripted(*found)
    assert workplace.run_broken(MUTANT, ["t.py::a", "t.py::b"], 1) == noticed
    assert workplace.runs == runs


def test_a_file_that_fails_without_the_mutant_is_left_out() -> None:
    assert Scripted("t.py::a", "t.py::a").run_broken(MUTANT, ["t.py"], 1) is None


@pytest.mark.parametrize(
    ("arguments", "tried"),
    [
        ([], []),
        (["--again"], ["survived"]),
        (["--again", "--outcome", "mirror", "--outcome", "gone"], ["mirror", "gone"]),
    ],
    ids=["not again", "again", "again with outcomes"],
)
def test_mutants_are_tried_again_by_their_outcome(
    arguments: list[str], tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy").mkdir()
    lines = [f"x = f({i})[0]\n" for i in range(3)]
    (tmp_path / "copy/a.py").write_text("".join(lines))
    ledger = Ledger(tmp_path / "results.jsonl")
    outcomes = {}
    for (mutant, source), outcome in zip(
        mutate.choose(tmp_path / "copy", ["a.py"], 3, 0), ("mirror", "survived", "gone"), strict=True
    ):
        outcomes[mutant] = outcome
        ledger.add(mutant.get_name(source), outcome=outcome, line=mutant.line, diff=mutant.diff(source))
    found = []

    class Workplace(Scripted):
        def try_mutant(self, mutant: Mutant, others: float, *, is_thorough: bool) -> dict[str, str]:
            found.append(outcomes[mutant])
            return {"outcome": "survived"}

    monkeypatch.setattr(mutate, "FOLDER", tmp_path)
    workplace = Workplace()
    workplace.copy = tmp_path / "copy"
    monkeypatch.setattr(mutate, "Workplace", lambda _: workplace)
    mutate.main(["a.py", *arguments])
    assert found == tried


def test_a_summary_counts_every_outcome(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "results.jsonl")
    for i, outcome in enumerate(("mirror", "mirror", "hang", "gone")):
        ledger.add(f"small/a.py:loop:{i}", outcome=outcome, line=i, diff=f"-{i}")
    table = mutate.summarise(ledger).splitlines()
    assert table[0] == "| folder | noticed by mirror | by a hang | by others | equal | survived | gone |"
    assert table[3] == "| all | 2 | 1 | 0 | 0 | 0 | 1 |"
    assert "gone: small/a.py:3 (loop) " in table
