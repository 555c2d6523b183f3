"""Read whole tensors of a checkpoint in one process, a few at a time, whatever mesh wrote it."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_fsdp2.checkpoint.distributed import SUMMARY_FILE, LoadPlanner, call_dcp
from lightning_fsdp2.checkpoint.hf_description import DESCRIPTIONS_KEY, Description

_STATE_DICT = "state_dict"


def list_tensors(path: str | Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of a checkpoint's weights and buffers, by their names in the state dict.

    Args:
        path: A checkpoint directory, or a file of ``torch.save`` that holds a state dict or a Lightning checkpoint.

    Raises:
        ValueError: When ``path`` is neither.
    """
    path = Path(path)
    if path.is_file():
        return {name: (tensor.shape, tensor.dtype) for name, tensor in _map_file(path).items()}
    metadata = _read_metadata(path)
    return {
        name: (entry.size, entry.properties.dtype)
        for name, key in _get_keys(metadata).items()
        if isinstance(entry := metadata.state_dict_metadata[key], TensorStorageMetadata)
    }


def read_whole_tensors(path: str | Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Read some of the tensors that :func:`list_tensors` names, on this process alone.

    Args:
        path: As for :func:`list_tensors`.
        names: Which tensors.

    Returns:
        The tensors, whole and in host memory; those of a file are mapped, so that reading takes place where they are
        used.
    """
    path = Path(path)
    if path.is_file():
        tensors = _map_file(path)
        return {name: tensors[name] for name in names}
    metadata = _read_metadata(path)
    keys = _get_keys(metadata)
    entries: dict[str, Any] = {name: metadata.state_dict_metadata[keys[name]] for name in names}
    flat = {keys[name]: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    reader, planner = FileSystemReader(path), LoadPlanner(weights_only=True)
    call_dcp(lambda: load(flat, storage_reader=reader, planner=planner, no_dist=True), path)
    return {name: flat[keys[name]] for name in names}


def read_descriptions(path: str | Path) -> list[Description]:
    """Return what a checkpoint says of the Hugging Face models in it, nothing if it was saved by something else."""
    path = Path(path)
    if path.is_file():
        return _load_file(path).get(DESCRIPTIONS_KEY, [])
    summary = path / SUMMARY_FILE
    return json.loads(summary.read_text()).get(DESCRIPTIONS_KEY, []) if summary.is_file() else []


def _load_file(path: Path) -> dict[str, Any]:
    """Unpickle what ``torch.save`` wrote; its tensors stay in the file until they are used."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read as a checkpoint: it is damaged, or holds objects beyond tensors and plain"
            " types, which can run code when they are loaded. If you trust it, load it with"
            " `torch.load(path, weights_only=False)` and save its 'state_dict' alone."
            f" {str(error).splitlines()[0]}"
        ) from error


def _map_file(path: Path) -> dict[str, Tensor]:
    content = _load_file(path)
    state = content.get(_STATE_DICT, content)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _read_metadata(path: Path) -> Metadata:
    if not (path / ".metadata").is_file():
        raise ValueError(f"{str(path)!r} is no checkpoint: it has no `.metadata`. Give a checkpoint directory or file.")
    return FileSystemReader(path).read_metadata()


def _get_keys(metadata: Metadata) -> dict[str, str]:
    """Map names in the state dict to DCP's flat keys."""
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data
    return {path[1]: key for key, path in paths.items() if path[0] == _STATE_DICT and len(path) == 2}
