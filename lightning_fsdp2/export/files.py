"""Layout of an exported model: which tensors go into which file, and how they are computed from the model's tensors."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fsdp2.compat.torch import TorchDispatchMode, get_storage_id, tree_leaves
from lightning_fsdp2.compat.transformers import get_dtype_exceptions, get_keys_left_out_on_save

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """Description of an exported model: its files, and the tensors stored in each file."""

    dtype: torch.dtype
    """Dtype of the model: that of its first floating-point tensor."""

    specs: dict[str, Tensor]
    """The model's tensors from which the stored tensors are computed, on the meta device and in their final dtypes."""

    files: dict[str, list[str]]
    """Names of the tensors in each file, by the name of the file."""

    sources: dict[str, frozenset[str]]
    """Names of the model's tensors from which each stored tensor is computed."""

    total_size: int
    """Size of all tensors, in bytes."""

    convert: Callable[[Mapping[str, Tensor], Iterable[str]], dict[str, Tensor]]
    """Function that computes the stored tensors with the given names from the model's tensors.

    The model's tensors must have the dtypes in ``specs``.
    """

    def get_sources(self, names: Iterable[str]) -> dict[str, torch.dtype]:
        """Return the tensors of the model that are needed to compute the stored tensors ``names``.

        The result maps the name of each needed tensor to its dtype, in the order of the model's tensors.
        """
        needed = frozenset[str]().union(*(self.sources[name] for name in names))
        return {name: spec.dtype for name, spec in self.specs.items() if name in needed}


def build_file_layout(
    skeleton: "PreTrainedModel",
    specs: Mapping[str, Tensor],
    tied: Iterable[str],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
) -> FileLayout:
    """Build the layout of the files that transformers' ``save_pretrained`` would write for a model.

    Args:
        skeleton: The model on the meta device.
        specs: The model's tensors on the meta device.
        tied: Names of tensors to leave out, because each is tied to another tensor that is stored.
        dtype: Dtype of floating-point tensors; None keeps their dtypes.
        max_shard_size: Maximum size of a file, in bytes or as a string like ``"5GB"``.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    left_out = {*tied, *(get_keys_left_out_on_save(skeleton))}
    dtypes = _get_dtypes(skeleton, specs, dtype)
    # create new tensors that share no storage, because `_Origins` identifies tensors by their storages
    kept = {
        name: torch.empty(specs[name].shape, dtype=dtypes[name], device="meta")
        for name in skeleton.state_dict()
        if name not in left_out
    }
    stored, sources = _trace_conversion(skeleton, kept)
    split = split_state_dict_into_shards_factory(
        stored,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=_get_storage_id,  # tensors that share a storage go into the same file
    )
    return FileLayout(
        dtype=next(spec.dtype for spec in kept.values() if spec.is_floating_point()),
        specs=kept,
        files=split.filename_to_tensors,
        sources=sources,
        total_size=split.metadata["total_size"],
        convert=partial(_convert, skeleton, kept),
    )


def _convert(
    skeleton: "PreTrainedModel", specs: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    # pass all tensors, since a conversion may depend on the names of tensors that it does not convert
    stored = revert_weight_conversion(skeleton, {**specs, **tensors})
    return {name: stored[name].contiguous() for name in names}


def _get_dtypes(
    skeleton: "PreTrainedModel", specs: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    if dtype is None:
        return {name: spec.dtype for name, spec in specs.items()}
    exceptions = get_dtype_exceptions(skeleton, dtype)

    def choose(name: str, spec: Tensor) -> torch.dtype:
        if not spec.is_floating_point():
            return spec.dtype
        patterns = (pattern for pattern in exceptions if re.search(pattern.replace("*", ".*"), name))
        return exceptions[pattern] if (pattern := next(patterns, None)) is not None else dtype

    return {name: choose(name, spec) for name, spec in specs.items()}


def _trace_conversion(
    skeleton: "PreTrainedModel", specs: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, frozenset[str]]]:
    """Convert the model's meta tensors ``specs`` to stored tensors, and find the inputs of each stored tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    origins = _Origins(specs)
    with origins:
        stored = revert_weight_conversion(skeleton, dict(specs))
    return stored, {name: origins.get(tensor) for name, tensor in stored.items()}


class _Origins(TorchDispatchMode):
    """Dispatch mode that records, for the result of each operation, which of ``tensors`` were used to compute it.

    Tensors are identified by their storages.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {_get_storage_id(tensor): frozenset({name}) for name, tensor in tensors.items()}
        self._seen = list(tensors.values())  # keep all tensors alive: ids of freed storages are reused

    def get(self, tensor: Tensor) -> frozenset[str]:
        return self._names.get(_get_storage_id(tensor), frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = frozenset[str]().union(*map(self.get, _get_tensors((args, kwargs))))
        for tensor in _get_tensors(result):
            self._names[_get_storage_id(tensor)] = names
            self._seen.append(tensor)
        return result


def _get_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _get_storage_id(tensor: Tensor) -> int:
    return get_storage_id(tensor)
