"""Files of a checkpoint: written with checksums to any store, and read without running code that is in them."""

import io
import os
import pickle
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as checkpoint_metadata
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.serialization import get_crc32_options, get_unsafe_globals_in_checkpoint, set_crc32_options

from lightning_fsdp2.checkpoint.files.chunks import Chunk, compute_checksum, raise_damaged, read_checksums
from lightning_fsdp2.checkpoint.files.drafts import AnyPath, get_path, is_local
from lightning_fsdp2.compat.torch import StorageInfo, tree_map_only
from lightning_fsdp2.ranks.failures import list_names

BLOCK_SIZE = 16 << 20

_METADATA_MODULES = {module.__name__: module for module in (checkpoint_metadata, filesystem)}
_METADATA_GLOBALS = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("datetime", "timedelta"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class DurableFile:
    """A file that is written from start to end, and is on disk once it is closed.

    Args:
        path: Path of the file, which must not exist.
    """

    def __init__(self, path: AnyPath) -> None:
        self._file = cast(io.BufferedWriter, path.open("wb"))
        self._is_local = is_local(path)
        self._name = str(path)
        self._failure: OSError | None = None
        self.size = self._handed_over = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            error.filename = self._name
            self._failure = error
            raise
        self.size += view.nbytes
        self._start_writeback()
        return view.nbytes

    def _start_writeback(self) -> None:
        """Start writing to disk now: otherwise the system collects gigabytes, and the final flush waits for them.

        Pages that are on disk are dropped from the page cache. Finding new memory for a whole checkpoint would be slow,
        and would evict the files that training reads.
        """
        if self.size - self._handed_over < BLOCK_SIZE or not (self._is_local and hasattr(os, "posix_fadvise")):
            return
        self._file.flush()
        with suppress(OSError):  # it is only advice, which some file systems do not take
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._handed_over = self.size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> "DurableFile":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self._failure is not None:
            # `torch.save` would complain about the end of its archive instead
            with suppress(OSError):
                self._file.close()
            raise self._failure
        with self._file:
            if kind is None and self._is_local:
                self._file.flush()
                os.fsync(self._file.fileno())


class CheckpointWriter(FileSystemWriter):
    """Writer of this rank's part of a checkpoint: one file in a folder, written tensor by tensor, synced to disk.

    torch's own writer would keep a second copy of the shard on the host until the file is written.

    Attributes:
        sizes: Size in bytes of each file that this rank has written, by name.
        checksums: Checksums of all ranks' chunks, by file and offset; available on rank 0 after the save.
    """

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(str(folder), sync_files=False)
        self.fs = _Store()
        self.path = folder  # type: ignore[assignment]
        self.sizes: dict[str, int] = {}
        self.checksums: dict[str, dict[int, str]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        if plan.items:
            with DurableFile(cast(AnyPath, self.path) / name) as file:
                for item in plan.items:
                    offset = file.tell()
                    checksum = _write_chunk(file, planner.resolve_data(item))
                    info = _HashedInfo(name, offset, file.tell() - offset, checksum=checksum)
                    results.append(WriteResult(item.index, info.length, info))
            self.sizes[name] = file.size
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the checksums out of ``.metadata``, which other software reads too and which has no place for them."""
        hashed = [result.storage_data for written in results for result in written]
        for info in hashed:
            self.checksums.setdefault(info.relative_path, {})[info.offset] = info.checksum
        plain = [[replace(result, storage_data=result.storage_data.plain) for result in written] for written in results]
        super().finish(metadata, plain)

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)


class CheckpointReader(FileSystemReader):
    """Reader of a checkpoint's folder in any store.

    Args:
        folder: Folder of the checkpoint.
        trust: Whether ``.metadata``, a pickle, may name any class or function.
        verify: Whether chunks that have checksums are compared with them when they are read.
    """

    def __init__(self, folder: AnyPath, *, trust: bool = False, verify: bool = False) -> None:
        super().__init__(str(folder))
        self.fs = _Store()
        self.path = folder  # type: ignore[assignment]
        self._trust = trust
        self._verify = verify

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each chunk once, and compare it with its checksum.

        Raises:
            ValueError: When a chunk is not what was written.
        """
        checksums = read_checksums(cast(AnyPath, self.path)) if self._verify else {}
        if not checksums:
            return super().read_data(plan, planner)
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        for key, file in self._open_files(items):
            chunk = self._read_chunk(file, key, checksums)
            for item in items[key]:
                _hand_over(chunk, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def find_damaged(self) -> list[str]:
        """Read all chunks, and return the names of the damaged ones, with their files."""
        self.set_up_storage_reader(self.read_metadata(), is_coordinator=True)
        checksums = read_checksums(cast(AnyPath, self.path))
        damaged = []
        for key, file in self._open_files(self.storage_data):
            try:
                self._read_chunk(file, key, checksums)
            except ValueError:
                damaged.append(self._get_name(key))
        return damaged

    def _open_files(self, keys: Iterable[MetadataIndex]) -> Iterator[tuple[MetadataIndex, Any]]:
        """Yield the keys, in the order of their chunks in the files, each with its open file."""
        places = {key: self.storage_data[key] for key in keys}
        ordered = sorted(places, key=lambda key: (places[key].relative_path, places[key].offset))
        for name, group in groupby(ordered, key=lambda key: places[key].relative_path):
            with (cast(AnyPath, self.path) / name).open("rb") as file:
                for key in group:
                    yield key, file

    def _read_chunk(self, file: Any, key: MetadataIndex, checksums: dict[str, dict[int, str]]) -> Tensor | io.BytesIO:
        info = self.storage_data[key]
        archive = Chunk(file, info.offset, info.length)
        try:
            if key.offset is None:  # not a tensor
                chunk: Tensor | io.BytesIO = io.BytesIO(archive.read())
            else:
                chunk = torch.load(cast(Any, archive), map_location="cpu", weights_only=True)
            is_intact = compute_checksum(chunk) == checksums[info.relative_path][info.offset]
        except (OSError, MemoryError):
            raise
        except Exception as error:  # a damaged archive may raise anything
            raise make_damage_error(cast(AnyPath, self.path) / self._get_name(key), error) from error
        if not is_intact:
            raise_damaged(cast(AnyPath, self.path), [self._get_name(key)])
        return chunk

    def _get_name(self, key: MetadataIndex) -> str:
        return f"{self.storage_data[key].relative_path} ({key.fqn})"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (cast(AnyPath, self.path) / ".metadata").open("rb") as file:
            unpickler = pickle.Unpickler if self._trust else _MetadataUnpickler
            metadata: Metadata = unpickler(cast(Any, file)).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def save_plain(value: Any, file: Any) -> None:
    """Write an unsharded value with ``torch.save``. Numpy numbers become Python numbers, which load without trust.

    Raises:
        TypeError: When a DTensor hides in an object: only this rank's part of it would be saved.
    """
    plain = tree_map_only(np.generic, lambda number: number.item(), value)
    torch.save(plain, file, pickle_module=_PlainPickle)


def warn_of_objects(value: Any) -> None:
    """Warn, once per process, if a checkpoint holds objects: it will be refused unless it is trusted.

    Args:
        value: Content of the checkpoint; its tensors are ignored.
    """
    buffer = io.BytesIO()
    save_plain(tree_map_only(Tensor, lambda _: None, value), buffer)
    buffer.seek(0)
    if unsafe := get_unsafe_globals_in_checkpoint(cast(Any, buffer)):
        _warn_of_types(list_names(unsafe))


def load_pickled(path: AnyPath, *, trust: bool, mmap: bool = False) -> Any:
    """Load into host memory a file that ``torch.save`` wrote.

    Args:
        path: Path of the file.
        trust: Whether the file may hold any object, which can run code when it is loaded.
        mmap: Whether to memory-map the tensors, if the file is local.

    Raises:
        ValueError: When the file is damaged, or holds more than tensors and plain types and is not trusted.
    """
    if mmap and is_local(path):
        return load_archive(lambda: path, path, trust=trust, mmap=True)
    data = path.read_bytes()
    return load_archive(lambda: io.BytesIO(data), path, trust=trust)


def load_archive(open_archive: Callable[[], Any], path: AnyPath, *, trust: bool, mmap: bool = False) -> Any:
    """Load into host memory an archive that ``torch.save`` wrote; if trusted, also one that holds objects.

    Args:
        open_archive: Function that returns the path of the archive, or an open file at its start.
        path: Path of the checkpoint, for errors.
        trust: Whether the archive may hold any object, which can run code when it is loaded.
        mmap: Whether to memory-map the tensors.

    Raises:
        ValueError: When the archive is damaged, or holds more than tensors and plain types and is not trusted.
    """
    _check_pickle(open_archive(), path)
    options: dict[str, Any] = {"map_location": "cpu", "mmap": mmap}
    try:
        return torch.load(open_archive(), weights_only=True, **options)
    except pickle.UnpicklingError as error:  # the archive is intact, so this is a refusal
        if not trust:
            raise make_trust_error(path, error) from error
    except (RuntimeError, ValueError) as error:
        raise make_damage_error(path, error) from error
    try:
        return torch.load(open_archive(), weights_only=False, **options)
    except RuntimeError as error:  # from torch; the objects themselves may raise anything
        raise make_damage_error(path, error) from error


def make_damage_error(path: AnyPath, error: Exception) -> ValueError:
    """Return the error for a file that cannot be parsed."""
    return ValueError(f"The checkpoint {str(path)!r} is damaged ({get_reason(error)}); use an earlier one.")


def get_reason(error: Exception) -> str:
    """Describe the cause of an error, without torch's advice to trust a file whose pickle is damaged."""
    is_advice = isinstance(error, pickle.UnpicklingError)
    return type(error).__name__ if is_advice else f"{type(error).__name__}: {error}".splitlines()[0]


def make_trust_error(path: Any, error: Exception) -> ValueError:
    """Return the error for a checkpoint that may run code when it is loaded."""
    return ValueError(
        f"The checkpoint {str(path)!r} holds objects beyond tensors and plain types (hyper-parameters, most likely),"
        " which can run code when they are loaded. If you trust the file, pass `weights_only=False` to the Trainer's"
        " method or to `load_checkpoint`, or CheckpointConfig(trust_checkpoint=True) to the strategy, or"
        " `trust_checkpoint=True` to any other function, or `--trust_checkpoint=true` on the command line."
        f" {str(error).splitlines()[0]}"
    )


@cache
def _warn_of_types(names: str) -> None:
    warnings.warn(
        f"This run's checkpoints hold objects beyond tensors and plain types ({names}), and will not be loaded unless"
        " they are trusted. Save plain types in hyper-parameters, callbacks and hooks (`str(path)`, `dict(values)`), or"
        " set CheckpointConfig(trust_checkpoint=True); in a plain loop load with `weights_only=False`.",
        stacklevel=2,
    )


class _PlainPickle:
    """The part of the module pickle that ``torch.save`` needs."""

    class Pickler(pickle.Pickler):
        """Pickler that refuses DTensors."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, DTensor):
                raise TypeError(
                    f"A hook or callback saves an object that holds a sharded tensor {tuple(value.shape)}. Save it in a"
                    " dict, list or tuple of its own, so that all ranks save their parts, or whole: `.full_tensor()`."
                )
            return NotImplemented

    dump = staticmethod(pickle.dump)


class _Store(FileSystem):
    """File access for torch's reader and writer, on the file system or any store that fsspec knows."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = get_path(path).open(mode)
        with file:
            yield cast(io.IOBase, file)
            if "w" in mode and isinstance(path, Path):
                file.flush()
                os.fsync(file.fileno())

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)

    def mkdir(self, path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def exists(self, path: Any) -> bool:
        return path.exists()

    def rm_file(self, path: Any) -> None:
        path.unlink()


@dataclass
class _HashedInfo(StorageInfo):
    """Place and checksum of a chunk, sent to rank 0."""

    checksum: str = ""

    @property
    def plain(self) -> Any:
        return StorageInfo(self.relative_path, self.offset, self.length)


class RefusedError(pickle.UnpicklingError):
    """Error for a ``.metadata`` that names a class or function other than those that it may consist of."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that builds the classes that ``.metadata`` consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA_GLOBALS and not _is_metadata(module, name):
            raise RefusedError(f".metadata names {module}.{name}.")
        return super().find_class(module, name)


def _check_pickle(archive: Any, path: AnyPath) -> None:
    """Refuse an archive whose pickle does not match its CRC-32, if it has one.

    The pickle describes the content, and is small. Damage to it looks like objects that need trust, or like another
    checkpoint.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            (record,) = (info for info in file.infolist() if info.filename.endswith("/data.pkl"))
            if record.CRC != 0:
                file.read(record)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise make_damage_error(path, error) from error


def _is_metadata(module: str, name: str) -> bool:
    """Return whether a name is that of a dtype, or of a class that DCP's metadata or file system module defines."""
    found = getattr({"torch": torch, **_METADATA_MODULES}.get(module), name, None)
    return isinstance(found, torch.dtype) or (isinstance(found, type) and found.__module__ == module != "torch")


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Run the block without ``torch.save``'s own checksums, which cost more than ours and are never compared.

    In torch 2.11 the switch applies to the whole process. A background thread leaves it alone, since the user may be
    saving something meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    computes = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(computes)


def _write_chunk(file: DurableFile, data: Tensor | io.BytesIO) -> str:
    """Write a chunk (part of a tensor, or an object), and return its checksum."""
    if isinstance(data, Tensor):
        data = _to_host(data)
        with _without_crc32():
            torch.save(data, cast(Any, file))
    else:
        file.write(data.getbuffer())
    return compute_checksum(data)


def _hand_over(chunk: Tensor | io.BytesIO, item: ReadItem, planner: LoadPlanner) -> None:
    """Give ``planner`` the part of a chunk that ``item`` describes."""
    if not isinstance(chunk, Tensor):
        planner.load_bytes(item, chunk)
        return
    own = planner.resolve_tensor(item).detach()
    part = zip(item.storage_offsets, item.lengths, strict=True)
    own.copy_(chunk[tuple(slice(start, start + length) for start, length in part)])
    planner.commit_tensor(item, own)


def _to_host(tensor: Tensor) -> Tensor:
    """Return a host tensor whose storage holds its elements only, since ``torch.save`` writes whole storages."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().size() != tensor.nbytes else tensor
