"""Chunks of checkpoint files. A chunk is a rank's part of one tensor. Its checksum is verified when the chunk is read.

For each file, ``checksums.json`` maps the offset of each chunk, in bytes, to the chunk's checksum::

    {"__0_0.distcp": {"0": "06f24c8b2a5f3a0c...", "17216": "99aa06d3014798d8..."}}

Each chunk has its own checksum, so that a rank can verify the chunks that it reads. With a single checksum for the
whole file, a rank would have to read all chunks to verify one.
"""

import io
import json
from typing import Any, cast

import torch
import xxhash
from torch import Tensor
from typing_extensions import override

from lightning_fsdp2.checkpoint.files.drafts import AnyPath
from lightning_fsdp2.checkpoint.files.errors import name_file

CHECKSUMS_FILE = "checksums.json"

CHECKSUM = "xxh3_128"
"""Key of a file's checksum in ``meta.json``. Checksums of files and chunks are 128-bit XXH3 hashes in hexadecimal."""

_BLOCK_SIZE = 1 << 20


class Chunk(io.RawIOBase):
    """Part of a file that can be read like a separate file.

    Args:
        file: File that is open for reading.
        offset: Start of the part, in bytes.
        length: Length of the part, in bytes.
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


def compute_checksum(value: Tensor | io.BytesIO) -> str:
    """Return a checksum of ``value``. For a tensor, it covers the dtype, the shape and the elements."""
    digest = xxhash.xxh3_128()
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(cast(Any, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    else:
        digest.update(value.getbuffer())
    return digest.hexdigest()


def describe_bytes(data: bytes) -> dict[str, Any]:
    """Return the size and the checksum of a small file's content, for ``meta.json``."""
    return {"bytes": len(data), CHECKSUM: xxhash.xxh3_128(data).hexdigest()}


def describe_file(path: AnyPath) -> dict[str, Any]:
    """Return the size and the checksum of a file of any size, for ``meta.json``. The file is read block by block."""
    digest, size = xxhash.xxh3_128(), 0
    with name_file(path), path.open("rb") as file:
        while block := file.read(_BLOCK_SIZE):
            digest.update(block)
            size += len(block)
    return {"bytes": size, CHECKSUM: digest.hexdigest()}


def read_checksums(path: AnyPath) -> dict[str, dict[int, str]]:
    """Return the checksums of a directory's chunks by file and offset.

    The dict is empty for a directory that an older version of this package wrote without these checksums.
    """
    file = path / CHECKSUMS_FILE
    if not file.exists():
        return {}
    with name_file(file):
        stored: dict[str, dict[str, str]] = json.loads(file.read_bytes())
    return {name: {int(offset): checksum for offset, checksum in sums.items()} for name, sums in stored.items()}


def raise_damaged(path: AnyPath, names: list[str]) -> None:
    """Raise an error about damaged files if ``names`` is not empty.

    Raises:
        ValueError: When ``names`` is not empty. The message lists the files.
    """
    if names:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: {', '.join(names)} has changed since it was written. Use an"
            " earlier checkpoint."
        )
