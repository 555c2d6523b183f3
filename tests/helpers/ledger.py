"""Work that is done two jobs at a time, each in a fork, and remembered for as long as what decides it is the same."""

import fcntl
import gc
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from helpers.reach import ROOT

STREAMS = 2
"""Jobs that run at the same time."""

VERSIONS = {"Python": platform.python_version()} | {
    name: version(name) for name in ("torch", "lightning", "transformers")
}

Job = Callable[[], int]
"""Runs in a fork; what it returns is the exit status."""


class Ledger:
    """A file of results by name, written line by line, so that whatever ends the run leaves all that was done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self.path.write_text(self._read_whole_lines())  # the last line was cut off
        self.read()

    def read(self) -> None:
        """Read what is in the file, to which another process may be adding a line."""
        lines = map(json.loads, self._read_whole_lines().splitlines())
        self.results = {line.pop("name"): line for line in lines}

    def _read_whole_lines(self) -> str:
        text = self.path.read_text() if self.path.exists() else ""
        return text[: text.rfind("\n") + 1]

    def add(self, name: str, **result: Any) -> None:
        self.results[name] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"name": name, **result}) + "\n")


@cache
def list_installed() -> list[tuple[str, str]]:
    """Return the packages of ``constraints.txt`` that are installed, with their versions."""
    installed = []
    for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        with suppress(PackageNotFoundError):
            installed.append((name, version(name)))
    return installed


def get_key(files: Iterable[Path], *facts: str) -> str:
    """Return a hash of what decides a result: the contents of files, the versions, and further facts."""
    digest = hashlib.sha256(repr((VERSIONS, list_installed(), facts)).encode())
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep another run from the ledgers of ``folder``, for as long as this process or a fork of it lives.

    Raises:
        SystemExit: When another run, or what a killed one left, still works there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"Another run still works in {folder}; wait until it has ended, or end it.") from None
        yield


def run_jobs(jobs: dict[str, Job], folder: Path) -> Iterator[tuple[str, int, float]]:
    """Run each job in a fork of its own, :data:`STREAMS` at a time, in the order given; all end with this process.

    What a job prints is in ``folder``, under its name with the ending ``.log``.

    Yields:
        The name, the exit status (negative: the signal that ended it) and the seconds of each job as it ends.
    """
    waiting = iter(jobs.items())
    running: dict[int, tuple[str, float]] = {}

    def start_next() -> None:
        for name, job in waiting:
            running[_fork(job, folder / f"{name}.log")] = (name, time.monotonic())
            return

    gc.freeze()  # so that collections in the jobs do not copy this process's pages
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for _ in range(STREAMS):
            start_next()
        while running:
            process, status = os.wait()
            if process in running:
                name, start = running.pop(process)
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)  # what the job has left running
                start_next()
                yield name, os.waitstatus_to_exitcode(status), time.monotonic() - start
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
            with suppress(ProcessLookupError):  # a job that had just begun had no group yet
                os.killpg(process, signal.SIGKILL)
        signal.signal(signal.SIGTERM, previous)


def _fork(job: Job, log: Path) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()  # ended together with the ranks that it starts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = job()
        sys.stdout.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


@cache
def get_commit() -> str:
    """Return the commit that was checked out when the run began, with a note if tracked files differed from it."""
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty=, with changes"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return git.stdout.strip()
