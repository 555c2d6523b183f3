"""`make test-all` runs what a change can reach, goes on after interruptions, and forgets no failure."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import ledger, reach
from helpers.ledger import Ledger, get_key, hold, run_jobs
from helpers.reach import ROOT, find_reach

from tools import run_all

Files = dict[str, str]
Run = Callable[[], tuple[int, list[str]]]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one in place of this."""
    for module in (reach, ledger, run_all):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for module in (reach, run_all):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "docs" / "test-all.md")
    monkeypatch.setattr(run_all, "FOLDER", tmp_path / ".test-all")
    (tmp_path / "docs").mkdir()
    return tmp_path


def write(folder: Path, files: Files) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    reach.forget()


NOTES = "open({path!r}, 'a').write('{name} ')"


def make_test(folder: Path, name: str, body: str = "pass") -> str:
    """Return a test that notes that it ran."""
    return f"def test_{name}():\n    {NOTES.format(path=str(folder / 'ran'), name=name)}\n    {body}\n"


def run(folder: Path) -> tuple[int, list[str]]:
    """Return the exit code, and the tests that ran."""
    (folder / "ran").write_text("")
    reach.forget()
    return run_all.main(), sorted((folder / "ran").read_text().split())


@pytest.mark.slow
def test_a_change_runs_the_tests_that_can_reach_it(repository: Path) -> None:
    write(
        repository,
        {
            "lightning_fsdp2/__init__.py": "from lightning_fsdp2.above import up\n"
            "from lightning_fsdp2.below import down\n",
            "lightning_fsdp2/below.py": "def down(): return 1\n",
            "lightning_fsdp2/above.py": "def up():\n    from lightning_fsdp2.below import down\n    return down()\n",
            "tests/test_below.py": "def load(): from lightning_fsdp2 import down\n" + make_test(repository, "below"),
            "tests/test_above.py": "def load(): from lightning_fsdp2 import up\n" + make_test(repository, "above"),
            "tests/test_command.py": "COMMAND = 'lightning-fsdp2 fit'\n" + make_test(repository, "command"),
            "tests/test_recipe.py": "PATH = 'configs'\n" + make_test(repository, "recipe"),
            "tests/test_alone.py": make_test(repository, "alone"),
            "configs/run.yaml": "class_path: lightning_fsdp2.above.Up\n",
        },
    )
    everything = ["above", "alone", "below", "command", "recipe"]
    assert run(repository) == (0, everything)
    assert run(repository) == (0, [])
    write(repository, {"lightning_fsdp2/above.py": "def up(): return 2\n"})
    assert run(repository) == (0, ["above", "command", "recipe"])
    write(repository, {"lightning_fsdp2/below.py": "def down(): return 2\n"})
    assert run(repository) == (0, ["below", "command"])  # above no longer imports it
    write(repository, {"configs/run.yaml": "seed: 1\n"})
    assert run(repository) == (0, ["recipe"])
    write(repository, {"pyproject.toml": ""})
    assert run(repository) == (0, everything)


def test_what_failed_or_was_cut_off_runs_again(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    die = f"import os, pathlib; pathlib.Path({str(repository / 'healed')!r}).exists() or os._exit(9)"
    heal = f"import pathlib; assert pathlib.Path({str(repository / 'healed')!r}).exists()"
    write(
        repository,
        {
            "tests/test_dies.py": make_test(repository, "first") + make_test(repository, "dies", die),
            "tests/test_fails.py": make_test(repository, "passes") + make_test(repository, "fails", heal),
        },
    )
    assert run(repository) == (1, ["dies", "fails", "first", "passes"])
    page = (repository / "docs/test-all.md").read_text()
    assert "`tests/test_fails.py::test_fails`" in page
    assert "`tests/test_dies.py (ended with 9, see .test-all/tests/test_dies.py.log)`" in page
    assert "| all | 2 | 2 | 0 |" in page
    assert "test_dies.py: 1 passed, 1 failed" in capfd.readouterr().out
    (repository / "healed").touch()
    assert run(repository) == (0, ["dies", "fails"])
    assert "Failed" not in (repository / "docs/test-all.md").read_text()


def test_a_test_file_that_cannot_be_collected_is_a_failure(repository: Path) -> None:
    write(repository, {"tests/test_broken.py": "import no_such_module\n"})
    assert run(repository) == (1, [])
    assert "`tests/test_broken.py (ended with 2" in (repository / "docs/test-all.md").read_text()


def test_reasons_of_skips_are_on_the_page(repository: Path) -> None:
    write(repository, {"tests/test_gpu.py": "import pytest\n" + make_test(repository, "gpu", "pytest.skip('no GPU')")})
    assert run(repository) == (0, ["gpu"])
    assert "- no GPU: 1" in (repository / "docs/test-all.md").read_text()


def test_the_longest_of_the_last_run_start_first_after_the_unknown(repository: Path) -> None:
    (repository / "docs/test-all.md").write_text(
        "| `a` | 1 | 0 | 0 | 5 |\n| `b` | 1 | 0 | 0 | 70 |\n| all | 2 | 0 | 0 | 75 |\n"
    )
    assert run_all.order_by_seconds(["a", "b", "new"]) == ["new", "b", "a"]


def test_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "book.jsonl")
    book.add("one", outcome="passed")
    book.add("two", outcome="passed")
    with book.path.open("r+b") as file:
        file.truncate(book.path.stat().st_size - 3)
    again = Ledger(book.path)
    assert list(again.results) == ["one"]
    again.add("three", outcome="passed")
    assert list(Ledger(book.path).results) == ["one", "three"]


def test_keys_differ_by_content_name_and_facts(repository: Path) -> None:
    write(repository, {"a": "1", "b": "1", "c": "2"})
    a, b, c = (repository / name for name in "abc")
    keys = [get_key(files, *facts) for files, facts in [([a], ()), ([b], ()), ([a, b], ()), ([c], ()), ([a], ("tp2",))]]
    assert len(set(keys)) == len(keys)
    assert get_key([b, a]) == get_key([a, b])


def test_two_runs_do_not_write_the_same_ledgers(tmp_path: Path) -> None:
    with hold(tmp_path), pytest.raises(SystemExit, match="Another run still works in"), hold(tmp_path):
        pass


def test_two_jobs_run_at_once_and_end_with_the_run(tmp_path: Path) -> None:
    def wait_for_other(own: str, other: str) -> int:
        (tmp_path / own).touch()
        while not (tmp_path / other).exists():
            pass
        return 3

    jobs = {"a": lambda: wait_for_other("a", "b"), "b": lambda: wait_for_other("b", "a")}
    assert {(name, status) for name, status, _ in run_jobs(jobs, tmp_path)} == {("a", 3), ("b", 3)}

    def sleep() -> int:
        (tmp_path / "process").write_text(str(os.getpid()))
        while True:
            pass

    run_of_jobs = run_jobs({"quick": lambda: 0, "slow": sleep}, tmp_path)
    next(run_of_jobs)
    while not (tmp_path / "process").exists() or not (tmp_path / "process").read_text():
        pass
    run_of_jobs.close()
    process = int((tmp_path / "process").read_text())
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -9


def test_rooms_reach_what_is_below_them() -> None:
    """The real repository: a strategy's change leaves the passes' tests alone, and the command line has it all."""

    def rooms(test: str) -> set[str]:
        paths = (path.relative_to(ROOT) for path in find_reach(ROOT / test))
        return {path.parts[1] for path in paths if path.parts[0] == "lightning_fsdp2"}

    reach.forget()
    assert "strategies" not in rooms("tests/parallel/tensor/test_apply.py") | rooms("tests/managers/test_fsdp2.py")
    assert {"strategies", "parallel", "managers"} <= rooms("tests/strategies/test_fsdp2.py")
    assert {"plan", "cli", "callbacks", "data"} <= rooms("tests/cli/test_cli.py")
    assert ROOT / "configs/quickstart.yaml" in find_reach(ROOT / "tests/test_configs.py")
