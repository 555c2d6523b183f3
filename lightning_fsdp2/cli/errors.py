"""Reports of errors on the command line: one line for an error that the user can fix, a traceback for a bug."""

import os
import sys
import time
from typing import NoReturn

_PATIENCE = 10.0  # seconds, since rank 0 may take some to end


def wants_traceback() -> bool:
    """Return whether jsonargparse's own environment variable asks for tracebacks."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() == "true"


def exit_with_error(message: str, *, waits: bool = False) -> NoReturn:
    """Write one line about a mistake, and end the process with code 2.

    Usually all ranks of a run find the same mistake. So only the first rank of a node writes it at once.

    Args:
        message: What is wrong.
        waits: Whether the other ranks may have found something else, and write it if they are still there after some
            seconds. Usually they have been ended by then, by the first rank or by torchrun. If False, they write
            nothing.
    """
    rank = _get_local_rank()
    if rank != "0":
        if not waits:
            sys.exit(2)
        _wait_for_first_rank()
        message = f"local rank {rank}: {message}"
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(2)


def _get_local_rank() -> str:
    """Return the rank on this node, from 0, as launchers write it. Without a launcher, there is only rank 0."""
    if not {"MASTER_PORT", "WORLD_SIZE", "SLURM_LOCALID"} & os.environ.keys():
        return "0"  # if there is a LOCAL_RANK, it is left from something else
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return rank if rank.isdecimal() else "0"


def _wait_for_first_rank() -> None:
    """Wait for some seconds. If the process that started this one ends meanwhile, end, too."""
    parent, end = os.getppid(), time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if os.getppid() != parent:
            sys.exit(2)
        time.sleep(0.05)
