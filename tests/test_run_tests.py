"""`make test-all` runs what a change can reach, goes on after interruptions, and forgets no failure."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import ledger, reach, results
from helpers.ledger import Ledger, get_key, hold, run_jobs
from helpers.programs import commit_all, git, is_running
from helpers.reach import ROOT, find_reach

from tools import changes, run_tests

Files = dict[str, str]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one in place of this."""
    for module in (reach, ledger, results, run_tests, changes):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for module in (reach, results, run_tests):
        monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "test-all.md")
    for module in (reach, run_tests):
        monkeypatch.setattr(module, "MATRICES_PAGE", tmp_path / "docs" / "matrices.md")
    monkeypatch.setattr(run_tests, "FOLDER", tmp_path / ".test")
    markers = ["slow", "release", "matrix(name)"]
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\nmarkers = {markers}\n")
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
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


def run(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit code, and the tests that ran, in their order if there was one."""
    (folder / "ran").write_text("")
    reach.forget()
    code = run_tests.main(arguments or ["all"])
    ran = (folder / "ran").read_text().split()
    return code, ran if "changed" in arguments else sorted(ran)


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
    assert "`tests/test_dies.py (ended with 9, see .test/tests/test_dies.py.log)`" in page
    assert "| all | 2 | 2 | 0 | 0 | 0 |" in page
    assert "test_dies.py: 1 passed, 1 failed" in capfd.readouterr().out
    (repository / "healed").touch()
    assert run(repository) == (0, ["dies", "fails"])
    assert "Failed" not in (repository / "docs/test-all.md").read_text()


def test_a_test_file_that_cannot_be_collected_is_a_failure(repository: Path) -> None:
    write(repository, {"tests/test_broken.py": "import no_such_module\n"})
    assert run(repository) == (1, [])
    assert "`tests/test_broken.py (ended with 2" in (repository / "docs/test-all.md").read_text()


def test_what_is_skipped_is_on_the_page_with_its_reason_and_is_tried_again(repository: Path) -> None:
    tests = "import pytest\n" + make_test(repository, "cpu") + make_test(repository, "gpu", "pytest.skip('no GPU')")
    write(repository, {"tests/test_gpu.py": tests})
    assert run(repository) == (0, ["cpu", "gpu"])
    assert "- no GPU: 1" in (repository / "docs/test-all.md").read_text()
    assert run(repository) == (0, ["gpu"])


def test_a_test_that_failed_and_was_skipped_at_its_end_has_failed(repository: Path) -> None:
    fixture = "import pytest\n@pytest.fixture\ndef late():\n    yield\n    pytest.skip('too late')\n"
    write(repository, {"tests/test_late.py": f"{fixture}def test_late(late): raise ValueError('first')\n"})
    assert run(repository)[0] == 1
    assert "- `tests/test_late.py::test_late`" in (repository / "docs/test-all.md").read_text()


def test_what_native_code_crashed_is_repeated_once_with_new_fixtures_and_is_reported(
    repository: Path, pytestconfig: pytest.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    options = pytestconfig.getini("addopts")
    with (repository / "pyproject.toml").open("a") as project:
        project.write(f"addopts = {[option for option in options if 'rerun' in option]}\n")
    crash = (
        "from helpers.ranks import NativeCrash\n"
        "def test_crash(tmp_path):\n"
        f"    {NOTES.format(path=str(repository / 'ran'), name='crash')}\n"
        "    (tmp_path / 'left').mkdir()  # without exist_ok\n"
        f"    if open({str(repository / 'ran')!r}).read().count('crash') < {{}}: raise NativeCrash('rank 1 died')\n"
    )
    write(repository, {"tests/test_crash.py": crash.format(2) + make_test(repository, "other")})
    assert run(repository) == (0, ["crash", "crash", "other"])
    assert "repeated: tests/test_crash.py::test_crash\n" in capfd.readouterr().out
    repeated = (repository / "docs/test-all.md").read_text().partition("## Repeated\n")[2]
    assert repeated.split() == ["-", "`tests/test_crash.py::test_crash`"]
    write(repository, {"tests/test_crash.py": crash.format(9)})
    assert run(repository) == (1, ["crash", "crash"])
    write(repository, {"tests/test_crash.py": crash.format(2).replace("raise NativeCrash(", "raise ValueError(")})
    assert run(repository) == (1, ["crash"])


def test_the_longest_of_the_last_run_start_first_after_the_unknown(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, {f"tests/test_{name}.py": make_test(repository, name) for name in ("a", "b", "new")})
    rows = "| `tests/test_a.py` | 1 | 0 | 0 | 5 | 70 |\n| `tests/test_b.py` | 1 | 0 | 0 | 7 | 7 |\n"
    (repository / "docs/test-all.md").write_text(rows)
    monkeypatch.setattr(ledger, "STREAMS", 1)
    orders = {"fast": ["new", "b", "a"], "all": ["new", "a", "b"], "matrices": ["new", "a", "b"]}
    for tier, order in orders.items():
        (repository / "ran").write_text("")
        assert run_tests.main([tier, "--again"]) == 0
        shutil.rmtree(repository / ".test")
        (repository / "docs/test-all.md").write_text(rows)
        assert (repository / "ran").read_text().split() == order


def test_each_tier_runs_its_kinds_of_tests(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mark = "@pytest.mark.{}\n"
    tests = make_test(repository, "fast") + mark.format("slow") + make_test(repository, "slow")
    tests += mark.format("release") + make_test(repository, "release")
    write(repository, {"tests/test_mixed.py": f"import pytest\n{tests}"})
    assert run(repository, "fast") == (0, ["fast"])
    assert capfd.readouterr().out.endswith("1 passed, 0 failed, 0 skipped\n")
    assert not (repository / "docs/test-all.md").exists()
    assert run(repository, "all") == (0, ["slow"])
    assert "| `tests/test_mixed.py` | 2 | 0 | 0 | 0 | 0 |" in (repository / "docs/test-all.md").read_text()
    assert run(repository, "matrices") == (0, ["release"])
    assert "- `tests/test_mixed.py`: 1, 0 s" in (repository / "docs/matrices.md").read_text()
    assert run(repository, "fast") == (0, [])
    assert run(repository, "fast", "--again") == (0, ["fast"])
    assert run(repository, "matrices") == (0, [])  # the others still stand


def test_a_slow_test_that_failed_does_not_fail_the_fast_ones(repository: Path) -> None:
    slow = "import pytest\n@pytest.mark.slow\n" + make_test(repository, "slow", "raise ValueError('the reason')")
    write(repository, {"tests/test_mixed.py": slow + make_test(repository, "fast")})
    assert run(repository, "all") == (1, ["fast", "slow"])
    assert run(repository, "fast") == (0, [])


def test_what_fails_or_dies_is_shown(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests = {
        "fails": "def test_fails(): raise ValueError('the reason')",
        "dies": "import os\ndef test_dies(): os._exit(9)",
        "broken": "import no_such_module",
        "passes": "def test_passes(): pass",
    }
    write(repository, {f"tests/test_{name}.py": text for name, text in tests.items()})
    assert run(repository, "fast")[0] == 1
    output = capfd.readouterr().out
    assert "ValueError: the reason" in output
    assert sorted(line for line in output.splitlines() if line.startswith("failed: ")) == [
        "failed: tests/test_broken.py (ended with 2, see .test/tests/test_broken.py.log)",
        "failed: tests/test_dies.py (ended with 9, see .test/tests/test_dies.py.log)",
        "failed: tests/test_fails.py::test_fails",
    ]
    assert output.endswith("1 passed, 3 failed, 0 skipped\n")


def test_files_that_run_at_once_have_folders_of_their_own(repository: Path) -> None:
    """Two runs of pytest remove what earlier ones have left, and one finds that the other has removed it already."""
    note = f"def test_it(tmp_path): open({str(repository / 'ran')!r}, 'a').write(str(tmp_path) + ' ')"
    write(repository, {f"tests/test_{name}.py": note for name in ("one", "two")})
    code, (first, second) = run(repository, "fast")
    assert code == 0
    assert Path(first).parents[2] != Path(second).parents[2]  # above pytest-of-NAME/pytest-NUMBER
    assert not any(Path(folder).parents[2].exists() for folder in (first, second))


def test_a_file_that_dies_leaves_no_folder(repository: Path) -> None:
    text = f"import os\ndef test_it(tmp_path): open({str(repository / 'ran')!r}, 'w').write(str(tmp_path)), os._exit(9)"
    write(repository, {"tests/test_dies.py": text})
    code, (folder,) = run(repository, "fast")
    assert code == 1
    assert not Path(folder).parents[3].exists()


def test_other_arguments_are_those_of_pytest(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(
        repository, {"tests/test_two.py": make_test(repository, "one") + make_test(repository, "two", "assert False")}
    )
    path = str(repository / "tests" / "test_two.py")
    assert run(repository, "fast", path, "-k", "one") == (0, ["one"])
    assert "= 1 passed" in capfd.readouterr().out
    assert run(repository, "fast", path, "-k", "absent") == (pytest.ExitCode.NO_TESTS_COLLECTED, [])
    assert run(repository, "matrices", path, "-k", "one") == (0, ["one"])


@pytest.mark.parametrize("option", [["--list"], ["--seconds", "0"], ["--since", "HEAD"]])
def test_options_of_changed_are_refused_elsewhere(
    option: list[str], repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(repository, "all", *option)
    assert "are for changed, not for all; leave them out" in capfd.readouterr().err


@pytest.fixture
def history(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit on main, in which each test imports the one file, a helper does, or none."""
    slow = "import pytest\n@pytest.mark.slow\n" + make_test(repository, "slow")
    write(
        repository,
        {
            ".gitignore": ".test\nran\n",
            "lightning_fsdp2/__init__.py": "",
            "lightning_fsdp2/a/part.py": "def part(): return 1\n",
            "tests/a/test_part.py": f"{slow}def load(): from lightning_fsdp2.a.part import part\n"
            + make_test(repository, "mirror"),
            "tests/helpers/user.py": "from lightning_fsdp2.a.part import part\n",
            "tests/test_indirect.py": "def load(): from helpers.user import part\n" + make_test(repository, "indirect"),
            "tests/test_direct.py": "def load(): from lightning_fsdp2.a.part import part\n"
            + make_test(repository, "direct")
            + slow.replace("slow()", "other()").replace("slow ", "other "),
            "tests/test_alone.py": make_test(repository, "alone"),
        },
    )
    monkeypatch.setattr(ledger, "STREAMS", 1)
    commit_all(repository)
    return repository


@pytest.mark.slow
def test_a_change_runs_what_is_most_likely_to_fail_first(history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(history, {"lightning_fsdp2/a/part.py": "def part(): return 2\n"})
    everything = ["mirror", "slow", "direct", "indirect", "other"]
    assert run(history, "changed", "--list") == (0, [])
    assert "tests/a/test_part.py, fast tests" in capfd.readouterr().out
    assert run(history, "changed") == (0, everything)
    assert run(history, "changed") == (0, [])
    commit_all(history)  # on main the change is now the last commit
    assert run(history, "changed", "--again") == (0, everything)
    git(history, "checkout", "-q", "-b", "branch")
    write(history, {"tests/test_alone.py": make_test(history, "alone", "assert False")})
    commit_all(history)
    write(history, {"lightning_fsdp2/a/part.py": "def part(): return 3\n"})
    assert run(history, "changed") == (1, ["mirror", "alone", *everything[1:]])
    write(history, {"tests/test_alone.py": make_test(history, "alone", "return")})
    assert run(history, "changed") == (0, ["alone"])
    write(history, {"lightning_fsdp2/a/part.py": "def part(): return 4\n"})
    assert run(history, "changed", "--since", "HEAD") == (0, everything)


def test_a_change_runs_slow_tests_that_nothing_is_known_of(history: Path) -> None:
    assert run(history, "fast") == (0, ["alone", "direct", "indirect", "mirror"])
    write(history, {"lightning_fsdp2/a/part.py": "def part(): return 2\n"})
    assert run(history, "changed")[1] == ["mirror", "slow", "direct", "indirect", "other"]
    more = "import pytest\n@pytest.mark.slow\n" + make_test(history, "more")
    write(history, {"tests/test_alone.py": make_test(history, "alone") + more})
    assert run(history, "changed")[1] == ["alone", "more"]


def test_a_list_of_what_a_change_runs_changes_nothing(history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(history, {"lightning_fsdp2/a/part.py": "def part(): return 2\n"})
    assert run(history, "changed")[0] == 0
    capfd.readouterr()
    assert run(history, "changed", "--list", "--again") == (0, [])
    assert "tests/a/test_part.py, slow tests" in capfd.readouterr().out
    assert run(history, "changed") == (0, [])


@pytest.mark.parametrize("is_renamed", [False, True])
def test_who_still_imports_a_module_that_is_gone_is_run(history: Path, is_renamed: bool) -> None:
    module = history / "lightning_fsdp2/a/part.py"
    if is_renamed:
        module.rename(module.with_name("piece.py"))
    else:
        module.unlink()
    assert run(history, "changed")[1] == ["mirror", "slow", "direct", "indirect", "other"]


def test_a_slow_test_that_dies_under_changed_is_shown(history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dies = "import pytest\n@pytest.mark.slow\n" + make_test(history, "dies", "print('so far'); import os; os._exit(9)")
    write(history, {"tests/test_alone.py": make_test(history, "alone") + dies})
    assert run(history, "changed") == (1, ["alone", "dies"])
    output = capfd.readouterr().out
    assert "failed: tests/test_alone.py (ended with 9, see .test/tests/test_alone.py-slow.log)" in output
    assert "not all run" not in output


def test_an_unknown_beginning_of_a_change_is_said(history: Path) -> None:
    with pytest.raises(SystemExit, match=r"unknown revision.*name where the change began with --since") as error:
        run(history, "changed", "--since", "nowhere")
    assert "nowhere" in str(error.value)


def test_a_change_starts_nothing_after_its_time(history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(history, {"lightning_fsdp2/a/part.py": "def part(): return 2\n"})
    assert run(history, "changed", "--seconds", "0") == (0, [])
    assert "not all run in 0 s: tests/test_indirect.py, fast tests" in capfd.readouterr().out
    assert run(history, "changed", "--seconds", "60")[1] == ["mirror", "slow", "direct", "indirect", "other"]


def test_a_test_that_would_end_too_late_is_left_out(repository: Path) -> None:
    write(repository, {"tests/test_late.py": make_test(repository, "one") + make_test(repository, "two")})
    book = results.open_ledger(repository / "tests/test_late.py", repository / ".test")
    book.earlier["tests/test_late.py::test_two"] = {"seconds": 1000.0, "kind": "fast", "outcome": "passed"}
    assert book.run(["fast"], deadline=time.monotonic() + 500) == 0
    assert (repository / "ran").read_text().split() == ["one"]
    assert not book.is_done(["fast"])


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


def test_what_a_job_leaves_running_ends_with_it_and_what_it_raises_is_in_its_log(tmp_path: Path) -> None:
    def leave() -> int:
        process = subprocess.Popen(["sleep", "600"])
        (tmp_path / "process").write_text(str(process.pid))
        raise ValueError("mine")

    assert [(name, status) for name, status, _ in run_jobs({"job": leave}, tmp_path)] == [("job", 1)]
    assert "ValueError: mine" in (tmp_path / "job.log").read_text()
    while is_running(int((tmp_path / "process").read_text())):
        pass


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
    assert ROOT / "tests/examples/srun.py" in find_reach(ROOT / "tests/examples/test_launch.py")  # beside a helper
    assert ROOT / "tests/helpers/fork_stand_in.py" in find_reach(ROOT / "tests/test_quickstart.py")
    assert ROOT / "tests/helpers/fork_server.py" in find_reach(ROOT / "tests/examples/test_examples.py")  # by conftest
    assert ROOT / "tests/helpers/limits.py" in find_reach(ROOT / "tests/test_floors.py")
    assert ROOT / "tests/helpers/results.py" not in find_reach(ROOT / "tests/test_floors.py")


def test_who_names_the_folder_of_tests_reaches_all_of_them(repository: Path) -> None:
    files = {"tests/test_reader.py": "ALL = 'tests/'\n", "tests/test_other.py": "ONE = 'tests/test_reader.py'\n"}
    write(repository, {**files, "tests/names.yaml": "{}\n"})
    for_all = {repository / name for name in ("pyproject.toml", "constraints.txt")}
    reached = find_reach(repository / "tests/test_reader.py").keys() - for_all
    assert reached == {repository / name for name in (*files, "tests/names.yaml")}
    assert repository / "tests/test_reader.py" not in find_reach(repository / "tests/test_other.py")
