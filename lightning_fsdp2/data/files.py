"""Functions that find files of data, tell what they contain, and open them."""

from __future__ import annotations

import glob
import io
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fsdp2._git_lfs import LFS_POINTER, is_lfs_pointer
from lightning_fsdp2._suggestions import suggest_path

PYTHON_STDLIB = "python-stdlib"
"""Path that stands for the Python source of the running interpreter's standard library."""

DEFAULT_SUFFIXES = (".txt", ".md", ".py", ".json", ".jsonl", ".csv", ".parquet")

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files, which are read like the files without this ending."""

LONGEST_LINE = 2**27
"""Most bytes of a line. A row takes about twenty times its bytes in memory, and a small compressed file can unpack to a
line of any length."""

_BLOCK = 2**20

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def find_files(
    path: str | Sequence[str], suffixes: Iterable[str] = DEFAULT_SUFFIXES, *, option: str = "path"
) -> list[str]:
    """Find the files that ``path`` refers to: a file, a directory, a glob, ``"python-stdlib"``, or a list of them.

    Args:
        path: Path or paths to look for. A directory stands for all files below it that have one of the ``suffixes``,
            compressed or not, and are not hidden; a warning counts the others. Files given by name or by a glob may
            have any suffix.
        suffixes: Endings of file names, with their dot.
        option: Name of ``path`` in error messages.

    Returns:
        Absolute paths in the order of the given paths. The files of each given path are sorted. A path that is given
        twice has its files twice.

    Raises:
        FileNotFoundError: When one of the given paths matches no file.
    """
    members = [path] if isinstance(path, str | os.PathLike) else path
    files = [str(file.absolute()) for member in members for file in _expand(member, tuple(suffixes), option)]
    if not files:
        raise FileNotFoundError(f"{option}={path!r} is empty; name a file, a directory, a glob or {PYTHON_STDLIB!r}.")
    if len(files) > 1:
        rank_zero_info(f"{option}: {_count_endings(files)}")
    if repeated := [file for file, count in Counter(files).items() if count > 1]:
        rank_zero_info(f"{option}: {len(repeated)} files are read more than once, such as {repeated[0]!r}.")
    return files


def _expand(member: str, suffixes: tuple[str, ...], option: str) -> list[Path]:
    if member == PYTHON_STDLIB:
        return _find_stdlib_files()
    path = Path(member).expanduser()
    if path.is_dir():
        return _find_files_of_directory(path, suffixes, option)
    files = [path] if path.is_file() else sorted(filter(Path.is_file, map(Path, glob.glob(str(path), recursive=True))))
    if not files:
        hint = suggest_path(path) or f"; check its spelling{_name_other_sources(suffixes, option)}."
        raise FileNotFoundError(
            f"{option}={member!r} is neither a file nor a directory on this machine and, as a glob, matches no file"
            f"{hint}"
        )
    return files


def _name_other_sources(suffixes: tuple[str, ...], option: str) -> str:
    hub = ", or name a dataset of the Hub as `dataset`" if option == "path" else ""
    return f"{hub}, or use {PYTHON_STDLIB!r} for a corpus that every machine has" if ".py" in suffixes else hub


def _find_files_of_directory(directory: Path, suffixes: tuple[str, ...], option: str) -> list[Path]:
    every_file = _walk(directory, leave_out=lambda name: name.startswith("."))
    files = [file for file in every_file if remove_compression(file.name).endswith(suffixes)]
    if broken := [str(file) for file in files if not file.exists()]:
        raise FileNotFoundError(
            f"{option}={str(directory)!r} has {len(broken)} link(s) to files that do not exist, such as {broken[0]!r};"
            " fetch what they point to, or delete them."
        )
    if not files:
        raise FileNotFoundError(
            f"{option}={str(directory)!r} is a directory without a file that ends in one of suffixes={list(suffixes)}; "
            f"set suffixes to the endings of your files. It holds {_count_endings(every_file)}."
        )
    if left_out := sorted({*every_file} - {*files}):
        rank_zero_warn(
            f"{option}={str(directory)!r}: {len(left_out)} of {len(every_file)} files are left out, because their"
            f" endings are not in suffixes={list(suffixes)}: {_count_endings(left_out)}."
        )
    return files


def _find_stdlib_files() -> list[Path]:
    files = _walk(Path(sysconfig.get_path("stdlib")), leave_out=_NOT_STDLIB.__contains__)
    return [file for file in files if file.suffix == ".py" and file.stat().st_size]  # some `__init__.py` are empty


def _walk(directory: Path, *, leave_out: Callable[[str], bool]) -> list[Path]:
    """List the files below a directory, sorted, and links to what does not exist, but no pipes and no devices.

    Skip files and folders if ``leave_out(name)`` is True.
    """
    files: list[Path] = []
    folders = [directory]
    while folders:
        with os.scandir(
            folders.pop()
        ) as entries:  # which knows the kind of a file without asking the file system again
            for entry in entries:
                if leave_out(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                    files.append(Path(entry.path))
    return sorted(files)


def _count_endings(files: Sequence[str | Path]) -> str:
    """Return text such as "3 files (.jsonl.gz 1, .md 2)"."""
    counts = sorted(Counter(_get_ending(str(file)) or "no ending" for file in files).items())
    return f"{len(files)} files ({', '.join(f'{ending} {count}' for ending, count in counts)})"


def remove_compression(file: str) -> str:
    """Return the name that a compressed file has without its compression. Other names are returned as they are."""
    name, ending = os.path.splitext(file)
    return name if ending in COMPRESSIONS else file


def get_kind(file: str) -> str:
    """Return the ending that tells what a file contains, such as ``.jsonl`` for ``rows.jsonl.gz``."""
    return os.path.splitext(remove_compression(file))[1]


def _get_ending(file: str) -> str:
    return get_kind(file) + file.removeprefix(remove_compression(file))


def is_compressed(file: str) -> bool:
    """Return whether the name of a file has one of the endings in :data:`COMPRESSIONS`."""
    return remove_compression(file) != file


def open_file(file: str) -> BinaryIO:
    """Open a file to read its content, decompressed if its ending is one of :data:`COMPRESSIONS`."""
    import fsspec

    content = fsspec.open(f"file://{file}", "rb", compression="infer").open()
    # the reader of zstandard cannot split its content into lines
    return cast(BinaryIO, io.BufferedReader(content) if file.endswith(".zst") else content)


def read_lines(file: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each line of a file, decompressed.

    Raises:
        ValueError: When a line is longer than :data:`LONGEST_LINE`.
    """
    with open_file(file) as content:
        number = 0
        while line := content.readline(LONGEST_LINE + 1):
            number += 1
            _check_length(len(line.removesuffix(b"\n")), file, number)
            yield number, line


def check_lines(file: str) -> None:
    """Refuse a file with a line that is longer than :data:`LONGEST_LINE`, without keeping a line in memory.

    A file that is not compressed cannot surprise with its size, so it is read only if it is longer than that.

    Raises:
        ValueError: When a line is too long.
    """
    if not is_compressed(file) and os.path.getsize(file) <= LONGEST_LINE:
        return
    with open_file(file) as content:
        number, length = 1, 0
        while block := content.read(_BLOCK):
            begun, newline, _ = block.partition(b"\n")
            length += len(begun)
            _check_length(length, file, number)
            if newline:  # lines within a block are short
                number += block.count(b"\n")
                length = len(block) - block.rfind(b"\n") - 1


def _check_length(length: int, file: str, number: int) -> None:
    if length > LONGEST_LINE:
        raise ValueError(
            f"{file}, line {number}: the line is longer than {LONGEST_LINE // 2**20} MiB, the most that is read; repair"
            " the file, leave it out, or split its rows."
        )


def refuse_unreadable_files(files: Sequence[str]) -> None:
    """Refuse files that may not be read, that stand in place of others, or that no installed package can decompress.

    Raises:
        ValueError: When this user may not read a file, or it is a Git LFS pointer.
        ModuleNotFoundError: When a file is compressed with zstd, and ``zstandard`` is not installed.
    """
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{file!r} may not be read (Permission denied); let this user read it, or leave it out.")
        if is_lfs_pointer(file):
            raise ValueError(f"{file!r} is {LFS_POINTER}.")
        if file.endswith(".zst") and find_spec("zstandard") is None:
            raise ModuleNotFoundError(
                f"{file!r} is compressed with zstd, which needs the package zstandard: pip install zstandard."
            )
