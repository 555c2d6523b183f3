"""Whether a checkpoint is as it was written."""

import warnings
import zipfile
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from lightning_fsdp2.checkpoint.coordination import all_gather, get_rank
from lightning_fsdp2.checkpoint.find import find_checkpoint, get_files, resolve_checkpoint
from lightning_fsdp2.checkpoint.folder import AnyPath
from lightning_fsdp2.checkpoint.storage import describe_file


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
    _raise_damaged(found, [name for name, info in files.items() if not _is_intact(found / name, info)])
    find_checkpoint(path, trust=trust_checkpoint)
    if not found.is_dir():
        _verify_file(found)
        return [f"{found.name}: the CRC-32 of each of its records"]
    if not files:
        return [f"{found.name}: sizes only, since what wrote it kept no checksums"]
    return [f"{name}: {info['bytes']} bytes" for name, info in files.items()]


def verify_together(path: AnyPath, group: dist.ProcessGroup | None = None) -> None:
    """Compare the files of a directory with their checksums, each rank some of them; every rank must call it.

    Raises:
        ValueError: On every rank, naming the damaged files.
    """
    if not path.is_dir():
        damaged = [] if get_rank() or _is_readable(path) else [path.name]
    else:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        files = list(get_files(path).items())
        if not files and get_rank() == 0:
            warnings.warn(f"verify=True: {str(path)!r} holds no checksums to compare with.", stacklevel=2)
        own = files[get_rank() :: world_size]
        damaged = [name for name, info in own if not _is_intact(path / name, info)]
    _raise_damaged(path, [name for names in all_gather(damaged, group) for name in names])


def _is_intact(path: AnyPath, expected: dict[str, Any]) -> bool:
    try:
        return describe_file(path) == expected
    except OSError:
        return False


def _is_readable(path: AnyPath) -> bool:
    try:
        _verify_file(path)
    except ValueError:
        return False
    return True


def _verify_file(path: AnyPath) -> None:
    """A single file has no checksum beside it, but each record of the archive that it is has one."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(cast(Any, file)) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        damaged = str(error)
    if damaged is not None:
        _raise_damaged(path, [f"{path.name} ({damaged})"])


def _raise_damaged(path: AnyPath, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: {', '.join(names)} is not what was written. Use an earlier one."
        )
