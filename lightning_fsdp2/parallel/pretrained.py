"""Stream Hugging Face weights from safetensors files into a sharded model: each rank reads its own slices only."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.parallel.materialize import random_numbers_of_one_process

_SOURCE_ATTRIBUTE = "_lightning_fsdp2_pretrained"


def set_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Say that ``model``, built on the meta device, takes its weights from ``folder`` once it is sharded.

    Args:
        model: A Hugging Face model.
        folder: A local directory with ``*.safetensors`` files.

    Raises:
        FileNotFoundError: When there are none.
    """
    get_weight_files(folder)
    setattr(model, _SOURCE_ATTRIBUTE, Path(folder))


def load_pretrained(model: nn.Module, device: torch.device, device_mesh: DeviceMesh | None = None) -> None:
    """Load every model in ``model`` that :func:`set_pretrained` was called on; each is loaded once.

    Weights that the files lack (a new classification head) are initialised as transformers does, to the same values on
    any mesh; tied weights and non-persistent buffers are rebuilt. Checkpoints whose tensors are packed differently from
    the model's, such as a mixture's experts, are converted on the fly.

    Args:
        model: Sharded, or whole on one rank; on the meta device.
        device: Where the weights go.
        device_mesh: Its first rank's random state counts; None for one process.

    Raises:
        ValueError: When a tensor's shape differs from the model's.
    """
    for module in model.modules():
        folder = module.__dict__.pop(_SOURCE_ATTRIBUTE, None)
        if folder is not None:
            _load(module, folder, device, device_mesh)


def get_weight_files(folder: str | Path) -> list[str]:
    """Return the safetensors files of a model directory, in order.

    Raises:
        FileNotFoundError: When the directory holds none.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [str(folder / name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    files = sorted(str(file) for file in folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"pretrained={str(folder)!r} holds no *.safetensors file. Give the directory of a model saved by"
            " `save_pretrained()`; convert older `.bin` weights by loading and saving them once with transformers."
        )
    return files


def _load(model: Any, folder: Path, device: torch.device, device_mesh: DeviceMesh | None) -> None:
    # transformers' own shard-on-read loader, private but the same from 5.17 to 5.23; the public ways either read the
    # whole model on one rank or get packed experts wrong
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        device_map={"": device},
        dtype=next(model.parameters()).dtype,
        weight_mapping=cast(Any, get_model_conversion_mapping(model)),
        ignore_mismatched_sizes=True,  # to say below which they are
    )
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with _one_progress_bar():
        info, _ = type(model)._load_pretrained_model(model, None, get_weight_files(folder), config)
    if info.mismatched_keys:
        names = sorted(name for name, *_ in info.mismatched_keys)
        shapes = ", ".join(f"{name} is {tuple(model.get_parameter(name).shape)} here" for name in names)
        raise ValueError(
            f"The tensors in pretrained={str(folder)!r} have other shapes than the model's: {shapes}. Change the config"
            " of the model, or give the directory of a model of this size."
        )
    with random_numbers_of_one_process(device, device_mesh):
        type(model)._finalize_model_loading(model, config, info)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable[name])


@contextmanager
def _one_progress_bar() -> Iterator[None]:
    """Every rank reads its shards, but only rank 0 needs to show it."""
    from transformers.utils import logging

    hide = dist.is_initialized() and dist.get_rank() > 0 and logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()
