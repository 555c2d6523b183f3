"""Functions that distinguish refusals from bugs. A refusal is an error that the user can fix."""

import dis
import re

from lightning.fabric.utilities.exceptions import MisconfigurationException

USER_ERRORS = (ValueError, MisconfigurationException, FileNotFoundError)
REFUSALS = (*USER_ERRORS, TypeError, ImportError, OSError)
"""Classes of the errors that this package raises if a run is not possible as requested."""

_REFUSERS = ("lightning_fsdp2.", "lightning.fabric.plugins.environments.")

# Matches an error that this package raised in a DataLoader worker. torch puts the worker's traceback into the message.
_WORKERS_REFUSAL = re.compile(
    r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback .*"
    r'File "[^"\n]*[/\\]lightning_fsdp2[/\\][^"\n]*", line \d+, in \S+\n    raise [^\n]*\n(?:  [^\n]*\n)*\w+: (.*)',
    re.DOTALL,
)


def is_refusal(error: BaseException) -> bool:
    """Return whether Lightning or this package raised ``error`` on purpose, to refuse a run.

    Any other error is a bug, even if its class is one that this package also uses for refusals, such as ``ValueError``.
    """
    traceback = error.__traceback__
    if isinstance(error, MisconfigurationException) or traceback is None or _WORKERS_REFUSAL.match(str(error)):
        return True
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    is_raised = frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raised and str(frame.f_globals.get("__name__")).startswith(_REFUSERS)


def get_message(error: BaseException) -> str:
    """Return the message of ``error``, without the traceback that torch adds to errors of DataLoader workers."""
    found = _WORKERS_REFUSAL.match(str(error))
    return found[1] if found else str(error)
