"""Let a process end with the one that started it, however that ends: by an error, a signal, or ``kill -9``.

As a script, it does so and then becomes the command in its arguments. It imports nothing but the standard library, so
that no time passes in which the process would be left behind.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of ``prctl(2)``: the signal that the kernel sends when the parent ends; it stays through ``exec``."""


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; other systems than Linux cannot be asked.

    Args:
        parent: The parent's process id. If that is not the parent any more, this process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
