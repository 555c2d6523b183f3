"""Load shards of weights that must be converted before they are sharded.

transformers' loader works in the opposite order: it reads this rank's shard of every stored tensor, and then converts
the shard. The result is correct for experts that are stacked. It is wrong for tensors that are split, interleaved or
concatenated along a sharded dim: the rank gets a shard of each stored piece instead of a shard of the converted tensor.
No error is raised, because the shape is right.

transformers 5.17 to 5.23 work like this. In these versions, ``core_model_loading.Split`` calls itself "not TP-safe".
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_fsdp2.compat.torch import StridedShard
from lightning_fsdp2.compat.transformers import load_tensors, mark_loaded

Slot = tuple[nn.Module, str]


def read_shards(
    model: Any,
    stored: Mapping[str, Any],
    config: Any,
    device: torch.device,
    absent: Collection[Tensor] = frozenset(),
) -> Any:
    """Load weights into ``model`` with transformers' loader; shard some of them only after their conversion.

    Each rank keeps only its shards. If converting the shards of a weight would give a wrong result, every rank reads
    this weight unsharded along the dims that the conversion rearranges. Ranks read only one such weight at a time. A
    rank does not read a parameter if its shard is empty, because the loader cannot stack or concatenate zero tensors.

    Args:
        model: Model of transformers on the meta device. Its DTensors have their final placements.
        stored: The tensors in the files, by name.
        config: transformers' ``LoadStateDictConfig``.
        device: Device for the shards. It may be the CPU even for a mesh of GPUs, although transformers' loader does not
            support this by itself.
        absent: Tensors of ``model`` that other pipeline stages read. They stay on the meta device.

    Returns:
        transformers' ``LoadStateDictInfo``.
    """
    keeper = _ShardKeeper(device)
    to_read, not_read, converters = _sort(model, stored, config.weight_mapping, absent)
    for name, converter in converters.items():
        keeper.read_before_sharding(model, name, converter)
    for name in not_read:
        tensor = model.get_parameter_or_buffer(name)
        if tensor in absent:
            mark_loaded(tensor)  # by another rank
        else:
            module, key = _get_slot(model, name)
            module._parameters[key] = _make_empty(tensor, device)
    config = replace(config, device_map={"": device, **dict.fromkeys(keeper.on_host, "cpu")})
    # the cast is needed because torch accepts a hook that returns a parameter, but annotates the hook differently
    hook = register_module_parameter_registration_hook(cast(Any, keeper))
    try:
        with _reading_one_after_the_other() if keeper.originals else nullcontext():
            info = load_tensors(model, to_read, config)
    finally:
        hook.remove()
        keeper.restore()
    info.missing_keys.difference_update(not_read)
    return info


def _sort(
    model: Any, stored: Mapping[str, Any], conversions: Sequence[Any], absent: Collection[Tensor]
) -> tuple[dict[str, Any], set[str], dict[str, Any]]:
    """Decide which tensors to read from the files, and find out which parameters must be converted.

    Returns:
        The stored tensors to read, by name; the names of the tensors that need no reading, because they are absent or
        their shard is empty on this rank; and the converters of the sharded parameters that need one, by name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sharded: dict[str, Any] = {name: value for name, value in parameters.items() if isinstance(value, DTensor)}
    unused = {name for name, parameter in sharded.items() if not parameter.to_local().numel()}
    unused |= {name for name, tensor in model.state_dict(keep_vars=True).items() if tensor in absent}
    to_read, not_read, converters = dict(stored), set(), {}
    for name, (targets, converter) in _sort_targets(model, stored, conversions).items():
        if targets and unused.issuperset(targets):
            del to_read[name]
            not_read.update(targets)
        elif converter is not None:
            converters.update(dict.fromkeys(sharded.keys() & targets, converter))
    return to_read, not_read, converters


@contextmanager
def _reading_one_after_the_other() -> Iterator[None]:
    """Make transformers read one tensor at a time in the block. Its threads would otherwise hold many whole tensors."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _ShardKeeper:
    """Hook that keeps only this rank's shard of a loaded parameter. torch calls it when a parameter is registered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.originals: dict[Slot, Any] = {}
        """Original parameters that are replaced during loading by parameters that are whole along some dims."""
        self.on_host: set[str] = set()
        """Names of the replaced parameters. They are converted on the CPU, as an accelerator may lack the memory."""

    def read_before_sharding(self, model: nn.Module, name: str, converter: Any) -> None:
        """Replace a parameter during loading, if its shards cannot be converted correctly.

        The replacement is unsharded along the dims that ``converter`` rearranges.
        """
        module, key = slot = _get_slot(model, name)
        original: Any = module._parameters[key]
        placements = _get_placements_to_read(original, converter)
        if placements != original.placements:
            self.originals[slot] = original
            self.on_host.add(name)
            module._parameters[key] = _make_meta_parameter(original, placements)

    def restore(self) -> None:
        """Put back the replaced parameters that were not loaded because the files lack them."""
        for (module, name), original in self.originals.items():
            module._parameters[name] = original

    @torch.no_grad()
    def __call__(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        original = self.originals.pop((module, name), None)
        if original is None and not (isinstance(parameter, DTensor) and parameter.device.type != self.device.type):
            return None
        kept: DTensor = parameter
        if original is not None:
            loaded = parameter if isinstance(parameter, DTensor) else _replicate(parameter, original)
            # this needs no communication, since each rank has the whole tensor and only takes its part
            part = loaded.redistribute(placements=original.placements).to_local()
            # a copy, because a view would keep the whole tensor in memory
            kept = _wrap(part.clone(memory_format=torch.contiguous_format), original, original.placements)
        result = nn.Parameter(kept.to(self.device), parameter.requires_grad)
        result.__dict__.update(parameter.__dict__)
        return result


def _get_slot(model: nn.Module, name: str) -> Slot:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def get_targets(model: Any, stored: Collection[str], conversions: Sequence[Any]) -> dict[str, list[str]]:
    """Map each stored tensor to the names of the model's tensors that are made from it."""
    return {name: targets for name, (targets, _) in _sort_targets(model, stored, conversions).items()}


def _sort_targets(
    model: Any, stored: Collection[str], conversions: Sequence[Any]
) -> dict[str, tuple[list[str], Any | None]]:
    """Map each stored tensor to the model's tensors that are made from it, and to their conversion if there is one."""
    # `rename_source_key` is private. In transformers 5.17 to 5.23, the loader itself calls it with these arguments.
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    by_pattern = {
        pattern: conversion
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        for pattern in conversion.source_patterns
    }
    own: dict[str, Tensor] = model.state_dict()
    found = {}
    for name in stored:
        target, pattern = rename_source_key(name, renamings, list(by_pattern.values()), model.base_model_prefix, own)
        targets, converter = [target], None if pattern is None else by_pattern[pattern]
        if converter is not None:
            first, *others = converter.target_patterns
            targets += [target.replace(first, other) for other in others]
        found[name] = ([made for made in targets if made in own], converter)
    return found


def _get_placements_to_read(parameter: Any, converter: Any) -> tuple[Placement, ...]:
    """Return the placements with which to read a parameter, so that it can be converted correctly.

    The parameter must be whole along each dim for which the order of conversion and sharding matters.
    """
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
        # A packed weight joins several matrices, such as gate and up. A strided shard of the packed weight holds a
        # slice of each matrix. When the loader stacks experts, it reads this rank's slice of each stored tensor. If
        # each matrix is stored as one tensor, these slices form the shard, so no rank has to read a whole tensor.
        parts = placement.split_factor if isinstance(placement, StridedShard) else 1
        commutes = stacks and alone and parts == len(converter.source_patterns)
        return placement if commutes else Replicate()

    return tuple(choose(placement) for placement in parameter.placements)


def _make_meta_parameter(original: Any, placements: tuple[Placement, ...]) -> nn.Parameter:
    """Return a meta parameter with ``placements``. Along each dim, it is either whole or sharded like ``original``."""
    sharded = {placement.dim for placement in placements if not placement.is_replicate()}  # type: ignore[attr-defined]
    local = original.to_local()
    shape = [local.size(dim) if dim in sharded else size for dim, size in enumerate(original.shape)]
    meta = torch.empty(shape, dtype=original.dtype, device="meta")
    # use a plain tensor for an unsharded parameter, because the loader would move a DTensor to the mesh's device
    return nn.Parameter(_wrap(meta, original, placements) if sharded else meta, original.requires_grad)


def _wrap(local: Tensor, like: Any, placements: tuple[Placement, ...]) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _replicate(whole: Tensor, like: Any) -> Any:
    """Copy ``whole`` into a DTensor on the same device. ``DTensor.from_local`` would move it to the mesh's device."""
    placements = (Replicate(),) * len(like.placements)
    meta = _wrap(torch.empty_like(whole, device="meta"), like, placements)
    replicated: Any = torch.empty_like(meta, device=whole.device)
    replicated.to_local().copy_(whole)
    return replicated


def _make_empty(original: Any, device: torch.device) -> nn.Parameter:
    """Return ``original``, whose shard is empty on this rank, as an initialised parameter on ``device``."""
    parameter: Any = nn.Parameter(torch.empty_like(original, device=device), original.requires_grad)
    parameter.__dict__.update(original.__dict__, _is_hf_initialized=True)
    return cast(nn.Parameter, parameter)
