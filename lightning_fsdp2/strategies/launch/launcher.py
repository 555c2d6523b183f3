"""The launcher for ``python script.py``: the first process of a node starts the others, which end when it ends."""

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script
from typing_extensions import override

from lightning_fsdp2.compat.lightning import SubprocessScriptLauncher
from lightning_fsdp2.strategies.launch import end_with_parent

_LAUNCHED = "LIGHTNING_FSDP2_LAUNCHED"
"""Environment variable that tells a process that this launcher started it. Nothing else would tell it."""

_SECONDS_AFTER_ERROR = 5.0
"""Number of seconds that a failed process waits for the ranks that it started, before it exits and they end too."""


class RankLauncher(SubprocessScriptLauncher):
    """Lightning's launcher, except that no rank outlives the process that started it, no matter how that process ends.

    Lightning tells the ranks about errors and some signals, but only during a fit. If a process is killed while its
    ranks still import torch, or by an unhandled signal, the ranks would live on and hold their devices.

    Args:
        environment: Cluster environment for which processes are started.
        devices: Number of processes on this node.
        nodes: Number of nodes.
        check: Function to call before the first process is started. After that it would be too late, because Lightning
            overwrites environment variables.
    """

    has_started: ClassVar[bool] = False
    """Whether this process has started others. It does so only once, for all of its Trainers."""

    has_failed: ClassVar[bool] = False
    """Whether the last run of any Trainer in this process ended with an error, even if the script caught it."""

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
        module.subprocess = SimpleNamespace(Popen=_start)  # Lightning has no hook for the start of a command
        try:
            super()._call_children_scripts()
        finally:
            module.subprocess = subprocess
        RankLauncher.has_started = True
        atexit.register(self._wait_for_ranks)

    @override
    def kill(self, signum: Any) -> None:
        self._has_killed = True
        super().kill(signum)

    def _wait_for_ranks(self) -> None:
        """Wait until the other ranks have also reached the end of the script; after an error, only briefly."""
        has_failed = self._has_killed or self.has_failed or getattr(sys, "last_value", None) is not None
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_AFTER_ERROR if has_failed else None)


def is_of_launcher() -> bool:
    """Return whether this process has started the other ranks of its node, or was started by the process that did."""
    return RankLauncher.has_started or _LAUNCHED in os.environ


def _start(command: list[str], *, env: dict[str, str], cwd: str | None) -> "subprocess.Popen[bytes]":
    # to the kernel, the parent ends when the thread that started the process ends
    is_watched = threading.current_thread() is threading.main_thread()
    script = [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid())] if is_watched else []
    return subprocess.Popen([*script, *command], env={**env, _LAUNCHED: "1"}, cwd=cwd)
