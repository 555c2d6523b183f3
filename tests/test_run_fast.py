"""`make test` runs what is not slow, shows what failed, and forgets it."""

from pathlib import Path

import pytest
from helpers import ledger

from tools import run_all, run_fast


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one in place of this."""
    for module in (ledger, run_all, run_fast):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "docs" / "test-all.md")
    monkeypatch.setattr(run_fast, "FOLDER", tmp_path / ".test")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow: takes long']\n")
    (tmp_path / "tests").mkdir()
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(f"import os, pytest\n{text}")


SLOW = "@pytest.mark.slow\ndef test_slow(): raise AssertionError\n"


def test_what_is_not_slow_runs_every_time(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(repository, mixed=f"def test_fast(): pass\n{SLOW}", slow=SLOW, other="def test_skipped(): pytest.skip('no')")
    for _ in range(2):
        assert run_fast.main() == 0
        output = capfd.readouterr().out
        assert "tests/test_mixed.py: 1 passed in" in output
        assert output.splitlines()[-1] == "1 passed, 0 failed, 1 skipped"


def test_what_fails_or_dies_is_shown(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(
        repository,
        fails="def test_fails(): raise ValueError('the reason')",
        dies="def test_dies(): os._exit(9)",
        broken="import no_such_module",
        passes="def test_passes(): pass",
    )
    assert run_fast.main() == 1
    output = capfd.readouterr().out
    assert sorted(line for line in output.splitlines() if line.startswith("failed: ")) == [
        "failed: tests/test_broken.py (ended with 2, see .test/tests/test_broken.py.log)",
        "failed: tests/test_dies.py (ended with 9, see .test/tests/test_dies.py.log)",
        "failed: tests/test_fails.py::test_fails",
    ]
    assert output.endswith("1 passed, 3 failed, 0 skipped\n")


def test_arguments_are_those_of_pytest(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(repository, two="def test_one(): pass\ndef test_two(): raise AssertionError\n")
    assert run_fast.main(["-k", "no_such_name"]) == 1
    assert capfd.readouterr().out.endswith("0 passed, 0 failed, 0 skipped\n")
    assert run_fast.main(["-k", "one"]) == 0
    assert "1 passed in" in capfd.readouterr().out
    assert run_fast.main([str(repository / "tests" / "test_two.py::test_one")]) == 0
    assert "= 1 passed" in capfd.readouterr().out
