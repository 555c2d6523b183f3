"""A test that is not marked slow and uses too much of the processor fails by itself."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import limits
from helpers.line_trace import FirstFailure

SPIN = "end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n"
CHILD = "subprocess.run([sys.executable, '-S', '-c', 'sum(range(40_000_000))'], check=True)\n"
WAIT = "time.sleep(0.3)\n"


@pytest.mark.parametrize(
    ("mark", "body", "failures"),
    [("", SPIN, 1), ("", CHILD, 1), ("", WAIT, 0), ("@pytest.mark.slow", SPIN, 0), ("@pytest.mark.release", SPIN, 0)],
)
def test_it_fails(mark: str, body: str, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_test(mark, body, tmp_path, monkeypatch)
    assert result.failures == failures


@pytest.mark.parametrize(("seconds", "failures"), [(0.12, 0), (0.3, 1)])
def test_a_shared_fixture_is_checked_by_itself(
    seconds: float, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times 0.12 seconds would be too much for one test."""
    spin = SPIN.replace("0.3", str(seconds))
    shared = f"@pytest.fixture(scope='module')\ndef shared():\n    {spin}\n"
    body = SPIN.replace("0.3", "0.12")
    result = run_test(f"{shared}\n@pytest.mark.usefixtures('shared')", body, tmp_path, monkeypatch)
    assert result.failures == failures


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("uses", "failures"), [("0.3, 0.1", 0), ("0.3, 0.3", 1)])
def test_it_is_repeated_once_before_it_fails(
    uses: str, failures: int, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """What a test uses depends on the machine too. A fixture that it shares is set up again."""
    spin = SPIN.replace("0.3", "next(uses)")
    fixture = f"\nuses = iter([{uses}])\n@pytest.fixture(scope='module')\ndef shared():\n    {spin}\n"
    mark = f"{fixture}@pytest.mark.usefixtures('shared')" if shared else f"\nuses = iter([{uses}])"
    options = ["-p", "pytest_rerunfailures", *(o for o in pytestconfig.getini("addopts") if "rerun" in o)]
    result = run_test(mark, "pass" if shared else spin, tmp_path, monkeypatch, options=options)
    assert (result.failures, result.repetitions) == (failures, 1)


def test_a_slow_machine_has_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_test("", SPIN, tmp_path, monkeypatch, slowness=100.0).failures == 0


def test_a_machine_is_slow_while_processes_of_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOP_SECONDS", 1000.0)  # only other processes count
    monkeypatch.setattr(limits, "READINGS", 3)
    command = ["nice", "-n", "19", sys.executable, "-S", "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(20)]
    try:
        time.sleep(0.1)
        with_own = limits.measure_slowness()
        monkeypatch.setattr(limits, "RUN", busy[0].pid)  # the other 19 are not of this run
        assert limits.measure_slowness() > with_own + 10 / os.cpu_count()
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_test_whose_lines_are_traced_or_broken_has_all_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FirstFailure(tmp_path / "report")
    assert run_test("", SPIN, tmp_path, monkeypatch, plugins=[plugin]).failures == 0


class Result:
    """A pytest plugin that counts calls, failures and repetitions."""

    calls = failures = repetitions = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.calls += report.when == "call"
        self.repetitions += report.outcome == "rerun"
        if report.failed:
            assert report.when != "call"
            assert "a test may use 0.2, unless it is marked slow" in report.longreprtext
            self.failures += 1


def run_test(
    mark: str,
    body: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    slowness: float = 1.0,
    plugins: Sequence[object] = (),
    options: Sequence[str] = (),
) -> Result:
    monkeypatch.setattr(limits, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(limits, "measure_slowness", lambda: slowness)
    path = folder / f"test_{folder.name}.py"  # Python keeps imported files by their names
    path.write_text(f"import pytest, subprocess, sys, time\n{mark}\ndef test_it():\n    {body}")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: .\n    release: .\n")
    result = Result()
    common = ["-q", "-p", "no:cacheprovider", "--disable-plugin-autoload"]
    gc.freeze()  # a collection of all that this process has imported would count
    pytest.main([str(path), *common, *options], plugins=[limits, result, *plugins])
    assert result.calls == 1 or result.failures == 1 or result.repetitions == 1
    return result
