"""Tensor parallelism in combination with Megatron-FSDP, which is not aware of it.

megatron-fsdp fails on parameters that are DTensors (https://github.com/NVIDIA/Megatron-LM/issues/5786). It does not
need DTensors, because modules under tensor parallelism compute with plain tensors. Before wrapping, each parameter is
therefore replaced with a plain parameter that holds only this rank's part of it. The wrapper then shards this part over
the data parallel ranks. Finally, the wrapper's distributed parameters are *lifted*: they are converted to DTensors that
represent whole parameters, but still share the wrapper's memory. In the mesh of these DTensors, the tensor parallel
axis comes before the wrapper's shard axis, because tensor parallelism splits a parameter first.

For some parameters, each rank computes only a summand of the gradient; see
:class:`~lightning_fsdp2.parallel.tensor.parameters.Layout`. These summands are added up over the tensor parallel ranks
once per optimizer step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from lightning_fsdp2.compat.torch import is_view
from lightning_fsdp2.config import MegatronFSDPConfig
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.parallel.tensor.parameters import get_layout
from lightning_fsdp2.ranks.coordination import gather_objects
from lightning_fsdp2.ranks.failures import list_names
from lightning_fsdp2.ranks.pieces import UNEVEN_SHARD, get_uneven_group
from lightning_fsdp2.ranks.whole_tensors import get_first_row, make_dtensor
from lightning_fsdp2.ranks.whole_values import treat_dtensors_as_whole
from lightning_fsdp2.sizes import DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL


@dataclass(frozen=True)
class Part:
    """Description of a parameter that is distributed over the tensor parallel ranks."""

    shape: torch.Size
    """Shape of the whole parameter."""

    local_shape: torch.Size
    """Shape of this rank's part."""

    placement: Placement
    """Placement over the tensor parallel ranks."""

    is_partial: bool
    """Whether each rank computes only a summand of the gradient, to be summed over the tensor parallel ranks."""


def get_parts(model: nn.Module, tp_mesh: DeviceMesh) -> dict[str, Part]:
    """Describe the parameters of a tensor parallel model, by name. Tied parameters are listed under each name."""
    parts = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            layout = get_layout(module, name)
            whole = torch.empty(parameter.shape, device="meta")
            local = layout.get_shard(whole, tp_mesh.get_local_rank(), tp_mesh.size())
            full_name = f"{prefix}.{name}" if prefix else name
            parts[full_name] = Part(parameter.shape, local.shape, layout.placement, layout.is_partial)
    return parts


def check_foreign_styles(model: nn.Module, config: MegatronFSDPConfig) -> None:
    """Refuse torch's own tensor parallel styles if Megatron-FSDP uses the same buffers for several units in turn.

    These styles save views of a parameter for backward. The views do not follow the parameter to another buffer.

    Raises:
        ValueError: If a flag enables such buffers, and torch's styles have sharded parameters.
    """
    flag = next((name for name in ("fsdp_double_buffer", "nccl_ub") if getattr(config, name)), None)
    foreign = [
        name
        for name, module in model.named_modules()
        if any(get_layout(module, parameter).foreign_shape is not None for parameter in module._parameters)
    ]
    if flag and foreign:
        raise ValueError(
            f"{flag}=True moves parameters between buffers, but tp_plan shards {list_names(foreign)} with torch's own"
            f" styles, whose backward would still read the old buffer. Use {flag}=False, or use this package's styles,"
            " such as 'colwise' and 'rowwise', in tp_plan."
        )


def install_parts(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Replace each parameter on ``tp_mesh`` with this rank's part, a plain parameter. Tied parameters stay tied.

    Parameters that :func:`~lightning_fsdp2.parallel.megatron.wrap.spread_parameters` has sharded further are on another
    mesh, and are not replaced.
    """
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor) or parameter.device_mesh != tp_mesh:
                continue
            if parameter not in replaced:
                local = parameter.to_local().detach()
                # clone views, because megatron-fsdp would not free the memory of a view
                plain = nn.Parameter(local.clone() if is_view(local) else local, parameter.requires_grad)
                plain.__dict__.update(parameter.__dict__)
                replaced[parameter] = plain
            module._parameters[name] = replaced[parameter]


def build_tp_first_mesh(device_mesh: DeviceMesh, shard_axis: str) -> DeviceMesh:
    """Build a mesh for parameters that are sharded first by tensor parallelism, and then over the data parallel ranks.

    Args:
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh`.
        shard_axis: Name of the last mesh axis, over which each tensor parallel rank's part is sharded.
    """
    view = get_mesh(device_mesh, (DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL))
    groups = [view.get_group(axis) for axis in (DP_REPLICATE, TENSOR_PARALLEL, DP_SHARD_CP)]
    ranks = view.mesh.permute(0, 2, 1).contiguous()
    names = (DP_REPLICATE, TENSOR_PARALLEL, shard_axis)
    mesh = DeviceMesh.from_group(groups, view.device_type, mesh=ranks, mesh_dim_names=names)
    treat_dtensors_as_whole(mesh)
    return mesh


class Lift:
    """Converter from Megatron-FSDP's DTensors, which only represent this rank's parts, to DTensors of whole parameters.

    Args:
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh` with several tensor parallel ranks.
        parts: Result of :func:`get_parts`.
    """

    def __init__(self, device_mesh: DeviceMesh, parts: dict[str, Part]) -> None:
        self._parts = parts
        self._mesh = build_tp_first_mesh(device_mesh, UNEVEN_SHARD)
        self._tp_group = self._mesh.get_group(TENSOR_PARALLEL)
        self._rows_group = self._mesh.get_group(UNEVEN_SHARD)
        self._first_rows: dict[str, int] = {}
        self._is_aligned: dict[str, bool] = {}

    def lift(self, name: str, tensor: DTensor) -> DTensor:
        """Return the DTensor of the whole parameter called ``name``, or of its gradient.

        Args:
            name: Name of the parameter.
            tensor: Megatron-FSDP's DTensor of this rank's part. The result shares its memory and its version
                counter.
        """
        part = self._parts[name]
        placements = [Replicate(), part.placement, tensor.placements[-1]]
        return make_dtensor(tensor.to_local().detach(), self._mesh, placements, part.shape)

    def lift_parameters(self, parts: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the lifted parameters by name. A lifted parameter is a DTensor that represents a whole parameter.

        Every rank must call this method once, before :meth:`lift_gradients`.

        Args:
            parts: Megatron-FSDP's distributed parameters, by name.
        """
        parameters = {n: nn.Parameter(self.lift(n, cast(DTensor, p)), p.requires_grad) for n, p in parts.items()}
        partial: Any = {n: p for n, p in parameters.items() if self._parts[n].is_partial and p.requires_grad}
        rows = {name: (get_first_row(p), p.to_local().size(0)) for name, p in partial.items()}
        others = gather_objects(rows, self._tp_group)
        self._first_rows = {name: first for name, (first, _) in rows.items()}
        is_aligned = {name: all(other[name] == own for other in others) for name, own in rows.items()}
        # the ranks that hold rows of the same gradient must agree on how to sum it over the tensor parallel ranks
        verdicts = gather_objects(is_aligned, self._rows_group)
        self._is_aligned = {name: all(verdict[name] for verdict in verdicts) for name in is_aligned}
        return parameters

    @torch.no_grad()
    def lift_gradients(self, parts: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter]) -> None:
        """Move gradients from Megatron-FSDP's parameters to the lifted parameters, and sum partial gradients.

        A gradient is partial if each tensor parallel rank has computed only a summand of it. The sums are not computed
        in place, because a second backward may add to Megatron-FSDP's own gradients.

        Args:
            parts: Megatron-FSDP's distributed parameters, by name.
            parameters: The lifted parameters, by name.
        """
        for name, part in parts.items():
            gradient, part.grad = cast(DTensor | None, part.grad), None
            parameters[name].grad = None if gradient is None else self.lift(name, gradient)
        partial = {name: cast(DTensor, parameters[name]) for name in self._first_rows}
        self._sum_aligned([p for name, p in partial.items() if self._is_aligned[name] and p.grad is not None])
        self._sum_others({name: p for name, p in partial.items() if not self._is_aligned[name]})

    def is_kept_elsewhere(self, name: str) -> bool:
        """Return whether another tensor parallel rank writes this parameter's gradient back to Megatron-FSDP's buffers.

        Partial gradients are summed over the tensor parallel ranks, so all of these ranks hold the same sum. Only one
        rank may write the sum back. Otherwise, the sum would be counted once per rank, because the gradients are summed
        over the ranks again after the next backward.
        """
        return name in self._first_rows and self._tp_group.rank() > 0

    def _sum_aligned(self, parameters: list[DTensor]) -> None:
        """Sum the gradients of parameters that Megatron-FSDP cuts at the same rows on all tensor parallel ranks.

        This takes a single all-reduce, in float32.
        """
        if not parameters:
            return
        local = [cast(DTensor, parameter.grad).to_local() for parameter in parameters]
        flat = torch.cat([gradient.flatten().float() for gradient in local])
        dist.all_reduce(flat, group=self._tp_group)
        for parameter, gradient, total in zip(parameters, local, flat.split([g.numel() for g in local]), strict=True):
            _set_gradient(parameter, total.view(gradient.shape))

    def _sum_others(self, parameters: dict[str, DTensor]) -> None:
        """Sum the gradients of parameters that Megatron-FSDP cuts at different rows on different tensor parallel ranks.

        Each rank's gradient is first padded with zeros to the size of the whole parameter. The cuts differ if the same
        FSDP unit also has a weight whose shards differ in size between tensor parallel ranks, such as an embedding with
        an odd vocabulary size.
        """
        if not parameters:
            return
        whole = []
        for name, parameter in parameters.items():
            whole.append(torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device))
            if parameter.grad is not None:
                gradient = cast(DTensor, parameter.grad).to_local()
                whole[-1][self._first_rows[name] :][: len(gradient)] = gradient
        flat = torch.cat([gradient.flatten() for gradient in whole])
        rows_group = get_uneven_group(next(iter(parameters.values())))
        for group in filter(None, (rows_group, self._tp_group)):
            dist.all_reduce(flat, group=group)
        for (name, parameter), total in zip(parameters.items(), flat.split([g.numel() for g in whole]), strict=True):
            if parameter.grad is not None:
                rows = total.view(parameter.shape)[self._first_rows[name] :]
                _set_gradient(parameter, rows[: len(cast(DTensor, parameter.grad).to_local())])


def _set_gradient(parameter: DTensor, local: Tensor) -> None:
    gradient = cast(DTensor, parameter.grad)
    local = local.to(gradient.dtype)
    parameter.grad = make_dtensor(local, gradient.device_mesh, gradient.placements, gradient.shape)
