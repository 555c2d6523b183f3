"""Parameters that several stages of a pipeline hold: tied ones, and those of modules around the model.

Each stage has a copy, and computes the gradient of the part of the step in which it uses this copy. The sum over the
copies is the gradient that one process computes, and all copies are updated alike.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.gradients import has_gradient_hooks
from lightning_fsdp2.mesh import get_device, get_extra_group, get_mesh
from lightning_fsdp2.mesh_axes import get_pipeline_control
from lightning_fsdp2.modules.stages import PipelineRanks
from lightning_fsdp2.parallel.pipeline.split import Split
from lightning_fsdp2.sizes import PIPELINE_PARALLEL


@dataclass(eq=False, kw_only=True)
class SharedParameters:
    """Copies of parameters on this rank that also exist on other stages."""

    parameters: dict[int, nn.Parameter]
    """This rank's copies, by the index of the parameter among those of all ranks."""

    groups: dict[int, dist.ProcessGroup]
    """Ranks that hold each of them."""

    count: int
    """Number of shared parameters of all ranks."""

    ranks: PipelineRanks
    """Ranks of the pipeline, and the copies that count elsewhere in the norm of the gradients."""

    control: dist.ProcessGroup
    """Group of the ranks of the pipeline for tensors on the CPU."""

    has_summed: bool = False
    """Whether the gradients are sums over the copies."""

    @torch.no_grad()
    def divide_sums(self) -> None:
        """Divide sums among the copies again, before a backward adds to them."""
        if self.has_summed:
            for index, parameter in self.parameters.items():
                if parameter.grad is not None:
                    _to_local(parameter.grad).div_(self.groups[index].size())
        self.has_summed = False

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of the copies. A parameter without a gradient on any stage keeps none."""
        self.has_summed = True
        if self.count == 0:
            return
        if any(has_gradient_hooks(parameter) for parameter in self.parameters.values()):
            raise ValueError(
                "pp_size: a hook was registered on a parameter that several stages share, such as a tied embedding, so"
                " it would see the gradient of one stage alone. Change the gradient in `on_before_optimizer_step`, or"
                " use pp_size=1."
            )
        has_gradient = torch.zeros(self.count, dtype=torch.int32)
        for index, parameter in self.parameters.items():
            has_gradient[index] = parameter.grad is not None
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=self.control)
        for index, parameter in self.parameters.items():
            if has_gradient[index]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(_to_local(parameter.grad), group=self.groups[index])


def build_shared_parameters(root: nn.Module, split: Split, device_mesh: DeviceMesh) -> SharedParameters:
    """Find the parameters of ``root`` that several stages hold, after it has been sharded.

    Args:
        root: Module that holds the model.
        split: Division of the model into stages.
        device_mesh: Mesh with several pipeline ranks.
    """
    pipeline = get_mesh(device_mesh, PIPELINE_PARALLEL)
    own = pipeline.get_local_rank()
    named = dict(root.named_parameters())
    parameters, groups, elsewhere = {}, {}, set()
    for index, (name, ranks) in enumerate(split.tied.items()):
        group = _get_group(device_mesh, pipeline, ranks)
        if own not in ranks:
            continue
        parameters[index], groups[index] = named[name], group
        if not split.stages.is_counted(name):
            elsewhere.add(named[name])
    return SharedParameters(
        parameters=parameters,
        groups=groups,
        count=len(split.tied),
        ranks=PipelineRanks(pipeline.get_group(), get_device(device_mesh), frozenset(elsewhere)),
        control=get_pipeline_control(device_mesh),
    )


def _get_group(device_mesh: DeviceMesh, pipeline: DeviceMesh, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of those pipeline ranks that hold a copy. On a rank that holds none, return that of all others.

    The second group is never used. It exists because all ranks must create equally many groups; see
    :func:`~lightning_fsdp2.mesh.get_extra_group`.
    """
    if len(ranks) == pipeline.size():
        return pipeline.get_group()
    holds_copy = pipeline.get_local_rank() in ranks
    members = [member for rank, member in enumerate(pipeline.mesh.tolist()) if (rank in ranks) == holds_copy]
    return get_extra_group(device_mesh, f"copies of pipeline ranks {ranks}", members)


def _to_local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
