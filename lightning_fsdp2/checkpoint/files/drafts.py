"""Atomic writes of checkpoints: each checkpoint is written to a hidden draft, synced to disk, and then renamed.

While ``runs/step=100.ckpt`` is being written, ``runs`` contains::

    .saving-1f2e3d4c.lock            locked by the saving process as long as it lives
    .saving-1f2e3d4c/step=100.ckpt   the draft
    .saving-1f2e3d4c/.saving-replaced/
                                     the previous ``step=100.ckpt``, if the system cannot swap two directories
                                     atomically

Before a checkpoint is removed, it is moved into such a hidden folder, so that an interrupted removal never leaves an
incomplete checkpoint at the original path.

Object stores cannot rename files. A checkpoint there is written in place, and is complete once it has its
``meta.json``, which is written last.
"""

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

from typing_extensions import TypeIs
from upath import UPath

from lightning_fsdp2.checkpoint.files.errors import NotDurableError, name_file, say_what_is_kept

logger = logging.getLogger(__name__)

AnyPath: TypeAlias = Path | UPath

SUMMARY_FILE, METADATA_FILE = "meta.json", "meta.pt"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_PREFIX = ".saving-"
_REPLACED = f"{_PREFIX}replaced"
# Older versions of this package used this name instead of `_REPLACED`. It is ambiguous, because a user's checkpoint may
# also be called `replaced`.
_OLD_REPLACED = "replaced"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LESS_SPACE = {
    "checkpoint": "keep fewer checkpoints (ModelCheckpoint(save_top_k=...))",
    "export": "choose a folder on another disk",
}

_PARTS = (".metadata", METADATA_FILE, SUMMARY_FILE)
_PART_SUFFIX = ".distcp"
_ARCHIVE = b"PK\x03\x04"
_FIRST_RECORD = b"/data.pkl"
_HEAD_SIZE = 512


def get_path(path: str | os.PathLike[str] | UPath) -> AnyPath:
    """Return a path object for a local path, or for a URL that fsspec supports, such as ``s3://bucket/last.ckpt``."""
    if isinstance(path, Path | UPath):
        return path
    found = UPath(path)
    return Path(found.path) if found.protocol in ("", "file", "local") else found


def is_local(path: AnyPath) -> TypeIs[Path]:
    """Return whether ``path`` is in a file system, not in an object store."""
    return isinstance(path, Path)


class Draft:
    """Checkpoint that is being written. One process creates and publishes the draft, and all processes may write to it.

    Args:
        target: Final path of the checkpoint.

    Raises:
        OSError: When the folder of ``target`` cannot be created or written to.

    Attributes:
        path: Path of the directory or file to write, which does not exist yet.
    """

    def __init__(self, target: Path) -> None:
        folder = target.parent
        self._target = target
        try:
            _make_folder(folder)
            clean_folder(folder)
            self._container = _Container(folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"The folder {str(folder)!r} of the checkpoint {_get_reason(error)}; choose another folder"
                " (ModelCheckpoint(dirpath=...), Trainer(default_root_dir=...))",
                str(folder),
            ) from error
        self.path = self._container.path / target.name

    def publish(self) -> None:
        """Rename the draft to its final path, replacing any older checkpoint.

        The files of the draft must already be synced to disk.

        Raises:
            NotDurableError: When the checkpoint has its final path, but the folder could not be synced to disk.
            OSError: When the checkpoint could not be published. :meth:`discard` then keeps the older one.
        """
        if _is_folder(self.path):
            sync_folder(self.path)
        sync_folder(self._container.path)
        _replace(self.path, self._target, self._container.path / _REPLACED)
        try:
            sync_folder(self._target.parent)
        except OSError as error:
            raise NotDurableError(
                error.errno,
                f"The checkpoint is complete, and an older one of its name is replaced, but its folder could not be"
                f" synced to disk ({error.strerror}): it may be lost if the machine fails now",
                str(self._target),
            ) from error
        self.discard()

    def discard(self) -> None:
        """Remove the draft's hidden folder with all remaining files. After the first call, do nothing.

        If the draft was replacing an older checkpoint and has not taken its place, the older one gets its path back.
        """
        self._container.discard()


class StoreDraft:
    """Checkpoint that is being written to an object store, under its final name from the start."""

    def __init__(self, target: UPath) -> None:
        _remove_from_store(target)
        self.path = target

    def publish(self) -> None:
        """Do nothing, because the last written file, ``meta.json``, has already completed the checkpoint."""

    def discard(self) -> None:
        """Remove all files that have been written."""
        _remove_from_store(self.path)


def start_draft(target: AnyPath) -> Draft | StoreDraft:
    """Start writing the checkpoint ``target``, in a file system or in an object store.

    Raises:
        FileExistsError: When ``target`` exists and is not a checkpoint. The existing file or folder is kept.
        OSError: When the folder of ``target`` cannot be created or written to.
    """
    _check_replaceable(target)
    return Draft(target) if is_local(target) else StoreDraft(target)


@contextmanager
def discard_on_error(drafts: Sequence[Draft | StoreDraft]) -> Iterator[None]:
    """Discard the drafts if the block ends with an error or is interrupted. The block may add drafts to the list."""
    try:
        yield
    except BaseException:
        for draft in drafts:
            draft.discard()
        raise


def clean_folder(folder: AnyPath) -> None:
    """Remove drafts of dead processes from ``folder``, and restore checkpoints that were being replaced.

    Links are left alone, because their targets may belong to somebody else.
    """
    if not is_local(folder):
        return
    for lock_file in folder.glob(f"{_PREFIX}*.lock"):
        if lock_file.with_suffix("").is_symlink():  # nobody's draft; its target is another folder
            continue
        try:
            lock = os.open(lock_file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another process has removed the lock file, another user owns it, or it is a link
            continue
        try:
            # locking fails if the process that made the draft is alive, or if the file system has no locks
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clean(lock_file.with_suffix(""))
        finally:
            os.close(lock)


def remove_checkpoint(path: str | AnyPath) -> None:
    """Remove a checkpoint directory, a single file, or a link. The target of a link is kept."""
    found = get_path(path)
    if not is_local(found):
        _remove_from_store(found)
    elif found.is_symlink() or found.is_file():
        found.unlink()
    elif found.is_dir():
        try:
            container = _Container(found.parent)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            _remove_in_place(found)
            return
        try:
            found.rename(container.path / found.name)
            sync_folder(found.parent)
        finally:
            container.discard()


def link_checkpoint(target: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
    """Make ``link`` point to ``target`` atomically, so that a reader always finds a checkpoint.

    Args:
        target: Path of a checkpoint.
        link: Path of the link. An existing link or checkpoint is replaced.

    Raises:
        FileExistsError: When ``link`` exists and is neither a link nor a checkpoint.
    """
    target, link = Path(target), Path(link)
    _check_replaceable(link)
    draft = Draft(link)
    with discard_on_error([draft]), say_what_is_kept(link):
        draft.path.symlink_to(os.path.relpath(target, link.parent))
        draft.publish()


def check_folder(folder: AnyPath) -> None:
    """Raise an error if checkpoints cannot be written to the folder of a ``ModelCheckpoint``.

    A missing folder is not created. Instead, the nearest existing one of its parents is tested.

    Raises:
        ValueError: When the tested folder is a file, or cannot be written to.
    """
    if not is_local(folder):
        return
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_PREFIX, dir=nearest))
    except OSError as error:
        raise ValueError(
            f"ModelCheckpoint(dirpath={str(folder)!r}): this run could not save checkpoints there, because"
            f" {str(nearest)!r} {_get_reason(error)}. Choose another folder (ModelCheckpoint(dirpath=...),"
            " Trainer(default_root_dir=...))."
        ) from error


def check_free_space(path: AnyPath, size: int, *, what: Literal["checkpoint", "export"] = "checkpoint") -> None:
    """Raise an error before anything is written if the disk does not have enough free space for a checkpoint.

    Args:
        path: Path of the checkpoint.
        size: Size of the checkpoint, in bytes.
        what: What is to be written, for the error message.

    Raises:
        OSError: When there is not enough space. The message gives both sizes.
    """
    if not is_local(path):
        return
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            errno.ENOSPC,
            f"The {what} needs {size / 1e6:,.1f} MB, but the disk has only {free / 1e6:,.1f} MB left; nothing was"
            f" written. Free some space, or {_LESS_SPACE[what]}. A replaced {what} also needs its space until the new"
            f" {what} is complete",
            str(path),
        )


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of ``folder`` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with name_file(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_replaceable(target: AnyPath) -> None:
    """Raise an error if a save would replace a file or folder that is neither empty nor a checkpoint.

    An incomplete checkpoint may be replaced too.
    """
    if is_local(target) and target.is_symlink():
        return
    if target.is_dir():
        kind, names = "directory", [entry.name for entry in target.iterdir()]
        is_expendable = not names or any(name in _PARTS or name.endswith(_PART_SUFFIX) for name in names)
    elif target.exists():
        kind, is_expendable = "file", _is_file_expendable(target)
    else:
        return
    if not is_expendable:
        raise FileExistsError(
            errno.EEXIST,
            f"There is already a {kind} of that name which is not a checkpoint, and a save would replace it; save under"
            f" another name, or move the {kind} away",
            str(target),
        )


def _is_file_expendable(path: AnyPath) -> bool:
    """Return whether a file is empty, or begins like a file from ``torch.save``, so that it may be replaced."""
    with name_file(path), path.open("rb") as file:
        head = file.read(_HEAD_SIZE)
    return not head or (head.startswith(_ARCHIVE) and _FIRST_RECORD in head)


def _remove_in_place(path: Path) -> None:
    """Remove a checkpoint directory without moving it first, because the disk is too full to create a hidden folder.

    Two files that every reader needs are removed first, so that an interrupted removal leaves no readable checkpoint.
    """
    for name in (".metadata", SUMMARY_FILE):
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path)


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and sync them to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def _get_reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "may not be written to"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "is a file"
    return f"cannot be written to ({error.strerror})"


def _remove_from_store(path: UPath) -> None:
    if (path / SUMMARY_FILE).exists():
        # remove this file first, so that readers recognise an interrupted removal as an incomplete checkpoint
        (path / SUMMARY_FILE).unlink()
    if path.exists():
        path.fs.rm(path.path, recursive=True)


class _Container:
    """Hidden folder for a draft, next to the checkpoints. Its lock shows whether the process that made it is alive."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{_PREFIX}{uuid.uuid4().hex[:8]}"
        # take the lock before creating the folder, or another process could conclude that this process is dead
        self._lock: int | None = _lock(_get_lock_file(self.path))
        try:
            self.path.mkdir()
        except OSError:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the folder and its content, after :func:`_clean` has restored a checkpoint that was being replaced.

        What cannot be restored or removed is left to the next :func:`clean_folder`. After the first call, do nothing:
        another file may have the number of the closed lock.
        """
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        try:
            _clean(self.path)
        except OSError as error:
            logger.error(
                "%s could not be cleaned (%s). If a checkpoint was being replaced, it is still in that folder, and the"
                " next run that starts or saves in %s puts it back.",
                self.path,
                error,
                self.path.parent,
            )
        finally:
            with suppress(OSError):  # the lock is closed even if that fails
                os.close(lock)


def _clean(container: Path) -> None:
    """Put back a checkpoint that was being replaced, and then remove the hidden folder and its lock.

    Raises:
        OSError: When the checkpoint could not be put back. Nothing is removed then.
    """
    if container.is_symlink():
        return
    for old in (*_list_files(container / _REPLACED), *_list_files(container / _OLD_REPLACED)):
        # Restore an old checkpoint only if there is a draft of the same name. Without such a draft, the folder
        # `replaced` may be the draft of a user's checkpoint called `replaced`.
        if _exists(container / old.name) and not _exists(container.parent / old.name):
            old.rename(container.parent / old.name)
    with suppress(OSError):  # what is left, if only a lock without a folder, does no harm
        shutil.rmtree(container, ignore_errors=True)  # it does not ignore all errors
        if not _exists(container):
            _get_lock_file(container).unlink(missing_ok=True)


def _replace(draft: Path, target: Path, replaced: Path) -> None:
    """Rename ``draft`` to ``target``. An existing ``target`` is moved into the draft's hidden folder."""
    if not _exists(target) or not (_is_folder(draft) or _is_folder(target)):
        os.replace(draft, target)
    elif not _exchange(draft, target):
        # if the process is interrupted or dies between the two renames, `_clean` restores the old checkpoint
        replaced.mkdir()
        target.rename(replaced / target.name)
        draft.rename(target)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths atomically. Return False if the system cannot do so.

    Only Linux can do so, and only on some file systems. The exchange is needed because ``os.rename`` cannot replace a
    directory that is not empty.
    """
    renameat2: Any = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _list_files(folder: Path) -> list[Path]:
    """Return what is in a folder, or an empty list if there is none. Unlike `glob`, raise an error of reading it."""
    try:
        return [] if folder.is_symlink() else list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _exists(path: Path) -> bool:
    """Return whether there is something at ``path``, if only a link to nothing. Raise an error of looking there."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _get_lock_file(container: Path) -> Path:
    return container.with_name(f"{container.name}.lock")


def _lock(path: Path) -> int:
    """Create ``path`` and lock it until the returned descriptor is closed or the process dies."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # `clean_folder` in another process removed the file before it was locked here
        except OSError:
            return descriptor  # the file system has no locks, so `clean_folder` leaves all drafts alone
        os.close(descriptor)
