"""Chunks of checkpoint files: what a rank stored of one tensor, with a checksum that is compared when it is read.

``checksums.json`` has them by file and offset in bytes; a chunk ends where the next one begins::

    {"__0_0.distcp": {"0": "06f24c8b2a5f3a0c...", "17216": "99aa06d3014798d8..."}}

A file as a whole has none, since a rank that resumes on another mesh reads some of its chunks only.
"""

import io
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import xxhash
from typing_extensions import override

from lightning_fsdp2.checkpoint.folder import AnyPath

CHECKSUMS_FILE = "checksums.json"

CHECKSUM = "xxh3_128"
"""The name under which ``meta.json`` keeps a file's checksum: XXH3 of 128 bits, in hexadecimal, as those of chunks."""

_BLOCK_SIZE = 1 << 20  # which a core's cache holds


class Chunk(io.RawIOBase):
    """A part of a file, as a file of its own.

    Args:
        file: Opened for reading.
        offset: Where the part begins, in bytes.
        length: How many bytes it has.
    """

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count: int = self._file.readinto(view)
        self._position += count
        return count


def compute_checksum(file: Any) -> str:
    """Return the checksum of what a file holds from where it stands to its end."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_SIZE))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def describe_file(path: AnyPath) -> dict[str, Any]:
    """Return size and checksum of a file."""
    with path.open("rb") as file:
        checksum = compute_checksum(file)
        return {"bytes": file.tell(), CHECKSUM: checksum}


def read_checksums(path: AnyPath) -> dict[str, dict[int, str]]:
    """Return the checksums of a directory's chunks by file and offset; none if an older version wrote it."""
    file = path / CHECKSUMS_FILE
    if not file.exists():
        return {}
    stored: dict[str, dict[str, str]] = json.loads(file.read_bytes())
    return {name: {int(offset): checksum for offset, checksum in sums.items()} for name, sums in stored.items()}


def has_damaged_chunk(path: AnyPath, size: int, checksums: dict[int, str]) -> bool:
    """Whether a file is not what was written: its size in bytes, or any of its chunks."""
    with path.open("rb") as file:
        if file.seek(0, io.SEEK_END) != size:
            return True
        return any(compute_checksum(chunk) != checksum for chunk, checksum in _split(file, size, checksums))


def _split(file: Any, size: int, checksums: dict[int, str]) -> Iterator[tuple[Chunk, str]]:
    offsets = sorted(checksums)
    for start, end in pairwise([*offsets, size]):
        yield Chunk(file, start, end - start), checksums[start]
