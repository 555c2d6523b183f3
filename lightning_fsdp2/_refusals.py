"""Functions that distinguish mistakes of the user from bugs.

A refusal is an error that this package or Lightning raises on purpose, so that the user can fix it.
"""

import dis
import re
import sysconfig
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from lightning.fabric.utilities.exceptions import MisconfigurationException

USER_ERRORS = (ValueError, MisconfigurationException, FileNotFoundError)
"""Classes of the errors that a user's own class may raise about its arguments."""

_AT_WORK = {"_call_impl", "backward", "optimizer_step", "training_step", "validation_step", "test_step", "predict_step"}
"""Names of functions in which models and optimizers compute."""

_FOLDERS = (*set(sysconfig.get_paths().values()), str(Path(__file__).parent))

_REFUSERS = ("lightning_fsdp2.", "lightning.fabric.plugins.environments.")

# Matches an error that this package raised in a DataLoader worker. torch puts the worker's traceback into the message.
_WORKERS_REFUSAL = re.compile(
    r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback .*"
    r'File "[^"\n]*[/\\]lightning_fsdp2[/\\][^"\n]*", line \d+, in \S+\n    raise [^\n]*\n(?:  [^\n]*\n)*\w+: (.*)',
    re.DOTALL,
)


class BugInProcessError(RuntimeError):
    """Bug in another process, whose traceback is the message."""


def is_refusal(error: BaseException) -> bool:
    """Return whether Lightning or this package raised ``error`` on purpose, to refuse a run.

    Any other error is a bug, even if its class is one that this package also uses for refusals, such as ``ValueError``.
    """
    if isinstance(error, BugInProcessError):
        return False
    traceback = error.__traceback__
    if isinstance(error, MisconfigurationException) or traceback is None or _WORKERS_REFUSAL.match(str(error)):
        return True
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    is_raised = frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raised and str(frame.f_globals.get("__name__")).startswith(_REFUSERS)


def is_of_package(error: BaseException) -> bool:
    """Return whether this package raised ``error`` or a cause of it, with a message that names the options itself."""
    frames = [[frame for frame, _ in walk_tb(cause.__traceback__)] for cause in _list_causes(error)]
    return any(each and _is_ours(each[-1]) for each in frames)


def is_mistake(error: BaseException) -> bool:
    """Return whether ``error`` is probably a mistake of the user: a refusal, or an error of a library before any step.

    An error of a library is none if the user's own code is in the traceback, which then shows the line, or if a model
    or an optimizer was at work. An error in this package's code that it did not raise on purpose is a bug.
    """
    if is_refusal(error):
        return True
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if any(frame.f_code.co_name in _AT_WORK or not _is_installed(frame.f_code.co_filename) for frame in frames):
        return False
    return isinstance(error, Exception) and not _is_ours(frames[-1])


def has_mistake(error: BaseException) -> bool:
    """Return whether ``error``, or an original error that jsonargparse wrapped in it, is a mistake of the user.

    jsonargparse turns any error in an ``__init__`` into a ValueError. A plain ValueError also counts as a mistake,
    since a user's own class may raise one.
    """
    return _is_explained(error) or is_mistake(get_root_cause(error))


def get_message_of_cause(error: BaseException) -> str:
    """Return the message of ``error`` if it explains a mistake, and otherwise one line about its original error."""
    return str(error) if _is_explained(error) else get_message(get_root_cause(error))


def _is_explained(error: BaseException) -> bool:
    causes = _list_causes(error)
    return isinstance(causes[-1], USER_ERRORS) or any(map(is_refusal, causes))


def get_root_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain in which each error is the cause of the next."""
    return _list_causes(error)[-1]


def _list_causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return causes


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("lightning_fsdp2.")


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package, or to this package."""
    return file.startswith(("<", *_FOLDERS))


def get_message(error: BaseException) -> str:
    """Return one line about a mistake. About an error of a library, say which raised it, and how to see where."""
    if found := _WORKERS_REFUSAL.match(str(error)):
        return found[1]  # without the traceback that torch adds to errors of DataLoader workers
    if is_refusal(error):
        return str(error)
    *_, (frame, _) = walk_tb(error.__traceback__)
    source = frame.f_globals.get("__name__")
    message = str(error).partition("Exception raised from")[0].rstrip()  # without the frames of C++
    return f"{type(error).__name__}: {message} (raised by {source}; JSONARGPARSE_DEBUG=true shows where)"
