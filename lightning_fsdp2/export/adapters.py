"""Export of LoRA adapters, either in peft's format or merged into the model. peft's code merges one layer at a time."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp2.export.files import FileLayout
from lightning_fsdp2.export.sources import Wanted, Weights
from lightning_fsdp2.ranks.coordination import get_rank
from lightning_fsdp2.weights.adapters import get_adapter_names, get_plain_names
from lightning_fsdp2.weights.pretrained_adapters import CONFIG_FILE, WEIGHTS_FILE

_PREFIX = "base_model.model."
"""Prefix that peft adds to the names of tensors in the model that it wraps."""

_BASE = ".base_layer."


def build_adapter_file_layout(weights: Weights, dtype: torch.dtype | None) -> FileLayout:
    """Build the file layout of an adapter: a single file, like the one that peft's ``save_pretrained`` writes."""
    (adapter,) = weights.description["adapters"]
    keys = {key: name.removeprefix(_PREFIX) for name, key in get_adapter_names(weights.adapted, adapter).items()}
    specs = {name: weights.specs[name].to(dtype=dtype) for name in keys.values()}

    def convert(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        return {key: tensors[keys[key]].contiguous() for key in names}

    return FileLayout(
        dtype=next(iter(specs.values())).dtype,
        specs=specs,
        files={WEIGHTS_FILE: list(keys)},
        sources={key: frozenset({name}) for key, name in keys.items()},
        total_size=sum(spec.nbytes for spec in specs.values()),
        convert=convert,
    )


def write_adapter_config(folder: Path, weights: Weights) -> None:
    """Write the adapter's config file, which peft needs in addition to the weights."""
    (config,) = weights.description["adapters"].values()
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")


def merge_adapter(weights: Weights, skeleton: Any) -> Weights:
    """Return the weights of the base model with the adapter merged into them.

    Args:
        weights: Weights of a model with one adapter.
        skeleton: The model without the adapter, and without weights.

    Raises:
        ValueError: When the adapter changes a tied weight, since merging would turn it into two different weights, or
            when the adapter adapts single parameters of a module (``target_parameters``).
    """
    merge = _Merge(weights)
    merge.check()
    specs = {name: weights.specs[merge.get_source(name)] for name in skeleton.state_dict()}
    return Weights(
        skeleton=skeleton,
        description={**weights.description, "has_adapters": False, "adapters": {}},
        specs=specs,
        read=merge,
        adapted=None,
    )


class _Merge:
    """Reader of unsharded tensors with the adapter merged in. It reads all tensors of an adapted layer together."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        (self._adapter,) = weights.description["adapters"]
        model: Any = weights.skeleton
        self._sources = {name: self._get_trained(source) for source, name in get_plain_names(model).items()}
        # path of the peft layer that wraps each tensor's module, or an empty string if no peft layer wraps it
        paths = {name: source.rpartition(_BASE)[0] for name, source in self._sources.items()}
        self._layers: dict[str, Any] = {name: model.get_submodule(path) for name, path in paths.items() if path}
        self._paths = paths

    def get_source(self, name: str) -> str:
        """Return the name that the tensor ``name`` of the base model has in the adapted model."""
        return self._sources[name]

    def check(self) -> None:
        """Raise a ValueError if the adapter cannot be merged."""
        ties: dict[str, str] = self._weights.skeleton.all_tied_weights_keys
        for name in self._weights.description["tied"]:
            if {name, ties[name]} & self._layers.keys():
                raise ValueError(
                    f"The adapter changes {name} or {ties[name]}, which are tied weights: after merging, they would no"
                    " longer be equal. Export the adapter by itself (merge=False)."
                )
        for name, layer in self._layers.items():
            if hasattr(layer, "parameter_name"):
                raise ValueError(
                    f"The adapter uses target_parameters for {name}, which the export cannot merge; export the adapter"
                    " by itself (merge=False)."
                )

    def __call__(self, wanted: Sequence[Wanted]) -> dict[str, Tensor]:
        tensors = self._weights.read([self._get_needed(names) for names in wanted])
        own = wanted[get_rank()] if get_rank() < len(wanted) else {}
        for path in {self._paths[name] for name in own if self._paths[name]}:
            parts = {key.removeprefix(f"{path}."): tensors.pop(key) for key in [*tensors] if key.startswith(f"{path}.")}
            tensors |= {f"{path}{_BASE}{key}": tensor for key, tensor in self._merge(path, parts).items()}
        # `pop` lets each tensor be freed once it is converted, so that the tensors are not all in memory twice
        return {name: tensors.pop(self._sources[name]).to(dtype) for name, dtype in own.items()}

    @torch.no_grad()
    def _merge(self, path: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        layer: Any = copy.deepcopy(self._weights.skeleton.get_submodule(path))  # cheap, as it has no weights
        # peft merges in place, and on a CPU these tensors may be the module's own weights
        layer.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
        layer.merge(adapter_names=[self._adapter])
        merged: dict[str, Tensor] = layer.get_base_layer().state_dict()
        return merged

    def _get_needed(self, names: Iterable[str]) -> dict[str, torch.dtype]:
        """Return the tensors needed to compute the merged tensors ``names``, each with the dtype to read it in."""
        specs = self._weights.specs
        paths = {self._paths[name] for name in names} - {""}
        # return the tensors in the model's order, which is the same on every rank
        parts = {key for path in paths for key in specs if key.startswith(f"{path}.")}
        needed = parts | {self._sources[name] for name in names}
        return {key: specs[key].dtype for key in specs if key in needed}

    def _get_trained(self, source: str) -> str:
        """Return the name of the trained copy of the tensor ``source``, or ``source`` itself if there is no copy.

        peft trains a copy of each module in ``modules_to_save``, and keeps the original.
        """
        return source.replace(".original_module.", f".modules_to_save.{self._adapter}.")
