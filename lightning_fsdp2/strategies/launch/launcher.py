"""Launcher for ``python script.py``. A node's first process starts the node's other ranks. When it ends, they end."""

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script
from typing_extensions import override

from lightning_fsdp2.compat.lightning import SubprocessScriptLauncher
from lightning_fsdp2.ranks.failures import ExitOfAllRanks, describe_ranks
from lightning_fsdp2.strategies.launch import end_with_parent

logger = logging.getLogger(__name__)

_LAUNCHED = "LIGHTNING_FSDP2_LAUNCHED"
"""Environment variable that this launcher sets in each process that it starts."""

_SECONDS_AFTER_ERROR = 5.0
"""Number of seconds that a failed process waits for the ranks that it started. Its exit then ends these ranks."""

_PAUSE_SECONDS = 0.05


class RankLauncher(SubprocessScriptLauncher):
    """Lightning's launcher for scripts, changed so that all ranks end when the process that started them ends.

    Lightning's own launcher forwards errors and some signals to the ranks, but only during a fit. If the first process
    ends in another way, such as by ``kill -9``, the ranks would keep running and occupy their devices.

    Args:
        environment: Cluster environment of the run.
        devices: Number of processes on this node.
        nodes: Number of nodes.
        check: Function that checks the environment variables. It is called before the first process is started, because
            Lightning overwrites these variables for the new processes.
    """

    has_started: ClassVar[bool] = False
    """Whether this process has started other ranks. It starts them only once, for all of its Trainers."""

    has_failed: ClassVar[bool] = False
    """Whether the last Trainer run in this process ended with an error, even if the script caught the error.

    A ``SystemExit`` counts as an error if ranks that this process has started stay in the run.
    """

    _started: ClassVar[Sequence[int]] = ()
    """Ranks that this process has started."""

    _runs: ClassVar[int] = 0
    """Number of Trainer runs in this process, which is the same on all ranks."""

    _has_killed = False

    def __init__(self, environment: ClusterEnvironment, devices: int, nodes: int, check: Callable[[], None]) -> None:
        super().__init__(environment, devices, nodes)
        self._check = check

    @override
    def launch(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().launch(*args, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        module: Any = subprocess_script
        # replace `Popen` in Lightning's module, because Lightning has no hook to change the commands of the ranks
        module.subprocess = SimpleNamespace(Popen=_start)
        try:
            super()._call_children_scripts()
        finally:
            module.subprocess = subprocess
        RankLauncher.has_started = True
        first = self.cluster_environment.node_rank() * self.num_processes
        RankLauncher._started = range(first + 1, first + self.num_processes)
        for rank, process in zip(RankLauncher._started, self.procs, strict=True):
            # a daemon, so that it does not keep this process from ending
            threading.Thread(target=self._report_end, args=(rank, process), daemon=True).start()
        atexit.register(self._wait_for_ranks)

    @classmethod
    def note_start(cls) -> None:
        """Note that a Trainer run begins in this process."""
        cls.has_failed = False
        cls._runs += 1

    @classmethod
    def note_end(cls, exception: BaseException) -> None:
        """Note how a Trainer run ended in this process.

        All ranks may leave a run by ``SystemExit``, such as at a time limit. A rank that stays in the run waits for
        this one in a collective, as after an error. The exit code then tells that the run has failed.
        """
        cls.has_failed = not isinstance(exception, ExitOfAllRanks)
        if not (cls.has_failed and isinstance(exception, SystemExit) and is_of_launcher()):
            return
        staying = _leave(cls._started, cls._runs)
        cls.has_failed = bool(staying)
        if staying:
            code, exception.code = exception.code, exception.code or 1
            logger.warning(
                "This process leaves the run by SystemExit(%s), but these ranks do not: %s. They wait for it in a"
                " collective. They have %g seconds to end, and the exit code is %s.",
                code,
                describe_ranks(staying),
                _SECONDS_AFTER_ERROR,
                exception.code,
            )

    @override
    def kill(self, signum: Any) -> None:
        self._has_killed = True
        super().kill(signum)

    def _report_end(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Wait until a rank has ended, and name it if a signal from elsewhere killed it, so that it left no message."""
        code = process.wait()
        if code < 0 and not self._has_killed:
            logger.error("Rank %d (process %d) was killed by %s.", rank, process.pid, signal.Signals(-code).name)

    def _wait_for_ranks(self) -> None:
        """Wait until the other ranks have also reached the end of the script. After an error, wait only briefly."""
        has_failed = self._has_killed or self.has_failed or getattr(sys, "last_value", None) is not None
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_AFTER_ERROR if has_failed else None)


def is_of_launcher() -> bool:
    """Return whether a :class:`RankLauncher` started this process, or whether this process used one to start others."""
    return RankLauncher.has_started or _LAUNCHED in os.environ


def _leave(started: Sequence[int], run: int) -> list[int]:
    """Say that this rank leaves the run, and return the ranks of ``started`` that stay in it.

    These ranks have some seconds to leave the run too. If they cannot be asked, return all of them.

    Args:
        started: Ranks that this process has started.
        run: Number of the run in this process. It is the same on all ranks.
    """
    staying = [*started]
    if not dist.is_initialized():
        return staying
    store: Any = cast(Any, dist.group.WORLD).get_group_store()
    deadline = time.monotonic() + _SECONDS_AFTER_ERROR
    with suppress(RuntimeError):  # the process that has the store is gone
        store.set(f"rank {dist.get_rank()} has left run {run}", "")
        while staying and time.monotonic() < deadline:
            staying = [rank for rank in staying if not store.check([f"rank {rank} has left run {run}"])]
            time.sleep(_PAUSE_SECONDS if staying else 0)
    return staying


def _start(command: list[str], *, env: dict[str, str], cwd: str | None) -> "subprocess.Popen[bytes]":
    # `end_with_parent` makes the kernel kill a child when the thread that started the child ends, so use it only in the
    # main thread
    is_watched = threading.current_thread() is threading.main_thread()
    script = [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid())] if is_watched else []
    return subprocess.Popen([*script, *command], env={**env, _LAUNCHED: "1"}, cwd=cwd)
