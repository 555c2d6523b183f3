"""DDP for any torch loop: ``DDPManager(config, device_mesh).parallelize(model)``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp2.compat.torch import replicate
from lightning_fsdp2.config import DDPConfig
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.mesh_axes import check_no_expert_parallel, check_no_pipeline_parallel
from lightning_fsdp2.parallel.data.ddp import reduce_in_float32
from lightning_fsdp2.recipes.ddp import prepare_for_ddp
from lightning_fsdp2.sizes import DATA_PARALLEL


class DDPManager:
    """Manager that wraps models in DDP on an existing mesh, with the flags of a :class:`~lightning_fsdp2.DDPConfig`.

    Args:
        config: Flags of DDP.
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh` with data parallel ranks only, or any mesh
            with one axis.

    Raises:
        ValueError: When not all ranks of the mesh are data parallel.

    Example::

        mesh = create_device_mesh(config)
        model = DDPManager(config, mesh).parallelize(model)
    """

    def __init__(self, config: DDPConfig, device_mesh: DeviceMesh) -> None:
        check_no_expert_parallel(device_mesh, "DDP")
        check_no_pipeline_parallel(device_mesh, "DDP")
        self.config = config
        self.device_mesh = device_mesh
        self._data_mesh = device_mesh if device_mesh.ndim == 1 else get_mesh(device_mesh, DATA_PARALLEL)
        if self._data_mesh.size() < device_mesh.size():
            raise ValueError(
                f"{device_mesh} has {device_mesh.size()} ranks, but only {self._data_mesh.size()} of them are data"
                " parallel, and DDP supports only data parallelism. Create the mesh with"
                " `create_device_mesh(DDPConfig())`, or use FSDP2Manager."
            )

    def parallelize(self, model: nn.Module) -> DistributedDataParallel:
        """Give ``model`` the same weights on all ranks, and wrap it in DDP, which averages gradients in backward.

        Raises:
            ValueError: When the model is sharded.
        """
        self.prepare(model)
        return self.replicate(model, broadcast_buffers=self.config.broadcast_buffers)

    def prepare(self, model: nn.Module, *, materializes: bool = True) -> None:
        """Prepare a model as :meth:`parallelize` does, but do not wrap it in DDP, which only training needs.

        Args:
            model: See :func:`~lightning_fsdp2.recipes.ddp.prepare_for_ddp`.
            materializes: See :func:`~lightning_fsdp2.recipes.ddp.prepare_for_ddp`.

        Raises:
            ValueError: When the model is sharded.
        """
        prepare_for_ddp(model, self.device_mesh, self.config, materializes=materializes)

    def replicate(self, model: nn.Module, *, broadcast_buffers: bool) -> DistributedDataParallel:
        """Wrap a model in DDP, after :meth:`prepare`. DDP then reduces bfloat16 gradients in float32.

        Args:
            model: Model with the same weights on all ranks.
            broadcast_buffers: Whether DDP copies rank 0's buffers to all ranks before each forward.

        Raises:
            RuntimeError: When no parameter of the model requires a gradient (raised by torch).
        """
        parameters = list(model.parameters())
        device, group = parameters[0].device, self._data_mesh.get_group()
        wrapper = replicate(
            model,
            device_ids=None if device.type == "cpu" else [device.index],
            process_group=group,
            init_sync=False,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=self.config.find_unused_parameters,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            static_graph=self.config.static_graph,
            bucket_cap_mb=self.config.bucket_cap_mb,
        )
        hook = self.get_optional_hook(parameters)
        if hook is not None:
            wrapper.register_comm_hook(group, hook)
        return wrapper

    def get_optional_hook(self, parameters: Sequence[nn.Parameter]) -> Callable[..., Any] | None:
        """Return the hook with which DDP averages the gradients of ``parameters``, or None for DDP's own averaging."""
        is_bfloat16 = any(parameter.dtype is torch.bfloat16 for parameter in parameters if parameter.requires_grad)
        return reduce_in_float32 if is_bfloat16 else None
