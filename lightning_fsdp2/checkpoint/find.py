"""Find a checkpoint by its path, and check that it is complete."""

import json
import shlex
from typing import Any

from lightning_fsdp2._untrusted import check_inside
from lightning_fsdp2.checkpoint.files.chunks import (
    CHECKSUM,
    CHECKSUMS_FILE,
    describe_file,
    raise_damaged,
)
from lightning_fsdp2.checkpoint.files.drafts import METADATA_FILE, SUMMARY_FILE, AnyPath, is_local
from lightning_fsdp2.checkpoint.files.errors import name_file, raise_unreadable
from lightning_fsdp2.checkpoint.files.paths import SMALL_FILES, check_is_checkpoint, raise_missing
from lightning_fsdp2.checkpoint.files.storage import (
    CheckpointReader,
    RefusedError,
    make_damage_error,
    make_trust_error,
)
from lightning_fsdp2.checkpoint.formats.directory import EXTRA_STATES_KEY, FORMAT_VERSION

_CHECKED_FILES = (*SMALL_FILES, CHECKSUMS_FILE)
"""Small files that are compared with their checksums each time a checkpoint is opened."""


def find_checkpoint(path: str | AnyPath, *, trust: bool = False) -> AnyPath:
    """Return the path of a complete checkpoint, with links resolved, because a link's target may change.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        ValueError: When the checkpoint is incomplete, when its format is unknown or is from a later version of this
            package, or when one of its small files is damaged.
    """
    found = check_is_checkpoint(path)
    if found.is_dir():
        _check_complete(found, trust)
    return found


def get_files(path: AnyPath) -> dict[str, dict[str, Any]]:
    """Return the sizes and checksums of a directory's files by name, or an empty dict if other software wrote it.

    Files with tensors have only a size here, because ``checksums.json`` has the checksums of their chunks. In version 2
    of the format, these files have a checksum too.
    """
    if not (path / SUMMARY_FILE).exists():
        return {}
    files: dict[str, dict[str, Any]] = _read_summary(path).get("files", {})
    return files


def find_damaged(path: AnyPath, files: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of files that cannot be read or do not match ``files``, the result of :func:`get_files`."""
    return [name for name, info in files.items() if not _is_intact(path, name, info)]


def _is_intact(path: AnyPath, name: str, expected: dict[str, Any]) -> bool:
    try:
        if CHECKSUM in expected:
            return describe_file(path / name) == expected
        return name not in _CHECKED_FILES and (path / name).stat().st_size == expected["bytes"]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _check_complete(path: AnyPath, trust: bool) -> None:
    _check_version(path)
    files = get_files(path)
    sizes = {name: info["bytes"] for name, info in files.items()}
    missing = _get_missing(path, {**dict.fromkeys(SMALL_FILES, 1), **sizes})
    if not missing:
        checked = {name: files[name] for name in _CHECKED_FILES if name in files}
        raise_damaged(path, [*_get_longer(path, sizes), *find_damaged(path, checked)])
        missing = _get_missing(path, _get_sizes(path, trust))
    raise_missing(path, missing)


def _check_version(path: AnyPath) -> None:
    if not (path / SUMMARY_FILE).exists():
        if not is_local(path) and _is_ours(path):
            raise ValueError(
                f"The checkpoint {str(path)!r} is incomplete: {SUMMARY_FILE}, which is written last, is missing."
            )
        return  # Lightning and torch write no `meta.json`
    version = _read_summary(path)["format_version"]
    if version > FORMAT_VERSION:
        raise ValueError(
            f"The checkpoint {str(path)!r} has format_version={version}, but this version of lightning_fsdp2 reads only"
            f" up to {FORMAT_VERSION}; install a later version."
        )


def _is_ours(path: AnyPath) -> bool:
    """Return whether this package wrote a directory, by searching ``meta.pt`` for a key that the package uses."""
    file = path / METADATA_FILE
    return file.exists() and EXTRA_STATES_KEY.encode() in file.read_bytes()


def _get_missing(path: AnyPath, sizes: dict[str, int]) -> list[str]:
    """Return the names of files that are missing or shorter than they should be."""
    found = {name: (path / name).stat().st_size if (path / name).exists() else -1 for name in sizes}
    return [name if found[name] < 0 else f"{name} (truncated)" for name in sizes if found[name] < sizes[name]]


def _get_longer(path: AnyPath, sizes: dict[str, int]) -> list[str]:
    """Return the names of files with tensors that are longer than they should be, because something was appended."""
    return [name for name in sizes if name not in _CHECKED_FILES and (path / name).stat().st_size > sizes[name]]


def _get_sizes(path: AnyPath, trust: bool) -> dict[str, int]:
    """Return the minimum size in bytes of each file with tensors, by file name. The sizes follow from ``.metadata``."""
    try:
        metadata = CheckpointReader(path, trust=trust).read_metadata()
        places = [(info.relative_path, info.offset + info.length) for info in (metadata.storage_data or {}).values()]
    except RefusedError as error:
        raise make_trust_error(path, error) from error
    except Exception as error:  # a damaged pickle may raise any exception
        raise_unreadable(error, path / ".metadata")
        raise make_damage_error(path / ".metadata", error) from error
    if metadata.planner_data is None:
        raise ValueError(
            f"The checkpoint {str(path)!r} has no `planner_data`, which gives the names of its tensors: it was not"
            " written by this package, Lightning or `torch.distributed.checkpoint.save`. Load it with the software that"
            " wrote it, and save it with one of these."
        )
    groups = {name.partition(".")[0] for name in metadata.planner_data}
    if "model" in groups and "state_dict" not in groups:
        raise ValueError(
            f"The checkpoint {str(path)!r} has its weights under 'model', as Lightning's FSDPStrategy writes them with"
            " state_dict_type='sharded'. Convert it to a file whose weights `load_from_checkpoint` reads:"
            f" python -m lightning.pytorch.utilities.consolidate_checkpoint {shlex.quote(str(path))}"
        )
    ends: dict[str, int] = {}
    for name, end in places:
        ends[name] = max(ends.get(name, 0), end)
    return ends


def _read_summary(path: AnyPath) -> dict[str, Any]:
    try:
        with name_file(path / SUMMARY_FILE):
            summary: dict[str, Any] = json.loads((path / SUMMARY_FILE).read_bytes())
        int(summary["format_version"]) + sum(info["bytes"] for info in summary.get("files", {}).values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: {SUMMARY_FILE} cannot be read ({error!r}). Use an earlier"
            " checkpoint."
        ) from error
    check_inside(summary.get("files", {}), f"{str(path)!r} ({SUMMARY_FILE})")
    return {**summary, "format_version": int(summary["format_version"])}
