"""Directories that are complete or absent: written under a hidden name, put on the disk, and then renamed."""

import ctypes
import glob
import os
import shutil
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

_REPLACED = "-replaced"
"""Ends the name of a directory that is about to be replaced."""


def get_hidden_path(path: Path, attempt: str) -> Path:
    """Return where to write what will be ``path``."""
    return path.with_name(f".{path.name}.tmp-{attempt}")


def start_folder(folder: Path, path: Path) -> None:
    """Make ``folder``, the hidden path of ``path``, and remove what earlier, killed attempts left."""
    put_back(path)
    for leftover in _get_attempts(path):
        shutil.rmtree(leftover, ignore_errors=True)
    folder.mkdir(parents=True)


def publish_folder(folder: Path, path: Path) -> None:
    """Give ``folder`` the name ``path``, in the place of what has it now."""
    _sync_folder(folder)
    if path.exists() or path.is_symlink():
        _replace(folder, path)
    else:
        folder.rename(path)
    _sync_folder(path.parent)


def put_back(path: Path) -> None:
    """Undo a replacement that died half way, on a file system where it takes two steps (NFS)."""
    for old in _get_attempts(path, _REPLACED):
        if not path.exists():
            old.rename(path)


def remove_checkpoint(path: str | Path) -> None:
    """Remove a checkpoint directory, a single file, or a link to either, but not what a link points to."""
    path = Path(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _replace(folder: Path, path: Path) -> None:
    """Put ``folder`` in the place of ``path`` at once, and remove what was there."""
    if path.is_symlink() or not _exchange(folder, path):
        # a kill between the two renames leaves the old checkpoint under its hidden name: see `put_back`
        old = folder.with_name(f"{folder.name}{_REPLACED}")
        path.rename(old)
        folder.rename(path)
        remove_checkpoint(old)
    else:
        remove_checkpoint(folder)


def _exchange(first: Path, second: Path) -> bool:
    """Give each path the other's content, atomically; False where the system cannot (other than Linux, some mounts).

    Python's ``os.rename`` cannot replace a directory that is not empty.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _get_attempts(path: Path, ending: str = "") -> list[Path]:
    return list(path.parent.glob(f"{get_hidden_path(Path(glob.escape(path.name)), '*')}{ending}"))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
