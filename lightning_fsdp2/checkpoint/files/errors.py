"""Errors of the file system while checkpoints are written and read: which file they are about, and what is kept."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal


class NotDurableError(OSError):
    """Error for a checkpoint that is complete and has its final path, but is not surely on disk."""


@contextmanager
def name_file(path: object) -> Iterator[None]:
    """Add ``path`` to the errors of the block. Python names no file in errors of reading, writing and syncing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def say_what_is_kept(path: object, what: Literal["checkpoint", "export"] = "checkpoint") -> Iterator[None]:
    """Say in the file system's errors of the block that ``path`` could not be saved, and what is kept.

    Args:
        path: Path of what is being saved. A checkpoint in an object store replaces one of the same name at once.
        what: What is being saved.
    """
    try:
        yield
    except NotDurableError:
        raise
    except OSError as error:
        kept = f"earlier {what}s" if isinstance(path, Path) else f"earlier {what}s with other names"
        raise OSError(
            error.errno or errno.EIO,
            f"Could not save the {what} {str(path)!r} ({error.strerror or error}); {kept} are kept",
            error.filename or str(path),
        ) from error


def raise_unreadable(error: BaseException, path: object) -> None:
    """Raise the error of the file system that caused ``error``, if there is one, with the name of the file.

    A file that may not be read is not damaged. An invalid argument, however, comes from a damaged archive, which names
    places outside of itself.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
            cause.filename = cause.filename or str(path)
            raise cause
        cause = cause.__cause__ or cause.__context__
