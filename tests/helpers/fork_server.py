"""A ``python`` that starts at once: what runs the program is forked from a process that has imported everything.

A fresh interpreter uses 6 CPU seconds until torch, Lightning, transformers and this package are imported; a fork needs
less than a tenth of one. It has the arguments, environment, folder, descriptors and namespaces of the process that
asked for it, runs the program as ``__main__``, and ends as an interpreter does. What the program starts with
``sys.executable`` is forked, too.

The process that asks (:mod:`helpers.fork_stand_in`) hands on signals, takes the program with it when it dies, and ends
as the program does. Still, the two have different numbers and process groups, libraries have read the server's
environment when they were imported, and the hashes of strings are the same in all forks. So one test of each launcher,
and the tests of how processes start and end, use ``sys.executable``.
"""

import atexit
import ctypes
import fcntl
import gc
import marshal
import os
import platform
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from lightning_fsdp2.strategies.launch.end_with_parent import end_with_parent

PRELOADED = (
    "datasets",
    "lightning.pytorch.cli",
    "lightning_fsdp2.cli.app",
    "torch.distributed.launcher.api",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)

FORKED_SECONDS = "FORKED_SECONDS"
"""Variable that names a file, to which the processor seconds of each forked program are added."""

NAMESPACES = ("net", "uts", "mnt")
MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 250


@cache
def get_python() -> str:
    """Return the path of a program to use in place of ``sys.executable``, for as long as this process lives."""
    folder = tempfile.TemporaryDirectory(prefix="fork-server-")
    path = Path(folder.name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path / "socket"))
        listener.listen(64)  # programs that come before the imports are done wait
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "GLIBC_TUNABLES": "",  # huge pages would blur what programs measure of their memory
            "HF_HOME": str(path / "hugging-face"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        descriptor = listener.fileno()
        command = [sys.executable, __file__, str(descriptor), str(os.getpid()), str(path / "python")]
        server = subprocess.Popen(command, env=environment, pass_fds=[descriptor], start_new_session=True)

    @atexit.register
    def stop() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    stand_in = Path(__file__).with_name("fork_stand_in.py")
    script = path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{stand_in}" "{path / "socket"}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def serve(listener: socket.socket) -> socket.socket:
    """Fork for each process that asks, and return in the fork the connection with that process."""
    gc.freeze()  # so that collections in the forks do not copy the pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which reaps those that have ended
    own = os.getpid()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            end_with_parent(own)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return connection
        connection.close()


def fork_program(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork once more, and return in the fork what to run, and descriptors; this process watches it until it ends."""
    data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
    start = marshal.loads(data)
    os.setsid()
    enter_namespaces(start["process"])
    own = os.getpid()
    program = os.fork()
    if program != 0:
        for descriptor in descriptors:
            os.close(descriptor)
        watch(program, connection, list(start["is_ignored"]), start["environment"].get(FORKED_SECONDS))
    end_with_parent(own)
    connection.close()
    return start, descriptors


def enter_namespaces(process: int) -> None:
    """Enter the namespaces of ``process``."""
    libc = ctypes.CDLL(None, use_errno=True)
    others = [Path(f"/proc/{process}/ns/{name}") for name in NAMESPACES]
    files = [
        os.open(other, os.O_RDONLY)
        for other, name in zip(others, NAMESPACES, strict=True)
        if other.readlink() != Path(f"/proc/self/ns/{name}").readlink()
    ]
    for file in files:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"could not enter the namespaces of process {process}")
        os.close(file)


def watch(program: int, connection: socket.socket, signals: list[int], seconds: str | None) -> NoReturn:
    """Hand on signals until the program ends, and tell how; kill it if the process that asked for it ends before.

    A file of the name ``seconds`` gets the processor seconds that the program has used.
    """
    for number in signals:
        signal.signal(number, signal.SIG_IGN)  # those for the program's process group
    end = os.pidfd_open(program)
    try:
        while end not in select.select([connection, end], [], [])[0]:
            os.kill(program, (connection.recv(1) or bytes([signal.SIGKILL]))[0])
        _, status, usage = os.wait4(program, 0)
        if seconds and os.path.exists(seconds):
            with open(seconds, "a") as file:
                file.write(f"{usage.ru_utime + usage.ru_stime}\n")
        connection.send(str(status).encode())
    finally:
        os._exit(0)


def become(start: dict[str, Any], received: list[int], python: str) -> None:
    """Apply what the program inherits."""
    for number, is_ignored in start["is_ignored"].items():
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if is_ignored else default)
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(aside, start["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=start["is_unbuffered"] or stream is sys.stderr or stream.isatty())
    os.chdir(start["folder"])
    imported_with = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(start["environment"])
    del sys.path[: 1 + len(list(filter(None, imported_with)))]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.executable = python
    platform._uname_cache = None  # type: ignore[attr-defined]  # it has the name of another host
    sys.modules["numpy"].random.seed()


def run(program: list[str]) -> None:
    """Run a module, code or a script as ``__main__``, as the interpreter does."""
    sys.orig_argv = [sys.executable, *program]
    sys.modules["__main__"] = main = ModuleType("__main__")
    kind, *arguments = program
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        sys.argv = program
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


if __name__ == "__main__":
    _, number, parent, python = sys.argv
    end_with_parent(int(parent))
    before = set(os.environ)
    for name in PRELOADED:
        import_module(name)
    added = {name: value for name, value in os.environ.items() if name not in before}
    start, received = fork_program(serve(socket.socket(fileno=int(number))))
    start["environment"] = added | start["environment"]
    become(start, received, python)
    run(start["program"])
