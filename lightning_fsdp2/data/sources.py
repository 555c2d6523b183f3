"""Finding files and reading them as documents."""

from __future__ import annotations

import glob
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset

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

    json_files = [file for file in files if file.endswith(_JSON_SUFFIXES)]
    parquet = [file for file in files if file.endswith(_PARQUET_SUFFIXES)]
    text = [file for file in files if not file.endswith(_JSON_SUFFIXES + _PARQUET_SUFFIXES)]
    parts = []
    if text:
        parts.append(_read_text(text, cache_dir))
    if json_files:
        rows = Dataset.from_json(_escape(json_files), cache_dir=cache_dir)
        parts.append(_select_text(rows, text_column, json_files[0]))
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


@dataclass(frozen=True)
class DatasetSplit:
    """A split of a dataset of the Hugging Face Hub or of a local directory."""

    name: str
    """What ``datasets.load_dataset`` takes, or a directory that ``save_to_disk`` wrote."""

    subset: str | None
    """Which of the dataset's configurations; None for the only one."""

    split: str
    """Its name, or a slice such as ``train[:1%]``."""


def load_rows(
    source: Sequence[str] | DatasetSplit, *, streaming: bool = False, cache_dir: str | None = None
) -> Dataset | IterableDataset:
    """Read rows of any form, each as JSON: their columns may differ from row to row, which a table's cannot.

    Args:
        source: Files, as from :func:`find_files`, or a dataset. ``.parquet`` files and ``.json`` files that begin with
            a bracket hold a table and a list of objects, any other file an object per line.
        streaming: Read them when they are asked for, each time.
        cache_dir: The cache of ``datasets``; None for its default.

    Returns:
        A dataset with the string columns ``location``, which names a row in an error, and ``text``, an object in JSON.

    Raises:
        ValueError: A line that is not UTF-8, a damaged file, or a dataset or split that there is not.
    """
    from datasets import Dataset, Features, IterableDataset, Value
    from datasets.exceptions import DatasetGenerationError

    features = Features({"location": Value("string"), "text": Value("string")})
    if isinstance(source, DatasetSplit):
        rows = _load_dataset(source, streaming, cache_dir)
        columns = rows.column_names or list(next(iter(rows), {}))  # a stream may not know them
        name = f"{source.name} ({source.split})"
        options = {"with_indices": True, "features": features, "fn_kwargs": {"name": name}}
        return rows.map(_to_json, remove_columns=columns, **options)
    if streaming:
        return IterableDataset.from_generator(_read_rows, features, gen_kwargs={"files": [(f, "") for f in source]})
    # `datasets` looks for what it has read by the arguments of the generator
    files = [(file, _hash_file(file)) for file in source]
    try:
        return Dataset.from_generator(_read_rows, features, cache_dir=cache_dir, gen_kwargs={"files": files})
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def _load_dataset(source: DatasetSplit, streaming: bool, cache_dir: str | None) -> Dataset | IterableDataset:
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetNotFoundError

    folder = Path(source.name).expanduser()
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        saved = load_from_disk(str(folder))
        rows = _get_split(saved, source) if isinstance(saved, DatasetDict) else saved
        return rows.to_iterable_dataset() if streaming else rows
    try:
        return load_dataset(source.name, source.subset, split=source.split, streaming=streaming, cache_dir=cache_dir)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise ValueError(f"dataset={source.name!r} is not found: {error}") from error
    except ValueError as error:  # an unknown subset or split, with those that there are
        raise ValueError(
            f"dataset={source.name!r}, subset={source.subset!r}, split={source.split!r}: {error}"
        ) from error


def _get_split(saved: DatasetDict, source: DatasetSplit) -> Dataset:
    if source.split not in saved:
        raise ValueError(f"split={source.split!r} is not in dataset={source.name!r}; use one of {list(saved)}.")
    return saved[source.split]


def _to_json(row: Mapping[str, Any], index: int, name: str) -> dict[str, str]:
    return {"location": f"{name}, row {index}", "text": json.dumps(dict(row), ensure_ascii=False, default=str)}


def _hash_file(file: str) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb") as content:
        while block := content.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _read_rows(files: list[tuple[str, str]]) -> Iterator[dict[str, str]]:
    for file, _ in files:
        if file.endswith(_PARQUET_SUFFIXES):
            yield from _read_table(file)
        elif file.endswith(".json") and _is_list(file):
            yield from _read_list(file)
        else:
            yield from _read_lines(file)


def _read_lines(file: str) -> Iterator[dict[str, str]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            location = f"{file}, line {number}"
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{location}: it is not UTF-8 ({error.reason}); convert the file to UTF-8.") from error
            if text:
                yield {"location": location, "text": text}


def _is_list(file: str) -> bool:
    with open(file, "rb") as content:
        return content.read(100).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_list(file: str) -> Iterator[dict[str, str]]:
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except ValueError as error:  # those of JSON and of UTF-8
        raise ValueError(f"{file}: it is no list in JSON ({error}); repair it, or write an object per line.") from error
    for number, row in enumerate(rows, 1):
        yield {"location": f"{file}, item {number}", "text": json.dumps(row, ensure_ascii=False)}


def _read_table(file: str) -> Iterator[dict[str, str]]:
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    rows = (row for batch in ParquetFile(file).iter_batches() for row in batch.to_pylist())
    for number, row in enumerate(rows):
        yield _to_json(row, number, file)
