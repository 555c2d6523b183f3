"""Weights that cannot be cut before they are converted, and transformers' loader, which cuts first.

It reads of every stored tensor what this rank's shard of the *converted* one says, and converts that. Experts that are
stacked bear it. What is split, interleaved, or concatenated along a sharded dim does not: the rank has a part of each
piece where it should have one of the whole, of the right shape, and there is no error. (transformers 5.17 to 5.23;
``core_model_loading.Split`` says of itself that it is "not TP-safe".)
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_fsdp2._torch_compat import StridedShard

Slot = tuple[nn.Module, str]


@contextmanager
def convert_before_sharding(
    model: Any, stored: Collection[str], conversions: Sequence[Any], device: torch.device
) -> Iterator[None]:
    """Let transformers' loader convert in the block what it must not cut first; each rank keeps its shard only.

    Such parameters are read whole on every rank, along the dims that the conversion mixes, one after the other.

    Args:
        model: Of transformers, on the meta device; DTensors have their final placements.
        stored: Names of the tensors in the files.
        conversions: transformers' ``WeightTransform``s.
        device: Where shards are kept: host memory too, which the loader cannot do for a mesh of GPUs.
    """
    keeper = _ShardKeeper(device)
    for name, converter in _get_converters(model, stored, conversions).items():
        path, _, key = name.rpartition(".")
        slot = model.get_submodule(path), key
        parameter = slot[0]._parameters.get(key)
        if isinstance(parameter, DTensor):
            placements = _get_placements_to_read(parameter, converter)
            if placements != parameter.placements:
                keeper.read_with(slot, placements)
    # threads that read ahead would hold many whole tensors at a time
    environment = {"HF_DEACTIVATE_ASYNC_LOAD": "1"} if keeper.originals else {}
    hook = register_module_parameter_registration_hook(cast(Any, keeper))  # it may return a parameter
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        hook.remove()
        keeper.restore()


class _ShardKeeper:
    """Hook of ``nn.Module`` that is called with every parameter that was loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.originals: dict[Slot, Any] = {}
        """In their place stand others that are whole along some dims, until they are loaded."""

    def read_with(self, slot: Slot, placements: tuple[Placement, ...]) -> None:
        module, name = slot
        original: Any = module._parameters[name]
        self.originals[slot] = original
        module._parameters[name] = _make_meta_parameter(original, placements)

    def restore(self) -> None:
        """Put back the parameters that the files lack."""
        for (module, name), original in self.originals.items():
            module._parameters[name] = original

    @torch.no_grad()
    def __call__(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        original = self.originals.pop((module, name), None)
        if not isinstance(parameter, DTensor) or (original is None and parameter.device.type == self.device.type):
            return None
        kept: DTensor = parameter
        if original is not None:
            # from whole to sharded each rank takes its part, without communication
            kept = parameter.redistribute(placements=original.placements)
            # a copy, where the part would keep the whole tensor in memory
            kept = _wrap(kept.to_local().clone(memory_format=torch.contiguous_format), original, kept.placements)
        result = nn.Parameter(kept.to(self.device), parameter.requires_grad)
        result.__dict__.update(parameter.__dict__)
        return result


def _get_converters(model: Any, stored: Collection[str], conversions: Sequence[Any]) -> Mapping[str, Any]:
    """Which conversion makes each of the model's tensors that is not stored as it is."""
    # private, but what the loader itself asks, with the same arguments from 5.17 to 5.23
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    by_pattern = {
        pattern: conversion
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        for pattern in conversion.source_patterns
    }
    own: dict[str, Tensor] = model.state_dict()
    converters = {}
    for name in stored:
        target, pattern = rename_source_key(name, renamings, list(by_pattern.values()), model.base_model_prefix, own)
        if pattern is not None:
            first, *others = by_pattern[pattern].target_patterns
            for made in (target, *(target.replace(first, other) for other in others)):
                converters[made] = by_pattern[pattern]
    return {name: converter for name, converter in converters.items() if name in own}


def _get_placements_to_read(parameter: Any, converter: Any) -> tuple[Placement, ...]:
    """The placements of ``parameter``, but whole along the dims for which cutting and converting do not commute."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(operation) for operation in converter.operations]
    stacks = MergeModulelist in kinds
    if not set(kinds) <= {Concatenate, MergeModulelist}:
        return (Replicate(),) * len(parameter.placements)
    mixed = {operation.dim % parameter.ndim for operation in converter.operations if type(operation) is Concatenate}

    def choose(placement: Any) -> Placement:
        if placement.is_replicate() or placement.dim not in mixed:
            return placement
        alone = [getattr(other, "dim", None) for other in parameter.placements].count(placement.dim) == 1
        # a rank has its part of each of the pieces: that is how the loader cuts them when it stacks experts
        parts = placement.split_factor if isinstance(placement, StridedShard) else 1
        commutes = stacks and alone and parts == len(converter.source_patterns)
        return placement if commutes else Replicate()

    return tuple(choose(placement) for placement in parameter.placements)


def _make_meta_parameter(original: Any, placements: tuple[Placement, ...]) -> nn.Parameter:
    """As ``original``, on the meta device, with other placements: of each dim sharded as it is, or whole."""
    sharded = {placement.dim for placement in placements if not placement.is_replicate()}  # type: ignore[attr-defined]
    local = original.to_local()
    shape = [local.size(dim) if dim in sharded else size for dim, size in enumerate(original.shape)]
    meta = torch.empty(shape, dtype=original.dtype, device="meta")
    return nn.Parameter(_wrap(meta, original, placements), original.requires_grad)


def _wrap(local: Tensor, like: Any, placements: tuple[Placement, ...]) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
