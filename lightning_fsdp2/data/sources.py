"""Finding files and reading them as documents."""

from __future__ import annotations

import glob
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

PYTHON_STDLIB = "python-stdlib"
"""The path that stands for the Python source of the running interpreter's standard library."""

DEFAULT_SUFFIXES = (".txt", ".md", ".py", ".json", ".jsonl", ".parquet")

_JSON_SUFFIXES = (".json", ".jsonl")
_PARQUET_SUFFIXES = (".parquet",)
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

log = logging.getLogger(__name__)


def find_files(
    path: str | Sequence[str], suffixes: Iterable[str] = DEFAULT_SUFFIXES, *, option: str = "path"
) -> list[str]:
    """Find the files that ``path`` means: a file, a directory, a glob, ``"python-stdlib"``, or a list of them.

    Args:
        path: What to look for. A directory gives its files with one of the ``suffixes``, at any depth, but for hidden
            ones. Files and globs give what they name, whatever its suffix.
        suffixes: Endings of file names, with their dot.
        option: What to call ``path`` in an error.

    Returns:
        Absolute paths, in the order of ``path`` and sorted within each of its members, each once.

    Raises:
        FileNotFoundError: A member of ``path`` gives no file.
    """
    members = [path] if isinstance(path, str | os.PathLike) else path
    files = [str(file.absolute()) for member in members for file in _expand(member, tuple(suffixes), option)]
    if not files:
        raise FileNotFoundError(f"{option}={path!r} is empty; name a file, a directory, a glob or {PYTHON_STDLIB!r}.")
    return list(dict.fromkeys(files))


def _expand(member: str, suffixes: tuple[str, ...], option: str) -> list[Path]:
    if member == PYTHON_STDLIB:
        return _find_stdlib_files()
    path = Path(member).expanduser()
    if path.is_dir():
        return _find_files_of_directory(path, suffixes, option)
    files = [path] if path.is_file() else sorted(filter(Path.is_file, map(Path, glob.glob(str(path), recursive=True))))
    if not files:
        raise FileNotFoundError(
            f"{option}={member!r} is no file or directory of this machine and, as a glob, matches no file; "
            f"check its spelling, or use {PYTHON_STDLIB!r} for a corpus that every machine has."
        )
    return files


def _find_files_of_directory(directory: Path, suffixes: tuple[str, ...], option: str) -> list[Path]:
    files = _walk(directory, suffixes, leave_out=lambda name: name.startswith("."))
    if not files:
        raise FileNotFoundError(
            f"{option}={str(directory)!r} is a directory without a file that ends in one of suffixes={list(suffixes)}; "
            "set suffixes to the endings of your files."
        )
    return files


def _find_stdlib_files() -> list[Path]:
    return _walk(Path(sysconfig.get_path("stdlib")), (".py",), leave_out=_NOT_STDLIB.__contains__)


def _walk(directory: Path, suffixes: tuple[str, ...], *, leave_out: Callable[[str], bool]) -> list[Path]:
    """List the files of a directory, sorted, without those under a name that is to be left out."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if not leave_out(name)]
        files += [Path(folder, name) for name in names if name.endswith(suffixes) and not leave_out(name)]
    return sorted(files)


def load_documents(files: Sequence[str], *, text_column: str = "text", cache_dir: str | None = None) -> Dataset:
    """Read files as documents, with the readers and the cache of the ``datasets`` library.

    ``.json`` and ``.jsonl`` files (one object per line, or one list of objects) and ``.parquet`` files give a document
    per row; any other file is UTF-8 text and one document. Empty documents are left out, and so are, with a warning,
    text files that are not UTF-8.

    Args:
        files: Paths, as from :func:`find_files`.
        text_column: The column of JSON and Parquet files that holds the documents.
        cache_dir: The cache of ``datasets``; None for its default.

    Returns:
        A dataset with the one column ``text``: text files first, then JSON, then Parquet.

    Raises:
        ValueError: ``text_column`` is no column of strings, or no document is left.
    """
    from datasets import Dataset, concatenate_datasets

    json = [file for file in files if file.endswith(_JSON_SUFFIXES)]
    parquet = [file for file in files if file.endswith(_PARQUET_SUFFIXES)]
    text = [file for file in files if not file.endswith(_JSON_SUFFIXES + _PARQUET_SUFFIXES)]
    parts = []
    if text:
        parts.append(_read_text(text, cache_dir))
    if json:
        parts.append(_select_text(Dataset.from_json(_escape(json), cache_dir=cache_dir), text_column, json[0]))
    if parquet:
        parts.append(_select_text(Dataset.from_parquet(_escape(parquet), cache_dir=cache_dir), text_column, parquet[0]))
    documents = concatenate_datasets(parts).filter(bool, input_columns="text", desc="Dropping empty documents")
    if len(documents) == 0:
        raise ValueError(
            f"path holds no text: the {len(files)} file(s) from {files[0]!r} on are empty or not UTF-8; "
            "convert them to UTF-8 or set path to others."
        )
    return documents


def _escape(files: list[str]) -> list[str]:
    """Escape the brackets and stars in names of files, because the readers take glob patterns."""
    return [glob.escape(file) for file in files]


def _read_text(files: list[str], cache_dir: str | None) -> Dataset:
    from datasets import Dataset

    documents = Dataset.from_text(_escape(files), sample_by="document", encoding_errors="replace", cache_dir=cache_dir)
    readable = documents.filter(_is_utf8, input_columns="text", desc="Dropping files that are not UTF-8")
    if len(readable) < len(documents):
        log.warning(
            "%d of %d text files are left out because they are not UTF-8.",
            len(documents) - len(readable),
            len(documents),
        )
    return readable


def _is_utf8(text: str) -> bool:
    # The reader put U+FFFD for what it could not decode. UTF-8 text hardly ever holds one, unless it went through such
    # a reader before and is broken, too.
    return "\ufffd" not in text


def _select_text(rows: Dataset, text_column: str, file: str) -> Dataset:
    """Keep the text column, as ``text``."""
    from datasets import Value

    if text_column not in rows.column_names:
        raise ValueError(
            f"text_column={text_column!r} is no column of {file!r}, which has {rows.column_names}; "
            "set text_column to the one that holds the documents."
        )
    feature = rows.features[text_column]
    if not isinstance(feature, Value) or feature.dtype not in ("string", "large_string"):
        raise ValueError(
            f"text_column={text_column!r} of {file!r} holds {feature}, not strings; "
            f"set text_column to another one of {rows.column_names}."
        )
    documents = rows.select_columns(text_column)
    if text_column != "text":
        documents = documents.rename_column(text_column, "text")
    return documents.cast_column("text", Value("string"))
