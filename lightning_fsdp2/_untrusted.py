"""Checks of folders that others may have written."""

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath


def check_inside(names: Iterable[str], source: str) -> None:
    """Refuse names of files that lead out of their folder.

    Args:
        names: Names that a file of the folder lists.
        source: What lists the names, for the error message.

    Raises:
        ValueError: When a name is absolute or has a part ``..``.
    """
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(
                f"{source} is damaged, or was changed: it names the file {name!r}, but its files are in its own folder."
            )


def check_no_devices(path: Path) -> None:
    """Refuse pipes, sockets and devices, which may never end when they are read.

    Args:
        path: File, or folder with files that will be read. Folders in it are not searched.

    Raises:
        ValueError: When the file, or a file in the folder, is none. The target of a link counts.
    """
    files = [Path(entry) for entry in os.scandir(path)] if path.is_dir() else [path]
    for file in files:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(
                f"{str(file)!r} is a pipe, a socket or a device, not a file; remove it, or give another path."
            )


def check_not_compressed(archive: zipfile.ZipFile) -> None:
    """Refuse an archive with compressed records, which may be a thousand times as large in memory as in the file.

    Raises:
        ValueError: When a record is compressed.
    """
    if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
        raise ValueError("it has compressed records, which torch.save never writes")
