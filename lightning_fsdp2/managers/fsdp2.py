"""FSDP2 for any torch loop: ``FSDP2Manager(config, device_mesh).parallelize(model)``."""

import logging

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.managers.first_batch import check_first_batch_on_mesh
from lightning_fsdp2.mesh import get_axis_sizes, get_optional_mesh
from lightning_fsdp2.mesh_axes import get_expert_meshes
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.compile import apply_compile, is_compiled
from lightning_fsdp2.recipes.fsdp2 import get_optional_fusion, parallelize_with_fsdp2, resolve_mp_policy
from lightning_fsdp2.sizes import TENSOR_PARALLEL

logger = logging.getLogger(__name__)


class FSDP2Manager:
    """Manager that shards models on an existing mesh, with the flags of an :class:`~lightning_fsdp2.FSDP2Config`.

    Args:
        config: Flags of FSDP2.
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh`, or any mesh that
            :func:`~lightning_fsdp2.parallelizer.fsdp2_strategy_parallelize` accepts.
        moe_mesh: Mesh of the experts, if it is not part of ``device_mesh``; see
            :func:`~lightning_fsdp2.mesh_axes.get_expert_meshes`. None uses the experts' mesh that
            :func:`~lightning_fsdp2.create_device_mesh` has built for its ``ep_size``.

    Raises:
        ValueError: When ``moe_mesh`` does not fit ``device_mesh``.

    Attributes:
        mp_policy: Mixed-precision policy in effect: that of the config, or by default bfloat16 computation with float32
            reduction and output.

    Example::

        mesh = create_device_mesh(config, dp_replicate_size=2)
        model = FSDP2Manager(config, mesh).parallelize(model)
    """

    def __init__(self, config: FSDP2Config, device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None = None) -> None:
        if moe_mesh is not None:
            # called only because it raises an error if the two meshes are incompatible
            get_expert_meshes(device_mesh, moe_mesh)
        self.moe_mesh = moe_mesh
        self.config = config
        self.device_mesh = device_mesh
        self.mp_policy = resolve_mp_policy(config.mp_policy)

    def parallelize(self, model: nn.Module, *, materializes: bool = True, checks_batches: bool = True) -> nn.Module:
        """Shard ``model`` in place and return it; see :func:`~lightning_fsdp2.recipes.fsdp2.parallelize_with_fsdp2`.

        Args:
            model: See :func:`~lightning_fsdp2.recipes.fsdp2.parallelize_with_fsdp2`.
            materializes: See :func:`~lightning_fsdp2.recipes.fsdp2.parallelize_with_fsdp2`.
            checks_batches: Whether the first training forward raises a ValueError if the ranks of a model replica,
                which share layers or sequences, get different batches.

        Raises:
            ValueError: When the model cannot be sharded with the flags of the config, or is sharded already.
        """
        parallelize_with_fsdp2(model, self.device_mesh, self.config, moe_mesh=self.moe_mesh, materializes=materializes)
        if dist.get_rank() == 0:
            logger.info("%s: %s", type(self).__name__, self.describe())
        if checks_batches:
            check_first_batch_on_mesh(model, self.device_mesh)
        return model

    def describe(self) -> str:
        """Name the sizes of the mesh, and the dtypes in which models compute."""
        sizes = " x ".join(f"{name} {size}" for name, size in get_axis_sizes(self.device_mesh).items())
        return f"mesh {sizes}, {self.mp_policy}"

    def maybe_compile(self, model: nn.Module) -> None:
        """Compile the layers of a sharded model that is not compiled yet, if the config has ``enable_compile``.

        :meth:`parallelize` already compiles the models that it shards. This method does nothing to a compiled model.

        Raises:
            ValueError: When the model has no layers, or asynchronous tensor parallelism is not possible.
        """
        if not self.config.enable_compile:
            return
        structure = find_structure(model)
        if is_compiled(structure):
            return
        tp_mesh = get_optional_mesh(self.device_mesh, TENSOR_PARALLEL)
        fusion = get_optional_fusion(tp_mesh, self.config)
        apply_compile(structure, tensor_parallel=tp_mesh is not None, fusion=fusion)
