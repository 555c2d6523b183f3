"""The processes that ``python script.py`` starts, with scripts that import nothing: real ones, in tenths of seconds."""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from helpers.ranks import RankError, run_ranks
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script

from lightning_fsdp2.ranks.failures import ExitOfAllRanks
from lightning_fsdp2.strategies.launch import end_with_parent, launcher
from lightning_fsdp2.strategies.launch.launcher import RankLauncher, is_of_launcher

SCRIPT = """
import os, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
names = ("LOCAL_RANK", "WORLD_SIZE", "LIGHTNING_FSDP2_LAUNCHED")
(folder / "new").write_text(" ".join([str(os.getpid()), *map(os.environ.get, names)]))
(folder / "new").rename(folder / "started")
{}
(folder / "ended").touch()
"""


def launch(folder: Path, then: str, function: Callable[[RankLauncher], None]) -> RankLauncher:
    """Start a rank beside this process, as a script does, and call ``function``; the rank goes on with ``then``."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(then))
    sys.argv = [str(script), str(folder)]
    sys.modules["__main__"] = ModuleType("__main__")  # which is no longer pytest
    del os.environ["LOCAL_RANK"]
    os.environ["WORLD_SIZE"] = "2"
    for name in ("SIGHUP", "SIGQUIT", "SIGTERM"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    own = RankLauncher(LightningEnvironment(), 2, 1, lambda: None)
    own.launch(lambda: function(own))
    return own


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.guarantees("no-orphans")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGQUIT"])
@pytest.mark.parametrize("is_early", [True, False], ids=["spawn", "import"])
def test_no_rank_outlives_the_process_that_started_it(is_early: bool, name: str, tmp_path: Path) -> None:
    def run() -> None:
        def end(own: RankLauncher) -> None:
            (tmp_path / "pid").write_text(str(own.procs[0].pid))
            if not is_early:
                wait_for(tmp_path / "started")
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(60)

        launch(tmp_path, "time.sleep(60)", end)

    with pytest.raises(RankError, match="rank 0 died or hung without a result"):
        run_ranks(run, 1)
    with suppress(ProcessLookupError):  # it has ended already
        assert select.select([os.pidfd_open(int((tmp_path / "pid").read_text()))], [], [], 60)[0], "it still runs"
    assert not (tmp_path / "ended").exists()


@pytest.mark.guarantees("environment-of-the-launcher")
def test_a_rank_knows_who_started_it_and_is_waited_for(tmp_path: Path) -> None:
    def run() -> tuple[bool, list[str]]:
        own = launch(tmp_path, "time.sleep(0.5)", lambda own: None)
        own._wait_for_ranks()  # as at the end of the script
        assert subprocess_script.subprocess is subprocess  # for launchers of Lightning's own
        return is_of_launcher(), [name for name in os.environ if name.startswith("LIGHTNING_FSDP2")]

    assert run_ranks(run, 1) == [(True, [])]
    assert (tmp_path / "started").read_text().split()[1:] == ["1", "2", "1"]
    assert (tmp_path / "ended").exists()


def test_after_an_error_a_rank_is_waited_for_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_SECONDS_AFTER_ERROR", 0.1)
    monkeypatch.setattr(RankLauncher, "has_failed", True)

    wait, timeouts = subprocess.Popen.wait, []

    def note_and_wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        timeouts.append(timeout)
        return wait(process, timeout)

    def run() -> tuple[int | None, bool]:
        own = launch(tmp_path, "time.sleep(60)", lambda own: None)
        monkeypatch.setattr(subprocess.Popen, "wait", note_and_wait)
        own._wait_for_ranks()
        return own.procs[0].poll(), 0.1 in timeouts

    assert run_ranks(run, 1) == [(None, True)]  # it still ran, and ended with the process that has started it


@pytest.mark.parametrize(
    ("exception", "has_failed", "is_told"),
    [
        (SystemExit(3), True, True),
        (SystemExit(0), True, True),
        (SystemExit(), True, True),
        (ExitOfAllRanks(143), False, False),
        (KeyboardInterrupt(), True, False),
        (ValueError(), True, False),
    ],
    ids=repr,
)
def test_only_an_exit_of_all_ranks_is_no_failure(
    exception: BaseException,
    has_failed: bool,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(RankLauncher, "has_started", True)
    monkeypatch.setattr(RankLauncher, "has_failed", None)
    monkeypatch.setattr(RankLauncher, "_started", [1])  # which cannot be asked without a process group
    RankLauncher.note_end(exception)
    assert not is_told or exception.code  # type: ignore[attr-defined]
    assert RankLauncher.has_failed is has_failed
    assert ("leaves the run by SystemExit" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("leaving", "staying"), [({0, 1, 2}, ""), ({0}, "1-2"), ({0, 2}, "1")], ids=["all", "alone", "some"]
)
def test_ranks_that_leave_the_run_together_are_no_failure(
    leaving: set[int], staying: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run before this one, which all have left, changes nothing."""
    monkeypatch.setattr(launcher, "_SECONDS_AFTER_ERROR", 1.0)

    def run() -> tuple[bool, Any]:
        rank = dist.get_rank()
        if rank == 0:
            RankLauncher.has_started, RankLauncher._started = True, [1, 2]
        else:
            os.environ["LIGHTNING_FSDP2_LAUNCHED"] = "1"
        for ranks in ({0, 1, 2}, leaving):
            dist.barrier()
            RankLauncher.note_start()
            time.sleep(0.1 * rank)
            end = SystemExit(0)
            if rank in ranks:
                RankLauncher.note_end(end)
        dist.barrier()  # rank 0 has the store
        assert rank or not staying or f"but these ranks do not: {staying}." in caplog.text
        return RankLauncher.has_failed, end.code

    assert run_ranks(run, 3) == [(bool(staying), 1 if staying else 0), (False, 0), (False, 0)]


def test_a_rank_that_was_killed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> list[str]:
        with caplog.at_level(logging.ERROR, launcher.__name__):
            own = launch(tmp_path, "os.kill(os.getpid(), 9)", lambda own: None)
            for thread in threading.enumerate():
                if "_report_end" in thread.name:
                    thread.join()
        return [message.replace(str(own.procs[0].pid), "N") for message in caplog.messages]

    assert run_ranks(run, 1) == [["Rank 1 (process N) was killed by SIGKILL."]]


def test_a_rank_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    own, go = tmp_path / "runs", tmp_path / "go"
    code = f"import os, time; open({str(own)!r}, 'w')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(launcher._start([sys.executable, "-c", code], env={**os.environ}, cwd=None))
        wait_for(own)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    go.touch()
    assert started[0].wait(60) == 0


def test_a_process_whose_parent_has_ended_already_ends_at_once() -> None:
    script = [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid() + 1), "sleep", "60"]
    assert subprocess.run(script, timeout=30).returncode == -signal.SIGKILL
