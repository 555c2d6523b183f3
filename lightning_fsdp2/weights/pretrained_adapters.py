"""Load adapters from peft's files into a sharded model, and refuse adapters that were trained on another model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fsdp2.modules.structure import find_peft_models
from lightning_fsdp2.modules.stubs import get_absent_tensors, mark_initialized, with_skeletons
from lightning_fsdp2.weights.adapters import get_adapter_names
from lightning_fsdp2.weights.materialize import copy_shard_

CONFIG_FILE = "adapter_config.json"

WEIGHTS_FILE = "adapter_model.safetensors"

Slot = tuple[nn.Module, str]

_SOURCE_ATTRIBUTE = "_lightning_fsdp2_adapter"


@dataclass(frozen=True)
class _Source:
    file: Path

    keys: Mapping[str, str]
    """Names of the tensors in the file, keyed by their names in the model."""


def set_adapter_weights(model: Any, folder: Path, adapter: str = "default") -> None:
    """Choose peft's file in ``folder`` as the file from which a ``PeftModel`` loads ``adapter`` after sharding.

    Raises:
        ValueError: If the names or shapes of the tensors in the file differ from those of the adapter.
    """
    file, keys = folder / WEIGHTS_FILE, get_adapter_names(model, adapter)
    with safe_open(file, framework="pt") as opened:
        stored = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118 - not a dict
    # if an embedding or head has an adapter, peft also saves the base weights of that embedding or head
    keys |= {name: name for name in stored.keys() & model.state_dict().keys()}
    own = {key: list(model.get_parameter(name).shape) for name, key in keys.items()}
    _check_same_tensors(file, stored, own, model.peft_config[adapter].base_model_name_or_path)
    setattr(model, _SOURCE_ATTRIBUTE, _Source(file, keys))


@torch.no_grad()
def load_adapters(root: nn.Module, device: torch.device) -> set[Slot]:
    """Load the adapter files that :func:`set_adapter_weights` chose into the shards of the adapters.

    Each rank reads one whole tensor at a time, and keeps its own shard. A pipeline stage reads only its own tensors.

    Args:
        root: Module that is sharded, or whole on one rank. It may be on the meta device.
        device: Device for weights that are on the meta device.

    Returns:
        The module and the parameter name of each loaded weight.
    """
    loaded, absent, elsewhere = set(), get_absent_tensors(root), set[Tensor]()
    for model in find_peft_models(root):
        source: _Source | None = model.__dict__.pop(_SOURCE_ATTRIBUTE, None)
        if source is None:
            continue
        with safe_open(source.file, framework="pt") as file, with_skeletons(model):
            for name, key in source.keys.items():
                module, parameter = _get_slot(model, name)
                if (own := module._parameters[parameter]) in absent:
                    elsewhere.add(own)
                else:
                    _load(module, parameter, file.get_tensor(key), device)
                    loaded.add((module, parameter))
    mark_initialized(root, elsewhere)
    return loaded


def _load(module: nn.Module, name: str, value: Tensor, device: torch.device) -> None:
    own: Any = module._parameters[name]
    if own.is_meta:
        allocated = nn.Parameter(torch.empty_like(own, device=device), own.requires_grad)
        allocated.__dict__.update(own.__dict__)
        module._parameters[name] = own = allocated
    if isinstance(own, DTensor):
        copy_shard_(own, value.to(own.to_local().device, own.dtype))
    else:
        own.copy_(value)


def _check_same_tensors(
    file: Path, stored: Mapping[str, list[int]], own: Mapping[str, list[int]], base: str | None
) -> None:
    problems = [
        *(f"{key} is {stored[key]}, here {own[key]}" for key in sorted(own) if stored.get(key, own[key]) != own[key]),
        *(f"it lacks {key}" for key in sorted(own.keys() - stored.keys())),
        *(f"this model has no {key}" for key in sorted(stored.keys() - own.keys())),
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(
            f"{file} is an adapter for another base model ({base or 'its config does not say which'}): {problems[0]}"
            f"{more}. Set `pretrained` to the model that the adapter was trained on, or set `lora` to the fields of a"
            " new adapter."
        )


def _get_slot(model: nn.Module, name: str) -> Slot:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
