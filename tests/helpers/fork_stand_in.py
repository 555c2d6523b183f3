"""Takes the place of ``python``: passes signals on and ends as the program does.

The script that :func:`helpers.fork_server.get_python` writes runs this file. It imports little, to start at once.
"""

import contextlib
import marshal
import os
import signal
import socket
import sys

HANDED_ON = [signal.Signals[f"SIG{name}"] for name in ("HUP", "INT", "QUIT", "TERM", "ALRM", "USR1", "USR2")]
"""Signals that the program gets, if they are not ignored.

Any other acts on this process alone. If it ends this process, the program is killed. But SIGSTOP does not stop the
program, and SIGCONT and SIGWINCH do not reach it.
"""


def main(address: str, arguments: list[str]) -> None:
    is_unbuffered = arguments[:1] == ["-u"]
    program = arguments[is_unbuffered:]
    if not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        os.execv(sys.executable, [sys.executable, *arguments])  # other options are for a fresh interpreter
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        hand_over(server, program, is_unbuffered)
        end_as(wait(server))


def hand_over(server: socket.socket, program: list[str], is_unbuffered: bool) -> None:
    """Send what a process inherits, and from now on the signals that arrive here."""
    descriptors = [number for number in map(int, os.listdir("/proc/self/fd")) if is_inherited(number)]
    is_ignored = {int(number): signal.getsignal(number) is signal.SIG_IGN for number in HANDED_ON}
    start = {
        "process": os.getpid(),
        "program": program,
        "is_unbuffered": is_unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
        "is_ignored": is_ignored,
    }
    socket.send_fds(server, [marshal.dumps(start)], descriptors)
    for number in HANDED_ON:
        if not is_ignored[number]:
            signal.signal(number, lambda number, frame: server.send(bytes([number])))


def is_inherited(descriptor: int) -> bool:
    with contextlib.suppress(OSError):  # the one that has listed them is closed by now
        return os.get_inheritable(descriptor)
    return False


def wait(server: socket.socket) -> int:
    """Return the program's exit code, or if a signal ended it, minus its number."""
    status = server.recv(16)
    return os.waitstatus_to_exitcode(int(status)) if status else -signal.SIGKILL


def end_as(code: int) -> None:
    """End this process with an exit code, or by a signal."""
    if code < 0:
        with contextlib.suppress(OSError):  # nobody can handle SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
