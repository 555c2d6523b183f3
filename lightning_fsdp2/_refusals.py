"""Tell a refusal of this package, which the user can put right, from an error that nobody expected: a bug."""

import dis
import re

from lightning.fabric.utilities.exceptions import MisconfigurationException

USER_ERRORS = (ValueError, MisconfigurationException, FileNotFoundError)
REFUSALS = (*USER_ERRORS, TypeError, ImportError, OSError)
"""What this package raises where a run cannot be as it was asked for."""

_REFUSERS = ("lightning_fsdp2.", "lightning.fabric.plugins.environments.")

# what torch raises anew of an error in a process of a DataLoader: its text, which ends with a `raise` of this package
_WORKERS_REFUSAL = re.compile(
    r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback .*"
    r'File "[^"\n]*[/\\]lightning_fsdp2[/\\][^"\n]*", line \d+, in \S+\n    raise [^\n]*\n(?:  [^\n]*\n)*\w+: (.*)',
    re.DOTALL,
)


def is_refusal(error: BaseException) -> bool:
    """Whether Lightning, its launchers' environments, or a ``raise`` of this package says what is wrong with a run.

    Any other error, be it of the same class, comes from code that did not expect it: a bug.
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
    """What ``error`` says, without the traceback of the worker process that it comes from."""
    found = _WORKERS_REFUSAL.match(str(error))
    return found[1] if found else str(error)
