"""Checks of the numbers that data modules take."""

import errno
import os

from lightning_fsdp2._refusals import get_root_cause

_MOST = (1 << 31) - 1
"""Largest length of a list in pyarrow, in which data modules keep sequences."""

_WORKERS_PER_PROCESSOR = 16


def check_minimum(option: str, value: int, minimum: int, reason: str) -> None:
    """Raise a TypeError if ``value`` is no int, and a ValueError if it is less than ``minimum`` or far too large.

    The message names the option, and the reason for the minimum.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{option}={value!r} must be an int, at least {minimum}.")
    if value < minimum:
        raise ValueError(f"{option}={value} is less than {minimum}, the smallest value that works: {reason}.")
    if value > _MOST:
        raise ValueError(f"{option}={value} is more than {_MOST}, the largest value that works.")


def name_cache(error: Exception, folder: str) -> Exception:
    """Return an error that names the cache, if ``error`` says that it cannot be written; else ``error`` itself."""
    root = get_root_cause(error)
    if not isinstance(root, OSError):
        return error
    is_full = root.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or "Not enough disk space" in str(root)
    if is_full or str(root.filename).startswith(os.path.join(folder, "")):
        reason = str(root).partition(" Needed:")[0]
        return ValueError(
            f"cache_dir={folder!r}: the tokenised data cannot be kept there ({reason}); free some space there, let this"
            " user write there, or name another folder."
        )
    return error


def check_workers(number: int) -> None:
    """Raise a ValueError for more worker processes on a rank than this machine can have use for."""
    processors = os.cpu_count() or 1
    if number > _WORKERS_PER_PROCESSOR * processors:
        raise ValueError(
            f"num_workers={number} would start {number} processes on each rank, but this machine has {processors}"
            f" processor(s); use at most {_WORKERS_PER_PROCESSOR * processors}, and usually no more than"
            f" {processors} on all ranks of the machine together."
        )
