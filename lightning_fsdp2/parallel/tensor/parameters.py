"""Parameters under tensor parallelism, which are DTensors except while a forward runs.

A model's own code never sees a DTensor. While a module's forward runs, plain tensors with this rank's parts replace the
parameters. The :class:`Layout` of a parameter says whether the gradient of this rank's part is complete or only a
summand. The gradient of the parameter itself always has the placement of its DTensor, so FSDP2, gradient accumulation
and clipping need not know about layouts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2.compat.torch import StridedShard, has_packed_shards
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.ranks.collectives import (
    copy_together,
    gather_for_ranks,
    get_shard_range,
)

Slot = tuple[nn.Module, str]
"""Module, and name of a parameter that the module holds directly."""


REPLICATE = Replicate()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sharding of a parameter over the tensor parallel ranks, and how each rank uses its part of the parameter."""

    placement: Placement = REPLICATE

    is_partial: bool = False
    """Whether each rank applies the parameter to its own activations, such as its heads or its part of the sequence.
    The gradient that each rank computes is then only a summand."""

    is_summed: bool = False
    """Whether the parameter is a bias that is added to a result before the result is summed over the ranks. Only one
    rank may then add the bias."""

    sections: tuple[int, ...] | None = None
    """Sizes of the sections that are packed along ``dim``, such as gate and up, if the placement cannot express them. A
    rank uses its shard of each section. If the parameter is sharded, it is gathered before use."""

    dim: int = 0

    is_uneven: bool = False
    """Whether the ranks' shards may differ in size, because their results are only gathered or summed."""

    def get_parts(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the sizes of a parameter's packed sections. Each section is sharded over the ranks separately."""
        if self.sections is not None:
            return self.sections
        placement: Any = self.placement
        count = placement.split_factor if isinstance(placement, StridedShard) else 1
        return (parameter.size(placement.dim) // count,) * count

    def get_shard(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the part of a parameter that ``rank`` stores.

        A shard is a copy, so that the memory of the whole parameter can be freed.
        """
        if isinstance(self.placement, StridedShard):
            parts = whole.chunk(self.placement.split_factor, self.placement.dim)
            return torch.cat([_narrow(part, self.placement.dim, rank, ranks) for part in parts], self.placement.dim)
        if isinstance(self.placement, Shard):
            return _narrow(whole, self.placement.dim, rank, ranks).clone(memory_format=torch.contiguous_format)
        return whole

    def finish(self, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Convert the stored part of a parameter to the part with which this rank computes.

        The conversion is differentiable.
        """
        if self.is_summed and group.rank() > 0:
            return local * 0
        if self.sections is None:
            return local
        if isinstance(self.placement, Shard):
            local = gather_for_ranks(local, self.dim, group)
        parts = local.split(self.sections, self.dim)
        return torch.cat([_narrow(part, self.dim, group.rank(), group.size()) for part in parts], self.dim)


def get_packed_layout(parameter: Tensor, dim: int, sections: int | tuple[int, ...]) -> Layout:
    """Return the layout of a parameter that packs several projections, such as gate and up, or q, k and v.

    Args:
        parameter: The whole parameter.
        dim: Dim along which the projections are packed.
        sections: Size of each projection, or the number of projections if all have the same size.
    """
    dim = dim % parameter.ndim
    if isinstance(sections, int):
        sections = (parameter.size(dim) // sections,) * sections
    if parameter.ndim == 1:
        # replicate biases, because they are small and FSDP2 already shards their only dim
        return Layout(is_partial=True, sections=sections, dim=dim)
    if len(set(sections)) == 1 and has_packed_shards():
        return Layout(placement=StridedShard(dim, split_factor=len(sections)))
    return Layout(placement=Shard(dim), sections=sections, dim=dim)


def shard_parameters(layouts: dict[Slot, Layout], mesh: DeviceMesh) -> None:
    """Replace every parameter in ``layouts`` with a DTensor on ``mesh``. Tied parameters stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for (module, name), layout in layouts.items():
        parameter = module._parameters[name]
        assert parameter is not None
        if parameter not in replaced:
            replaced[parameter] = _to_dtensor(parameter, layout, mesh)
        module._parameters[name] = replaced[parameter]


def compute_with_local_parameters(
    top: nn.Module,
    layouts: dict[Slot, Layout],
    group: dist.ProcessGroup,
    *,
    modules: Iterable[nn.Module] | None = None,
    methods: Iterable[str] = ("forward",),
) -> None:
    """Make methods of ``top`` compute with this rank's parts of the parameters, as plain tensors.

    Args:
        top: Module whose methods are wrapped.
        layouts: Layouts of all parameters of ``top``. Layouts of other parameters are ignored.
        group: Process group of the tensor parallel ranks.
        modules: Modules whose parameters are replaced while a method runs. None for all modules in ``top``.
        methods: Names of the methods to wrap.
    """
    inside = set(top.modules() if modules is None else modules)
    slots = [(*slot, layout) for slot, layout in layouts.items() if slot[0] in inside]
    for name in methods if slots else ():
        wrap_method(top, _LocalParameters(slots, group), name)


class _LocalParameters:
    """Wrapper of a method that replaces DTensor parameters with this rank's parts while the method runs."""

    def __init__(self, slots: list[tuple[nn.Module, str, Layout]], group: dist.ProcessGroup) -> None:
        self.slots = slots
        self.group = group

    def __call__(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # skip parameters that are no longer DTensors, because an enclosing module's wrapper has already replaced them
        sharded = [slot for slot in self.slots if isinstance(slot[0]._parameters[slot[1]], DTensor)]
        saved = [module._parameters[name] for module, name, _ in sharded]
        try:
            for (module, name, layout), local in zip(sharded, self._to_local(saved, sharded), strict=True):
                module._parameters[name] = layout.finish(local, self.group)  # type: ignore[assignment]
            return method(*args, **kwargs)
        finally:
            for (module, name, _), parameter in zip(sharded, saved, strict=True):
                module._parameters[name] = parameter

    def _to_local(self, parameters: list[Any], slots: list[tuple[nn.Module, str, Layout]]) -> list[Any]:
        """Return the part of each parameter that this rank stores.

        In backward, a single all-reduce sums the gradients of all parameters for which each rank computes a summand.
        """
        local = [parameter.to_local() for parameter in parameters]
        partial = [i for i, (_, _, layout) in enumerate(slots) if layout.is_partial and local[i].requires_grad]
        if partial:
            for i, copy in zip(partial, copy_together([local[i] for i in partial], self.group), strict=True):
                local[i] = copy
        return local


def get_slots(modules: Iterable[nn.Module]) -> list[Slot]:
    """Return the slots of all parameters that the given modules hold directly, not counting their submodules."""
    return [(m, name) for m in modules for name, parameter in m._parameters.items() if parameter is not None]


def _to_dtensor(parameter: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    whole = parameter.detach()
    shard = layout.get_shard(whole, mesh.get_local_rank(), mesh.size())
    stride = torch.empty(whole.shape, device="meta").stride()
    dtensor = DTensor.from_local(shard, mesh, [layout.placement], run_check=False, shape=whole.shape, stride=stride)
    sharded = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(parameter.__dict__)
    return sharded


def _narrow(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    start, length = get_shard_range(tensor.size(dim), rank, ranks)
    return tensor.narrow(dim, start, length)
