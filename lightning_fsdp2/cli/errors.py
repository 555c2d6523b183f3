"""Reports of errors on the command line: one line for an error that the user can fix, a traceback for a bug."""

import os
import sys
from typing import NoReturn


def wants_traceback() -> bool:
    """Return whether jsonargparse's own environment variable asks for tracebacks."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() == "true"


def is_first_of_node() -> bool:
    """Return whether this process is the one that reports errors for its node.

    Launchers number the processes of a node from 0. Without a launcher, there is only one process.
    """
    launched = {"WORLD_SIZE", "SLURM_LOCALID"} & os.environ.keys()  # else LOCAL_RANK is left from something else
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return not launched or rank == "0" or not rank.isdecimal()


def exit_with_error(message: str) -> NoReturn:
    """Write one line about a mistake, and end the process with code 2.

    All ranks have the same error, so one rank per node writes it.
    """
    if is_first_of_node():
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(2)
