"""Writers and readers of checkpoint files with checksums. By default, reading does not run code from the files."""

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

from lightning_fsdp2._untrusted import check_inside, check_not_compressed
from lightning_fsdp2.checkpoint.files.chunks import Chunk, compute_checksum, raise_damaged, read_checksums
from lightning_fsdp2.checkpoint.files.drafts import AnyPath, get_path, is_local
from lightning_fsdp2.checkpoint.files.errors import name_file, raise_unreadable
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
}


class DurableFile:
    """File that is written from start to end, and is synced to disk when it is closed.

    Args:
        path: Path of the file, which must not exist.
    """

    def __init__(self, path: AnyPath) -> None:
        self._file = cast(io.BufferedWriter, path.open("wb"))
        self._is_local = is_local(path)
        self._name = str(path)
        self._failure: BaseException | None = None
        self.size = self._handed_over = 0

    def write(self, data: Any) -> int:
        try:
            view = memoryview(data).cast("B")
            with name_file(self._name):
                self._file.write(view)
                self.size += view.nbytes
                self._start_writeback()
        except BaseException as error:
            self._failure = error
            raise
        return view.nbytes

    def _start_writeback(self) -> None:
        """Start writing cached data to disk, so that the final sync does not have to wait for gigabytes.

        Pages that are already on disk are dropped from the page cache. If the cache filled up with the checkpoint, it
        would evict the files that training reads.
        """
        if self.size - self._handed_over < BLOCK_SIZE or not (self._is_local and hasattr(os, "posix_fadvise")):
            return
        self._file.flush()
        with suppress(OSError):  # `posix_fadvise` is only a hint, and some file systems reject it
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
            # raise the error or the interrupt of the write, because `torch.save` then says "incomplete archive"
            with suppress(OSError):
                self._file.close()
            raise self._failure
        with name_file(self._name), self._file:
            if kind is None and self._is_local:
                self._file.flush()
                os.fsync(self._file.fileno())


class CheckpointWriter(FileSystemWriter):
    """DCP storage writer that writes this rank's part of a checkpoint to one file, tensor by tensor.

    torch's own writer would keep a second copy of this rank's shards in host memory until the file is written.

    Attributes:
        sizes: Size in bytes of each file that this rank has written, by name.
        checksums: Checksums of all ranks' chunks, by file and offset. Available on rank 0 after the save.
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
        """Collect the chunks' checksums, and keep them out of ``.metadata``, which other software also reads."""
        hashed = [result.storage_data for written in results for result in written]
        for info in hashed:
            self.checksums.setdefault(info.relative_path, {})[info.offset] = info.checksum
        plain = [[replace(result, storage_data=result.storage_data.plain) for result in written] for written in results]
        super().finish(metadata, plain)

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)


class CheckpointReader(FileSystemReader):
    """DCP storage reader of a checkpoint directory, in a file system or in an object store.

    Args:
        folder: Directory of the checkpoint.
        trust: Whether the pickle ``.metadata`` may name arbitrary classes and functions.
        verify: Whether to compare each chunk with its checksum, if it has one.
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
            ValueError: When a chunk does not match its checksum.
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
        """Read all chunks, and return one string for each damaged chunk, with its file name and its key."""
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
        """Yield each chunk's key and the open file that holds the chunk, in the order of the chunks in the files."""
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
            with name_file(cast(AnyPath, self.path) / info.relative_path):
                if key.offset is None:  # only tensors have an offset
                    chunk: Tensor | io.BytesIO = io.BytesIO(archive.read())
                else:
                    chunk = torch.load(cast(Any, archive), map_location="cpu", weights_only=True)
            is_intact = compute_checksum(chunk) == checksums[info.relative_path][info.offset]
        except (OSError, MemoryError):
            raise
        except Exception as error:  # a damaged archive may raise any exception
            raise_unreadable(error, cast(AnyPath, self.path) / info.relative_path)
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
        names = {info.relative_path for info in (metadata.storage_data or {}).values()}
        check_inside(names, f"{str(self.path)!r} (.metadata)")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def save_plain(value: Any, file: Any) -> None:
    """Write an unsharded value with ``torch.save``, after converting numpy numbers to Python numbers.

    With ``weights_only=True``, torch loads Python numbers but refuses numpy numbers.

    Raises:
        TypeError: When an object contains a DTensor, because only this rank's part of it would be saved.
    """
    plain = tree_map_only(np.generic, lambda number: number.item(), value)
    torch.save(plain, file, pickle_module=_PlainPickle)


def warn_of_objects(value: Any) -> None:
    """Warn once per process if a checkpoint holds arbitrary objects, since only users who trust it can then load it.

    Args:
        value: Content of the checkpoint. Its tensors are ignored.
    """
    buffer = io.BytesIO()
    save_plain(tree_map_only(Tensor, lambda _: None, value), buffer)
    buffer.seek(0)
    if unsafe := get_unsafe_globals_in_checkpoint(cast(Any, buffer)):
        _warn_of_types(list_names(unsafe))


def load_pickled(path: AnyPath, *, trust: bool, mmap: bool = False) -> Any:
    """Load a file from ``torch.save`` into host memory.

    Args:
        path: Path of the file.
        trust: Whether the file may hold arbitrary objects, which can run code when they are loaded.
        mmap: Whether to memory-map the tensors, if the file is local.

    Raises:
        ValueError: When the file is damaged, or holds objects other than tensors and plain types while ``trust`` is
            False.
    """
    with name_file(path):
        if mmap and is_local(path):
            return load_archive(lambda: path, path, trust=trust, mmap=True)
        data = path.read_bytes()
        return load_archive(lambda: io.BytesIO(data), path, trust=trust)


def load_archive(open_archive: Callable[[], Any], path: AnyPath, *, trust: bool, mmap: bool = False) -> Any:
    """Load an archive from ``torch.save`` into host memory.

    Args:
        open_archive: Function that returns the path of the archive, or an open file positioned at its start.
        path: Path of the checkpoint, for error messages.
        trust: Whether the archive may hold arbitrary objects, which can run code when they are loaded.
        mmap: Whether to memory-map the tensors.

    Raises:
        ValueError: When the archive is damaged, or holds objects other than tensors and plain types while ``trust`` is
            False.
    """
    _check_pickle(open_archive(), path)
    options: dict[str, Any] = {"map_location": "cpu", "mmap": mmap}
    try:
        return torch.load(open_archive(), weights_only=True, **options)
    except pickle.UnpicklingError as error:  # the archive is intact, so it holds an object that is not allowed
        if not trust:
            raise make_trust_error(path, error) from error
    except (RuntimeError, ValueError) as error:
        raise make_damage_error(path, error) from error
    try:
        return torch.load(open_archive(), weights_only=False, **options)
    except RuntimeError as error:  # raised for a damaged archive, not for objects that cannot be unpickled
        raise make_damage_error(path, error) from error


def make_damage_error(path: AnyPath, error: Exception) -> ValueError:
    """Return the error for a file that cannot be parsed."""
    return ValueError(f"The checkpoint {str(path)!r} is damaged ({get_reason(error)}); use an earlier checkpoint.")


def get_reason(error: Exception) -> str:
    """Describe an error in one line.

    Leave out torch's advice to load the file with ``weights_only=False``, because the file is damaged.
    """
    is_advice = isinstance(error, pickle.UnpicklingError)
    return type(error).__name__ if is_advice else f"{type(error).__name__}: {error}".splitlines()[0]


def make_trust_error(path: Any, error: Exception) -> ValueError:
    """Return the error for a checkpoint that may run code when it is loaded."""
    return ValueError(
        f"The checkpoint {str(path)!r} holds objects other than tensors and plain types (probably hyper-parameters),"
        " which can run code when they are loaded. If you trust the file, pass `weights_only=False` to the Trainer's"
        " method or to `load_checkpoint`, or CheckpointConfig(trust_checkpoint=True) to the strategy, or"
        " `trust_checkpoint=True` to any other function, or `--trust_checkpoint=true` on the command line."
        f" {str(error).splitlines()[0]}"
    )


@cache
def _warn_of_types(names: str) -> None:
    warnings.warn(
        f"This run's checkpoints hold objects other than tensors and plain types ({names}), and will not be loaded"
        " unless they are trusted. Save plain types in hyper-parameters, callbacks and hooks (`str(path)`,"
        " `dict(values)`), or set CheckpointConfig(trust_checkpoint=True); in a plain loop, load with"
        " `weights_only=False`.",
        stacklevel=2,
    )


class _PlainPickle:
    """Replacement for the module ``pickle`` in ``torch.save`` that refuses to pickle DTensors."""

    class Pickler(pickle.Pickler):
        """Pickler that refuses DTensors."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, DTensor):
                raise TypeError(
                    f"A hook or callback saves an object that contains a sharded tensor {tuple(value.shape)}. Save the"
                    " tensor in a plain dict, list or tuple, so that all ranks save their parts, or save the whole"
                    " tensor (`.full_tensor()`)."
                )
            return NotImplemented

    dump = staticmethod(pickle.dump)


class _Store(FileSystem):
    """File access for DCP's reader and writer, in the file system or any object store that fsspec supports."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = get_path(path).open(mode)
        with name_file(path), file:
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
    """Location and checksum of one chunk. Each rank sends these records, not the data, to rank 0."""

    checksum: str = ""

    @property
    def plain(self) -> Any:
        return StorageInfo(self.relative_path, self.offset, self.length)


class RefusedError(pickle.UnpicklingError):
    """Error for a ``.metadata`` file that names a class or function that is not allowed there."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler for ``.metadata`` that refuses all classes and functions except those that DCP writes there."""

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 writes the name of a private module, which other versions do not have
        module = "pathlib" if module == "pathlib._local" else module
        if (module, name) not in _METADATA_GLOBALS and not _is_metadata(module, name):
            raise RefusedError(f".metadata names {module}.{name}.")
        return super().find_class(module, name)


def _check_pickle(archive: Any, path: AnyPath) -> None:
    """Raise an error if the pickle in an archive has a CRC-32 and does not match it.

    Without this check, a damaged pickle could be mistaken for one that holds untrusted objects.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            check_not_compressed(file)
            (record,) = (info for info in file.infolist() if info.filename.endswith("/data.pkl"))
            if record.CRC != 0:
                file.read(record)
    except Exception as error:  # a damaged archive may raise any exception
        raise_unreadable(error, path)
        raise make_damage_error(path, error) from error


def _is_metadata(module: str, name: str) -> bool:
    """Return whether ``.metadata`` may contain this class. It must be a dtype, or come from certain modules of DCP."""
    found = getattr({"torch": torch, **_METADATA_MODULES}.get(module), name, None)
    return isinstance(found, torch.dtype) or (isinstance(found, type) and found.__module__ == module != "torch")


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Turn off the CRC-32 of ``torch.save`` inside the block, since this package's own checksums are faster.

    In torch 2.11, the setting applies to the whole process. In a background thread, the setting is left unchanged,
    since the main thread may be saving another file.
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
    """Give DCP's ``planner`` the part of ``chunk`` that ``item`` requests."""
    if not isinstance(chunk, Tensor):
        planner.load_bytes(item, chunk)
        return
    own = planner.resolve_tensor(item).detach()
    part = zip(item.storage_offsets, item.lengths, strict=True)
    own.copy_(chunk[tuple(slice(start, start + length) for start, length in part)])
    planner.commit_tensor(item, own)


def _to_host(tensor: Tensor) -> Tensor:
    """Return a host tensor whose storage holds only its own elements, because ``torch.save`` writes whole storages."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().size() != tensor.nbytes else tensor
