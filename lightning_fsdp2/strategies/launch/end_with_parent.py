"""Let a process end with its parent, no matter how the parent ends: by an error, a signal, or ``kill -9``.

Run as a script, it does this and then replaces itself with the command in its arguments. It imports only the standard
library, because a process whose parent ends during the imports would be left over.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Option of ``prctl(2)`` for the signal that the kernel sends when the parent ends. ``exec`` keeps the setting."""


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
