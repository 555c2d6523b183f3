"""Verify that a checkpoint has not changed since it was written."""

import zipfile
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from lightning_fsdp2._untrusted import check_not_compressed
from lightning_fsdp2.checkpoint.files.chunks import CHECKSUM, raise_damaged, read_checksums
from lightning_fsdp2.checkpoint.files.drafts import AnyPath
from lightning_fsdp2.checkpoint.files.errors import raise_unreadable
from lightning_fsdp2.checkpoint.files.paths import raise_missing, resolve_checkpoint
from lightning_fsdp2.checkpoint.files.storage import CheckpointReader
from lightning_fsdp2.checkpoint.find import find_checkpoint, find_damaged, get_files
from lightning_fsdp2.ranks.coordination import gather_objects, get_rank, on_every_rank

_BLOCK_SIZE = 1 << 20


def verify_checkpoint(path: str | Path, *, trust_checkpoint: bool = False) -> list[str]:
    """Read a checkpoint from start to end and compare it with its checksums, in one process.

    Args:
        path: Checkpoint directory or single file.
        trust_checkpoint: Whether ``.metadata`` may hold arbitrary objects, which can run code when they are loaded.

    Returns:
        One line per verified file, with the file's size or the kind of check.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        ValueError: When the checkpoint is incomplete, or when files are damaged. The message names all of these files.
    """
    found = resolve_checkpoint(path)
    files = get_files(found) if found.is_dir() else {}
    raise_missing(found, [name for name in files if not (found / name).exists()])
    # compare checksums first, because `find_checkpoint` parses files and would fail on the first damaged one
    raise_damaged(found, find_damaged(found, files))
    find_checkpoint(path, trust=trust_checkpoint)
    if files and read_checksums(found):
        raise_damaged(found, CheckpointReader(found, trust=trust_checkpoint).find_damaged())
    if not found.is_dir():
        raise_damaged(found, _find_damaged_records(found))
        return [f"{found.name}: the CRC-32 of each of its records"]
    if not files:
        return [f"{found.name}: sizes only, since the checkpoint has no checksums"]
    return [f"{name}: {info['bytes']} bytes" for name, info in files.items()]


def verify_together(path: AnyPath, group: dist.ProcessGroup | None = None) -> None:
    """Verify a checkpoint before it is read. Every rank must call this; each checks a share of the data.

    For a single file, which is a zip archive, this verifies the archive's entries. For a directory in version 2 of the
    format, it verifies the files. A directory in the current version is skipped, because each rank verifies its chunks
    when it reads them.

    Raises:
        ValueError: On every rank, when files are damaged. The message names these files.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    damaged = gather_objects(on_every_rank(lambda: _find_damaged_before(path, get_rank(), ranks), group), group)
    raise_damaged(path, sorted({name for names in damaged for name in names}))


def verify_alone(path: AnyPath) -> None:
    """Verify the same data as :func:`verify_together`, but in one process.

    Raises:
        ValueError: When files are damaged. The message names these files.
    """
    raise_damaged(path, _find_damaged_before(path))


def _find_damaged_before(path: AnyPath, rank: int = 0, ranks: int = 1) -> list[str]:
    if not path.is_dir():
        return _find_damaged_records(path, rank, ranks)
    files = [(name, info) for name, info in get_files(path).items() if CHECKSUM in info]
    return find_damaged(path, dict(files[rank::ranks]))


def _find_damaged_records(path: AnyPath, rank: int = 0, ranks: int = 1) -> list[str]:
    """Return a list with the first error in this rank's share of the file's zip entries, or [] if all are intact."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(cast(Any, file)) as archive:
            check_not_compressed(archive)
            for record in archive.infolist()[rank::ranks]:
                _read(archive, record)
    except Exception as error:  # a damaged archive may raise any exception
        raise_unreadable(error, path)
        return [f"{path.name} ({error})"]
    return []


def _read(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    with archive.open(record) as file:
        while file.read(_BLOCK_SIZE):
            pass
