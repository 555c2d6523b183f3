"""Make a process end when its parent ends for any reason, including an error, a signal and ``kill -9``.

Run as a script, this file does so and then replaces itself with the command in its arguments. It imports only the
standard library, to be fast: if the parent ended during the imports, the process would stay.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Option of ``prctl(2)`` that sets the signal to send when the parent ends. The setting survives ``exec``."""


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; only Linux supports this.

    Args:
        parent: Process id of the parent. If that process is no longer the parent, this process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
