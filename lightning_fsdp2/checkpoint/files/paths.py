"""Find a checkpoint by its path, and refuse a path at which there is none. This needs no torch."""

import zipfile
from collections.abc import Collection
from pathlib import Path

from lightning_fsdp2._suggestions import suggest_path
from lightning_fsdp2._untrusted import check_no_devices
from lightning_fsdp2.checkpoint.files.drafts import (
    METADATA_FILE,
    SUMMARY_FILE,
    AnyPath,
    clean_folder,
    get_path,
    is_local,
)
from lightning_fsdp2.checkpoint.files.errors import raise_unreadable

SMALL_FILES = (".metadata", METADATA_FILE)
"""Files that every checkpoint directory has."""

_ACCELERATE_WEIGHTS = "pytorch_model_fsdp_0"
_ACCELERATE_FILES = (_ACCELERATE_WEIGHTS, "optimizer.bin", "scheduler.bin")
"""Names that only a directory from accelerate's ``save_state`` has, at least one of them."""


def resolve_checkpoint(path: str | AnyPath) -> AnyPath:
    """Return the path of a checkpoint with links resolved, without checking that it is complete.

    Raises:
        FileNotFoundError: When there is nothing at the path, or the path is empty.
        ValueError: When a pipe or a device is at the path, or in the directory.
    """
    if not str(path):
        raise FileNotFoundError("The path of the checkpoint is empty, as if from a shell variable that is not set.")
    found = get_path(path)
    if is_local(found):
        if not found.exists():
            clean_folder(found.parent)  # restore the checkpoint if a process died while replacing it
        found = found.resolve()
    if not found.exists():
        unresolved = get_path(path)
        similar = suggest_path(unresolved) if is_local(unresolved) else ""
        raise FileNotFoundError(f"There is no checkpoint {str(path)!r}{similar or '.'}")
    if is_local(found):
        check_no_devices(found)
    return found


def check_is_checkpoint(path: str | AnyPath) -> AnyPath:
    """Refuse a file or a directory that is no checkpoint, and return the path of any other with links resolved.

    Raises:
        FileNotFoundError: When there is nothing at the path.
        ValueError: When something else is there.
    """
    found = resolve_checkpoint(path)
    if not found.is_dir():
        if is_local(found) and not _is_archive(found):
            raise ValueError(
                f"{str(path)!r} is truncated, or was not written by `torch.save`; use an earlier checkpoint, or save"
                " its content with `torch.save`."
            )
        return found
    _check_not_of_accelerate(found)
    if any(found.glob("*.safetensors")) and not (found / ".metadata").exists():
        raise ValueError(
            f"{str(found)!r} is the directory of a Hugging Face model, which holds weights only: pass it to"
            " CausalLM(pretrained=...) or `lightning_fsdp2.models.from_pretrained`."
        )
    _check_not_their_folder(found)
    if not (found / SUMMARY_FILE).exists():  # Lightning and torch write none, and those of this package list all files
        raise_missing(found, [name for name in SMALL_FILES if not (found / name).exists()])
    return found


def _check_not_their_folder(path: AnyPath) -> None:
    """Refuse a folder that has checkpoints in it, and name some of them.

    Raises:
        ValueError: When ``path`` is such a folder.
    """
    inside = sorted(other.name for other in path.glob("*.ckpt"))
    if inside and not (path / METADATA_FILE).exists():
        raise ValueError(
            f"{str(path)!r} is a folder of checkpoints, such as {inside[-1]}; give the path of one of them."
        )


def raise_missing(path: AnyPath, missing: Collection[str]) -> None:
    """Raise an error if a checkpoint lacks files.

    Raises:
        ValueError: When there are names in ``missing``.
    """
    if missing:
        raise ValueError(
            f"The checkpoint {str(path)!r} is incomplete: {', '.join(sorted(missing))} is missing. The checkpoint"
            " was only partly copied, or the process that wrote it died; use an earlier checkpoint."
        )


def _check_not_of_accelerate(path: AnyPath) -> None:
    """Refuse a directory of accelerate's ``save_state``, and say how its weights can be used.

    Raises:
        ValueError: When ``path`` is such a directory, or the one of sharded weights in it.
    """
    is_weights = path.name == _ACCELERATE_WEIGHTS
    if not is_weights and not any((path / name).exists() for name in _ACCELERATE_FILES):
        return
    weights, remedy = path if is_weights else path / _ACCELERATE_WEIGHTS, ""
    if weights.exists():
        remedy = f"make a model.safetensors with `accelerate merge-weights {weights} DIRECTORY`, "
    raise ValueError(
        f"{str(path)!r} was written by accelerate's `save_state`. Only its weights can be used, not its optimizer:"
        f" {remedy}put the model's config.json next to model.safetensors, and pass that directory to"
        " CausalLM(pretrained=...) or `lightning_fsdp2.models.from_pretrained`."
    )


def _is_archive(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path):
            return True
    except Exception as error:  # a damaged archive may raise any exception
        raise_unreadable(error, path)  # `is_zipfile` would say that a file that cannot be read is no archive
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # raised for a damaged file that looks like a multi-part archive
        return False
