"""Whether a checkpoint is as it was written."""

import warnings
import zipfile
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from lightning_fsdp2.checkpoint.coordination import all_gather, get_rank, on_every_rank
from lightning_fsdp2.checkpoint.find import find_checkpoint, find_damaged, get_files, raise_damaged, resolve_checkpoint
from lightning_fsdp2.checkpoint.folder import AnyPath


def verify_checkpoint(path: str | Path, *, trust_checkpoint: bool = False) -> list[str]:
    """Read a checkpoint from start to end and compare it with its checksums, in one process.

    Args:
        path: A directory or a single file.
        trust_checkpoint: Whether ``.metadata`` may hold any object, which can run code when it is loaded.

    Returns:
        What was verified, a line per file.

    Raises:
        FileNotFoundError: When there is none.
        ValueError: When it is incomplete, or files are damaged: it names all of them.
    """
    found = resolve_checkpoint(path)
    files = get_files(found) if found.is_dir() else {}
    # before anything is read that might be damaged
    raise_damaged(found, find_damaged(found, files))
    find_checkpoint(path, trust=trust_checkpoint)
    if not found.is_dir():
        raise_damaged(found, _find_damaged_record(found))
        return [f"{found.name}: the CRC-32 of each of its records"]
    if not files:
        return [f"{found.name}: sizes only, since what wrote it kept no checksums"]
    return [f"{name}: {info['bytes']} bytes" for name, info in files.items()]


def verify_together(path: AnyPath, group: dist.ProcessGroup | None = None) -> None:
    """Compare the files of a directory with their checksums, each rank some of them; every rank must call it.

    Raises:
        ValueError: On every rank, naming the damaged files.
    """

    def find_own() -> list[str]:
        if not path.is_dir():
            return [] if get_rank() else _find_damaged_record(path)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        files = list(get_files(path).items())
        if not files and get_rank() == 0:
            warnings.warn(f"verify=True: {str(path)!r} holds no checksums to compare with.", stacklevel=2)
        return find_damaged(path, dict(files[get_rank() :: world_size]))

    damaged = all_gather(on_every_rank(find_own, group), group)
    raise_damaged(path, [name for names in damaged for name in names])


def _find_damaged_record(path: AnyPath) -> list[str]:
    """A single file has no checksum beside it, but each record of the archive that it is has one."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(cast(Any, file)) as archive:
            damaged = archive.testzip()
    except Exception as error:  # whatever a damaged archive leads to
        damaged = str(error)
    return [] if damaged is None else [f"{path.name} ({damaged})"]
