"""Parameters under tensor parallelism, which are DTensors except while a forward runs.

A model's own code never sees a DTensor. While a module's forward runs, plain tensors with this rank's parts replace the
parameters. The :class:`Layout` of a parameter says whether the gradient of this rank's part is complete or only a
summand. The gradient of the parameter itself always has the placement of its DTensor, so FSDP2, gradient accumulation
and clipping need not know about layouts. Expert parallelism distributes the parameters of experts in the same way, over
the mesh of the expert parallel ranks.

Megatron-FSDP replaces the DTensors with *raw* parameters, which are plain parameters with this rank's parts. A forward
computes with them directly, so the gradient of a raw parameter may be only this rank's summand. The summands of all
ranks are summed after backward.
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
from lightning_fsdp2.ranks.collectives import copy_together, gather_for_ranks, get_shard_range
from lightning_fsdp2.ranks.whole_tensors import make_dtensor

Slot = tuple[nn.Module, str]
"""Module, and name of a parameter that the module holds directly."""

REPLICATE = Replicate()

_LAYOUTS = "_lightning_fsdp2_layouts"


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
    """Sizes of the sections that are packed along ``dim``, such as gate and up, if the placement cannot express them.
    Each rank computes with its shard of every section. If the parameter is sharded, it is gathered first, because the
    shards that the ranks store are cut differently."""

    dim: int = 0

    is_uneven: bool = False
    """Whether the ranks' shards may differ in size, because their results are only gathered or summed."""

    foreign_shape: torch.Size | None = None
    """Shape of the whole parameter if one of torch's own styles has sharded it, and otherwise None. Modules with such
    parameters compute with DTensors."""

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

    @property
    def is_final(self) -> bool:
        """Whether a rank computes with the part of the parameter that it stores, without a conversion."""
        return not self.is_summed and self.sections is None and self.foreign_shape is None

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


_REPLICATED = Layout()


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
    """Replace every parameter in ``layouts`` with a DTensor on ``mesh``. Tied parameters stay tied.

    Parameters that torch's own styles have already replaced stay as they are. The layouts are recorded on the modules,
    for :func:`get_layout`.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for (module, name), layout in layouts.items():
        module.__dict__.setdefault(_LAYOUTS, {})[name] = layout
        parameter = module._parameters[name]
        assert parameter is not None
        if layout.foreign_shape is not None:
            continue
        if parameter not in replaced:
            replaced[parameter] = _to_dtensor(parameter, layout, mesh)
        module._parameters[name] = replaced[parameter]


def get_layout(module: nn.Module, name: str) -> Layout:
    """Return the tensor parallel layout of a parameter that ``module`` holds directly.

    A parameter without a recorded layout is considered replicated. Layouts are recorded on modules and not on
    parameters, because loading weights creates new parameters.
    """
    layout: Layout = module.__dict__.get(_LAYOUTS, {}).get(name, _REPLICATED)
    return layout


def compute_with_local_parameters(
    top: nn.Module,
    layouts: dict[Slot, Layout],
    mesh: DeviceMesh,
    *,
    modules: Iterable[nn.Module] | None = None,
    methods: Iterable[str] = ("forward",),
) -> None:
    """Make methods of ``top`` compute with this rank's parts of the parameters, as plain tensors.

    Args:
        top: Module whose methods are wrapped.
        layouts: Layouts of all parameters of ``top``. Layouts of other parameters are ignored.
        mesh: 1-D mesh of the tensor parallel ranks.
        modules: Modules whose parameters are replaced while a method runs. None for all modules in ``top``.
        methods: Names of the methods to wrap.
    """
    inside = set(top.modules() if modules is None else modules)
    slots = [(*slot, layout) for slot, layout in layouts.items() if slot[0] in inside]
    for name in methods if slots else ():
        wrap_method(top, _LocalParameters(slots, mesh), name)


class _LocalParameters:
    """Wrapper that replaces parameters, while a method runs, with the tensors that the method should compute with."""

    def __init__(self, slots: list[tuple[nn.Module, str, Layout]], mesh: DeviceMesh) -> None:
        self.slots = slots
        self.mesh = mesh
        self.group = mesh.get_group()

    def __call__(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        replaced = [slot for slot in self.slots if _is_replaced(slot[0]._parameters[slot[1]], slot[2])]
        saved = [module._parameters[name] for module, name, _ in replaced]
        try:
            for (module, name, layout), local in zip(replaced, self._to_local(saved, replaced), strict=True):
                module._parameters[name] = self._finish(local, layout)
            return method(*args, **kwargs)
        finally:
            for (module, name, _), parameter in zip(replaced, saved, strict=True):
                module._parameters[name] = parameter

    def _to_local(self, parameters: list[Any], slots: list[tuple[nn.Module, str, Layout]]) -> list[Any]:
        """Return the part of each parameter that this rank stores.

        In backward, a single all-reduce sums the gradients of all DTensors for which each rank computes a summand. The
        gradients of plain parameters, which Megatron-FSDP uses, are summed later, once per optimizer step.
        """
        is_raw = [not isinstance(parameter, DTensor) for parameter in parameters]
        local = [p if raw else p.to_local() for p, raw in zip(parameters, is_raw, strict=True)]
        partial = [i for i, slot in enumerate(slots) if slot[2].is_partial and local[i].requires_grad and not is_raw[i]]
        if partial:
            for i, copy in zip(partial, copy_together([local[i] for i in partial], self.group), strict=True):
                local[i] = copy
        return local

    def _finish(self, local: Tensor, layout: Layout) -> Any:
        if layout.foreign_shape is None:
            return layout.finish(local, self.group)
        return make_dtensor(local, self.mesh, [layout.placement], layout.foreign_shape)


def _is_replaced(parameter: Any, layout: Layout) -> bool:
    """Return whether ``parameter`` must be replaced with another tensor before its module can run.

    If ``parameter`` is a plain tensor and not an ``nn.Parameter``, the wrapper of an enclosing module has already
    replaced the original parameter, so nothing needs to be done.
    """
    if isinstance(parameter, DTensor):
        return layout.foreign_shape is None
    return isinstance(parameter, nn.Parameter) and not layout.is_final


def get_slots(modules: Iterable[nn.Module]) -> list[Slot]:
    """Return the slot, a pair of module and name, of each parameter that one of the given modules holds directly."""
    return [(m, name) for m in modules for name, parameter in m._parameters.items() if parameter is not None]


def _to_dtensor(parameter: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    whole = parameter.detach()
    shard = layout.get_shard(whole, mesh.get_local_rank(), mesh.size())
    dtensor = make_dtensor(shard, mesh, [layout.placement], whole.shape)
    sharded = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(parameter.__dict__)
    return sharded


def _narrow(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    start, length = get_shard_range(tensor.size(dim), rank, ranks)
    return tensor.narrow(dim, start, length)
