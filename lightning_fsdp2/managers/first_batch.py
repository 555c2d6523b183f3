"""Check of the first batch of a plain torch loop."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.mesh import get_optional_mesh
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.ranks.same_batches import check_first_batch
from lightning_fsdp2.sizes import CONTEXT_PARALLEL, TENSOR_PARALLEL


def check_first_batch_on_mesh(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Check the first training batch of a sharded model, if the ranks of ``device_mesh`` share layers or sequences.

    The arguments of the Hugging Face models in ``model`` are compared, or those of ``model`` if there are none: a
    module around a model may get only this rank's part of a sequence, such as its labels.
    """
    axes = [get_optional_mesh(device_mesh, name) for name in (CONTEXT_PARALLEL, TENSOR_PARALLEL)]
    groups = [axis.get_group() for axis in axes if axis is not None]
    if groups:
        for module in [parts.module for parts in find_structure(model).models] or [model]:
            check_first_batch(module, groups)
