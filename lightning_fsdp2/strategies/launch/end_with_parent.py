"""Function that makes a process end when its parent ends for any reason, including an error and ``kill -9``.

When run as a script, this file calls the function, and then replaces its own process with the command in its arguments.
The file imports only the standard library, to start fast: until the imports are done, the process can outlive its
parent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Option of ``prctl(2)`` that sets the signal to send when the parent ends. The setting survives ``exec``."""


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Only Linux supports this.

    Args:
        parent: Process id of the parent. If that process is no longer the parent, this process ends immediately.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
