"""Read whole tensors from a checkpoint in one process, a few at a time, whatever mesh the checkpoint was saved on."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_fsdp2.checkpoint.files.drafts import METADATA_FILE, SUMMARY_FILE, AnyPath, get_path
from lightning_fsdp2.checkpoint.files.storage import CheckpointReader, load_pickled
from lightning_fsdp2.checkpoint.formats.dcp import call_dcp
from lightning_fsdp2.checkpoint.formats.directory import LoadPlanner
from lightning_fsdp2.checkpoint.formats.single_file import read_file
from lightning_fsdp2.checkpoint.frozen import LEFT_OUT_KEY, LeftOut
from lightning_fsdp2.weights.description import DESCRIPTIONS_KEY, Description

_STATE_DICT = "state_dict"


def list_tensors(path: "str | AnyPath", *, trust: bool = False) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of each weight and buffer in a checkpoint, by its name in the state dict.

    Args:
        path: Complete checkpoint directory, or a file from ``torch.save`` with a state dict or a Lightning checkpoint.
        trust: Whether the checkpoint may hold arbitrary objects, which can run code when they are loaded.

    Raises:
        ValueError: When ``path`` is not a checkpoint, or when the checkpoint holds objects other than tensors and plain
            types while ``trust`` is False.
    """
    found = get_path(path)
    if found.is_file():
        return {name: (tensor.shape, tensor.dtype) for name, tensor in _map_file(found, trust).items()}
    metadata = CheckpointReader(found, trust=trust).read_metadata()
    return {
        name: (entry.size, entry.properties.dtype)
        for name, key in _get_keys(metadata).items()
        if isinstance(entry := metadata.state_dict_metadata[key], TensorStorageMetadata)
    }


def read_whole_tensors(
    path: "str | AnyPath", names: Sequence[str], *, verify: bool = True, trust: bool = False
) -> dict[str, Tensor]:
    """Read whole tensors from a checkpoint by name, in this process alone.

    Args:
        path: See :func:`list_tensors`.
        names: Names of the tensors to read, among those that :func:`list_tensors` returns.
        verify: Whether to compare the data of a directory with its checksums.
        trust: See :func:`list_tensors`.

    Returns:
        The tensors, whole and in host memory. Tensors of a single file are memory-mapped, so they are read when used.

    Raises:
        ValueError: When the data is damaged.
    """
    found = get_path(path)
    if found.is_file():
        tensors = _map_file(found, trust)
        return {name: tensors[name] for name in names}
    reader = CheckpointReader(found, trust=trust, verify=verify)
    metadata = reader.read_metadata()
    keys = _get_keys(metadata)
    entries: dict[str, Any] = {name: metadata.state_dict_metadata[keys[name]] for name in names}
    flat = {keys[name]: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    planner = LoadPlanner(found, trust)
    call_dcp(lambda: load(flat, storage_reader=reader, planner=planner, no_dist=True), found)
    return {name: flat[keys[name]] for name in names}


def read_descriptions(path: "str | AnyPath", *, trust: bool = False) -> list[Description]:
    """Return a checkpoint's descriptions of its Hugging Face models. Other software's checkpoints have none."""
    found = get_path(path)
    if found.is_file():
        descriptions: list[Description] = read_file(found, with_optimizers=False, trust=trust).get(DESCRIPTIONS_KEY, [])
        return descriptions
    summary = found / SUMMARY_FILE
    return json.loads(summary.read_bytes()).get(DESCRIPTIONS_KEY, []) if summary.exists() else []


def read_left_out(path: "str | AnyPath", *, trust: bool = False) -> list[LeftOut]:
    """Return the records of frozen weights that a checkpoint does not hold. Usually, the list is empty."""
    found = get_path(path)
    if found.is_file():
        checkpoint = read_file(found, with_optimizers=False, trust=trust)
    else:
        checkpoint = load_pickled(found / METADATA_FILE, trust=trust)
    left_out: list[LeftOut] = checkpoint.get(LEFT_OUT_KEY, [])
    return left_out


def _map_file(path: AnyPath, trust: bool) -> dict[str, Tensor]:
    state = read_file(path, with_optimizers=False, trust=trust)["state_dict"]
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _get_keys(metadata: Metadata) -> dict[str, str]:
    """Return DCP's flat key for each name in the state dict."""
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data
    return {path[1]: key for key, path in paths.items() if path[0] == _STATE_DICT and len(path) == 2}
