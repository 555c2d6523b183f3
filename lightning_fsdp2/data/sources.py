"""Functions that find files and datasets, and read their documents or rows."""

from __future__ import annotations

import csv
import glob
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fsdp2._refusals import get_root_cause
from lightning_fsdp2.data.files import (
    LONGEST_LINE,
    check_lines,
    find_files,
    get_kind,
    is_compressed,
    open_file,
    read_lines,
    refuse_unreadable_files,
)

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset

_JSON = (".json", ".jsonl")
_CSV = (".csv",)
_PARQUET = (".parquet",)
_TABLES = _JSON + _CSV + _PARQUET

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetSplit:
    """Split of a dataset from the Hugging Face Hub or a local directory."""

    name: str
    """Name for ``datasets.load_dataset``, or a directory that ``save_to_disk`` wrote."""

    subset: str | None
    """Configuration of the dataset; None if it has only one."""

    split: str
    """Name of the split, or a slice such as ``train[:1%]``."""


Source: TypeAlias = list[str] | DatasetSplit
"""Source of data: a list of files, or a split of a dataset."""


def find_source(
    path: str | Sequence[str] | None, dataset: str | None, subset: str | None, split: str, suffixes: Iterable[str]
) -> Source:
    """Return the source of training data: the files of ``path``, or the split of ``dataset``.

    Raises:
        ValueError: When both or neither of ``path`` and ``dataset`` are given, or a ``subset`` without ``dataset``.
        FileNotFoundError: When ``path`` matches no file.
    """
    if bool(path) == bool(dataset):
        raise ValueError(
            f"path={path!r} and dataset={dataset!r}: give exactly one of them. Use path for files, or dataset for "
            "a name that datasets.load_dataset takes."
        )
    if subset is not None and not dataset:
        raise ValueError(f"subset={subset!r} is a configuration of `dataset`, which is not given; leave it out.")
    return DatasetSplit(dataset, subset, split) if dataset else find_files(path or [], suffixes)


def find_optional_source(
    name: str, path: str | Sequence[str] | None, split: str | None, suffixes: Iterable[str], train: Source
) -> Source | None:
    """Return the source of validation or test data, if any: the files of ``path``, or a split of the training dataset.

    Raises:
        ValueError: When both ``path`` and ``split`` are given, or ``split`` is given but ``train`` is not a dataset.
        FileNotFoundError: When ``path`` matches no file.
    """
    if path and split:
        raise ValueError(f"{name}_path={path!r} and {name}_split={split!r} cannot be used together; leave one out.")
    if path:
        return find_files(path, suffixes, option=f"{name}_path")
    if not split:
        return None
    if not isinstance(train, DatasetSplit):
        raise ValueError(f"{name}_split={split!r} names a split of `dataset`, which is not given; use {name}_path.")
    return DatasetSplit(train.name, train.subset, split)


def load_documents(
    source: Source, *, text_column: str = "text", streaming: bool = False, cache_dir: str | None = None
) -> Dataset | IterableDataset:
    """Read documents with the ``datasets`` library, which caches them.

    Each row of a dataset is a document, and so is each row of a ``.csv`` or ``.parquet`` file and each object in a
    ``.json`` or ``.jsonl`` file (one object per line, or one list of objects). Any other file is one document in UTF-8.
    Each kind of file may be compressed (``.gz``, ``.bz2``, ``.xz``, ``.zst``). Documents without text, and text files
    that are not UTF-8, are left out with a warning that counts them.

    Args:
        source: Files, as from :func:`find_files`, or a dataset.
        text_column: Column of datasets, CSV, JSON and Parquet files that contains the documents.
        streaming: Whether to read documents on demand, from the beginning in each pass.
        cache_dir: Cache directory of ``datasets``; None for its default.

    Returns:
        A dataset with the single column ``text``. Text files come first, then JSON, then CSV, then Parquet.

    Raises:
        ValueError: When ``text_column`` is not a column of strings, the dataset or split does not exist, or all
            documents are empty. Streams are not checked for empty documents.
    """
    if isinstance(source, DatasetSplit):
        documents = _select_text(_load_dataset(source, streaming, cache_dir), text_column, source.name)
        name = f"dataset={source.name!r} (split={source.split!r})"
        emptiness = f"dataset={source.name!r} holds no text in split={source.split!r}; use a different split"
    else:
        documents = _load_files(source, text_column, streaming, cache_dir)
        name = repr(source[0]) if len(source) == 1 else f"{len(source)} files (the first is {source[0]!r})"
        emptiness = (
            f"path holds no text: the {len(source)} file(s) (the first is {source[0]!r}) are empty or not UTF-8; "
            "convert them to UTF-8 or set path to other files"
        )
    if streaming:
        return documents.filter(partial(_has_text_or_warn, name=name), input_columns="text")
    full = documents.filter(bool, input_columns="text", desc="Dropping empty documents")
    if len(full) == 0:
        raise ValueError(f"{emptiness}.")
    if len(full) < len(documents):
        empty = len(documents) - len(full)
        rank_zero_warn(f"{empty} of {len(documents)} documents of {name} have no text and are left out.")
    return full


def _has_text_or_warn(text: str | None, name: str) -> bool:
    if not text:
        rank_zero_warn(f"Documents of {name} that have no text are left out.")  # Python shows the same warning once
    return bool(text)


def get_bar_options(rows: Dataset | IterableDataset, text: str) -> dict[str, str]:
    """Return progress bar options for ``rows.map`` and ``rows.filter``. Streams have no progress bar and no options."""
    from datasets import IterableDataset

    return {} if isinstance(rows, IterableDataset) else {"desc": text}


def _load_files(
    files: list[str], text_column: str, streaming: bool, cache_dir: str | None
) -> Dataset | IterableDataset:
    from datasets import Dataset, IterableDataset, concatenate_datasets

    readers: Any = IterableDataset if streaming else Dataset
    options = {} if streaming else {"cache_dir": cache_dir}
    refuse_unreadable_files(files)
    if not streaming and (suspects := [file for file in files if _may_have_long_lines(file)]):
        _check_lines_once(suspects, cache_dir)
    read_text = partial(readers.from_text, sample_by="document", encoding_errors="replace", **options)
    parts = []
    if text := [file for file in files if get_kind(file) not in _TABLES]:
        parts.append(_drop_what_is_not_utf8(_read(read_text, text)))
    for kinds, read in (
        (_JSON, readers.from_json),
        (_CSV, readers.from_csv),
        (_PARQUET, readers.from_parquet),
    ):
        if tables := [file for file in files if get_kind(file) in kinds]:
            parts.append(_select_text(_read(partial(read, **options), tables), text_column, tables[0]))
    return concatenate_datasets(parts)


def _may_have_long_lines(file: str) -> bool:
    # A list in `.json` may be one line, and a text is one document with any lines; their size can be seen.
    return is_compressed(file) or (get_kind(file) in (".jsonl", *_CSV) and os.path.getsize(file) > LONGEST_LINE)


def _check_lines_once(files: list[str], cache_dir: str | None) -> None:
    """Refuse files with lines that are too long. The cache of ``datasets`` keeps which files have been checked."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    stamps = [(file, (status := os.stat(file)).st_size, status.st_mtime_ns) for file in files]
    features = Features({"file": Value("string")})
    try:
        Dataset.from_generator(_iterate_checked, features, cache_dir=cache_dir, gen_kwargs={"files": stamps})
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        log.debug("The lines of a file could not be checked; the reader says why.", exc_info=error)


def _iterate_checked(files: list[tuple[str, int, int]]) -> Iterator[dict[str, str]]:
    for file, _, _ in files:
        if get_kind(file) not in _PARQUET:
            check_lines(file)
        yield {"file": file}


def _read(read: Callable[[list[str]], Any], files: list[str]) -> Any:
    """Read files, and name the first that cannot be read.

    Raises:
        ValueError: When a file cannot be read.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowException

    try:
        return read(_escape(files))
    except (DatasetGenerationError, ArrowException, UnicodeDecodeError, StopIteration) as error:
        for file in files if len(files) > 1 else ():
            _read(read, [file])
        reason = get_root_cause(error) if Path(files[0]).stat().st_size else "it is empty"
        raise ValueError(f"{files[0]!r} cannot be read ({reason}); repair the file, or leave it out.") from error


def _escape(files: list[str]) -> list[str]:
    """Escape brackets and asterisks in file names, because the readers of ``datasets`` treat names as globs."""
    return [glob.escape(file) for file in files]


def _drop_what_is_not_utf8(documents: Dataset | IterableDataset) -> Dataset | IterableDataset:
    from datasets import IterableDataset

    if isinstance(documents, IterableDataset):
        return documents.filter(_is_utf8_or_warn, input_columns="text")
    readable = documents.filter(_is_utf8, input_columns="text", desc="Dropping files that are not UTF-8")
    if len(readable) < len(documents):
        log.warning(
            "%d of %d text files are left out because they are not UTF-8.",
            len(documents) - len(readable),
            len(documents),
        )
    return readable


def _is_utf8(text: str) -> bool:
    # The reader puts U+FFFD in place of bytes that it cannot decode.
    # Valid UTF-8 text hardly ever contains U+FFFD, unless an earlier decoding has already damaged the text.
    return "\ufffd" not in text


def _is_utf8_or_warn(text: str) -> bool:
    is_utf8 = _is_utf8(text)
    if not is_utf8:
        log.warning("A text file that is not UTF-8 is left out; it begins with %r.", text[:40])
    return is_utf8


def _select_text(rows: Dataset | IterableDataset, text_column: str, name: str) -> Dataset | IterableDataset:
    """Return ``rows`` with only the column ``text_column``, renamed to ``text``."""
    from datasets import Value

    columns = _get_columns(rows)
    if text_column not in columns:
        raise ValueError(
            f"text_column={text_column!r} is not a column of {name!r}, which has {columns}; "
            "set text_column to the column that contains the documents."
        )
    documents = rows.select_columns(text_column)
    # `features` may be None for a streamed dataset
    feature = documents.features and documents.features[text_column]
    if feature and not _is_string(feature):
        strings = [column for column in columns if _is_string(rows.features[column])]
        remedy = f"set text_column to one of {strings}" if strings else "write every value of this column as a string"
        raise ValueError(
            f"text_column={text_column!r} of {name!r} contains {_describe_first_without_text(documents, text_column)},"
            f" not strings; {remedy}."
        )
    if text_column != "text":
        documents = documents.rename_column(text_column, "text")
    return documents.cast_column("text", Value("string")) if feature else documents


def _is_string(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _describe_first_without_text(documents: Dataset | IterableDataset, column: str) -> str:
    """Name the type of one of the first values that is neither a string nor missing, its value and its row."""
    values = ((number, row[column]) for number, row in enumerate(itertools.islice(documents, 1000), 1))
    for number, value in values:
        if value is not None and not isinstance(value, str):
            return f"values such as {str(value)[:60]!r} in row {number} ({type(value).__name__})"
    return f"{documents.features[column]} values"


def _get_columns(rows: Dataset | IterableDataset) -> list[str]:
    # `column_names` may be None for a streamed dataset, so look at its first row
    return rows.column_names or list(next(iter(rows), {}))


def load_rows(source: Source, *, streaming: bool = False, cache_dir: str | None = None) -> Dataset | IterableDataset:
    """Read rows, and return each row as a JSON string. The rows may have different columns, unlike in a table.

    Args:
        source: Files, as from :func:`find_files`, or a dataset. A ``.parquet`` file contains a table, and a ``.json``
            file that begins with ``[`` contains a list of objects. Any other file contains one object per line.
        streaming: Whether to read rows on demand, from the beginning in each pass.
        cache_dir: Cache directory of ``datasets``; None for its default.

    Returns:
        A dataset with two string columns: ``location`` names the row in errors, and ``text`` is the row as JSON.

    Raises:
        ValueError: When a line is not UTF-8, a file is damaged, all files are empty, or there is no such dataset or
            split.
    """
    from datasets import Dataset, Features, IterableDataset, Value
    from datasets.exceptions import DatasetGenerationError

    features = Features({"location": Value("string"), "text": Value("string")})
    if isinstance(source, DatasetSplit):
        rows = _load_dataset(source, streaming, cache_dir)
        name = f"{source.name} ({source.split})"
        options = {"with_indices": True, "features": features, "fn_kwargs": {"name": name}}
        return rows.map(_write_as_json, remove_columns=_get_columns(rows), **options)
    refuse_unreadable_files(source)
    if next(_read_all_rows([(file, "") for file in source]), None) is None:
        raise ValueError(
            f"path contains no rows: the {len(source)} file(s) (the first is {source[0]!r}) are empty; "
            "set path to other files."
        )
    if streaming:
        return IterableDataset.from_generator(_read_all_rows, features, gen_kwargs={"files": [(f, "") for f in source]})
    # `datasets` caches rows by the generator's arguments, so the arguments include a hash of each file
    files = [(file, _hash_file(file)) for file in source]
    try:
        return Dataset.from_generator(_read_all_rows, features, cache_dir=cache_dir, gen_kwargs={"files": files})
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
    except DatasetNotFoundError as error:
        raise ValueError(f"dataset={source.name!r} was not found: {error}") from error
    except ConnectionError as error:
        raise ValueError(
            f"dataset={source.name!r} is not a directory on this machine, and the Hub cannot be reached: {error}; "
            "check its spelling and the network, or use a directory that `save_to_disk` wrote."
        ) from error
    except ValueError as error:  # raised for an unknown subset or split; the message lists the known ones
        raise ValueError(
            f"dataset={source.name!r}, subset={source.subset!r}, split={source.split!r}: {error}"
        ) from error


def _get_split(saved: DatasetDict, source: DatasetSplit) -> Dataset:
    if source.split not in saved:
        raise ValueError(f"split={source.split!r} is not in dataset={source.name!r}; use one of {list(saved)}.")
    return saved[source.split]


def _write_as_json(row: Mapping[str, Any], index: int, name: str) -> dict[str, str]:
    present = {key: _drop_nulls(value) for key, value in row.items()}
    return {"location": f"{name}, row {index}", "text": json.dumps(present, ensure_ascii=False, default=str)}


def _drop_nulls(value: Any) -> Any:
    """Leave out the keys of objects that have no value. Tables give all objects of a column the keys of each."""
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def _hash_file(file: str) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb") as content:
        while block := content.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _read_all_rows(files: list[tuple[str, str]]) -> Iterator[dict[str, str]]:
    for file, _ in files:
        kind = get_kind(file)
        if kind in _PARQUET:
            yield from _read_table(file)
        elif kind in _CSV:
            yield from _read_csv(file)
        elif kind == ".json" and _is_list(file):
            yield from _read_list(file)
        else:
            yield from _read_json_lines(file)


def _read_json_lines(file: str) -> Iterator[dict[str, str]]:
    for number, line in _read_text(file):
        if text := line.strip():
            yield {"location": f"{file}, line {number}", "text": text}


def _read_csv(file: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(LONGEST_LINE)  # the default is 128 KiB, fewer than long answers have
    rows = csv.DictReader(line for _, line in _read_text(file))
    try:
        for row in rows:
            # a row may have several lines; `line_num` is the last of them
            yield {"location": f"{file}, line {rows.line_num}", "text": json.dumps(row, ensure_ascii=False)}
    except csv.Error as error:
        raise ValueError(f"{file}, line {rows.line_num}: the line is not CSV ({error}); repair the file.") from error


def _read_text(file: str) -> Iterator[tuple[int, str]]:
    for number, line in read_lines(file):
        try:
            yield number, line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}, line {number}: the line is not UTF-8 ({error.reason}); convert the file to UTF-8."
            ) from error


def _is_list(file: str) -> bool:
    with open_file(file) as content:
        return content.read(100).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_list(file: str) -> Iterator[dict[str, str]]:
    if is_compressed(file):
        check_lines(file)
    try:
        with open_file(file) as content:
            rows = json.loads(content.read().decode("utf-8-sig"))
    except ValueError as error:  # raised for invalid JSON or invalid UTF-8
        raise ValueError(
            f"{file}: the file is not a JSON list ({error}); repair it, or write one object per line."
        ) from error
    for number, row in enumerate(rows, 1):
        yield {"location": f"{file}, item {number}", "text": json.dumps(row, ensure_ascii=False)}


def _read_table(file: str) -> Iterator[dict[str, str]]:
    from pyarrow.parquet import ParquetFile

    with open_file(file) as content:
        rows = (row for batch in ParquetFile(content).iter_batches() for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield _write_as_json(row, number, file)
