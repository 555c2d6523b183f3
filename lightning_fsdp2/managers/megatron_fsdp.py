"""Megatron-FSDP for any torch loop: ``MegatronFSDPManager(config, device_mesh).parallelize(model, optimizer)``."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_fsdp2.config import MegatronFSDPConfig
from lightning_fsdp2.managers.first_batch import check_first_batch_on_mesh
from lightning_fsdp2.recipes.megatron_fsdp import parallelize_with_megatron_fsdp


class MegatronFSDPManager:
    """Manager that shards models on an existing mesh, with the flags of a :class:`~lightning_fsdp2.MegatronFSDPConfig`.

    Args:
        config: Flags of Megatron-FSDP.
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh`.

    Example::

        mesh = create_device_mesh(config)
        model, optimizer = MegatronFSDPManager(config, mesh).parallelize(model, optimizer)
    """

    def __init__(self, config: MegatronFSDPConfig, device_mesh: DeviceMesh) -> None:
        self.config = config
        self.device_mesh = device_mesh

    def parallelize(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, checks_batches: bool = True
    ) -> tuple[Any, Optimizer | None]:
        """Wrap ``model`` in Megatron-FSDP, and change ``optimizer`` so that it updates the sharded parameters.

        Args:
            model: See :func:`~lightning_fsdp2.recipes.megatron_fsdp.parallelize_with_megatron_fsdp`.
            optimizer: See :func:`~lightning_fsdp2.recipes.megatron_fsdp.parallelize_with_megatron_fsdp`.
            checks_batches: See :meth:`lightning_fsdp2.FSDP2Manager.parallelize`.

        Raises:
            ImportError: When ``megatron-fsdp`` is not installed, or is too old.
            ValueError: See :func:`~lightning_fsdp2.recipes.megatron_fsdp.parallelize_with_megatron_fsdp`.
        """
        sharded = parallelize_with_megatron_fsdp(model, self.device_mesh, self.config, optimizer)
        if checks_batches:
            check_first_batch_on_mesh(model, self.device_mesh)
        return sharded
