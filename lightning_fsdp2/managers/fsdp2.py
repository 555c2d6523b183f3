"""FSDP2 for any torch loop: ``FSDP2Manager(config, device_mesh).parallelize(model)``."""

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.mesh import get_optional_tp_mesh
from lightning_fsdp2.parallel.async_tensor_parallel import build_collective_fusion
from lightning_fsdp2.parallel.compile import apply_compile, is_compiled
from lightning_fsdp2.parallelizer import fsdp2_strategy_parallelize, resolve_mp_policy

_NOT_YET = ("context_parallel_method",)
_DEFAULTS = FSDP2Config().to_dict()


class FSDP2Manager:
    """Parallelises models as an :class:`~lightning_fsdp2.FSDP2Config` says, on a mesh made elsewhere.

    Args:
        config: The flags.
        device_mesh: From :func:`~lightning_fsdp2.create_device_mesh`, or any mesh that
            :func:`~lightning_fsdp2.parallelizer.fsdp2_strategy_parallelize` accepts.
        moe_mesh: Expert parallelism is not part of this release; anything but None is refused.

    Raises:
        ValueError: When a flag is set that this version does not support yet.

    Attributes:
        mp_policy: The policy in effect: the config's, or bfloat16 compute with float32 reduction and output.

    Example::

        mesh = create_device_mesh(config, dp_replicate_size=2)
        model = FSDP2Manager(config, mesh).parallelize(model)
    """

    def __init__(self, config: FSDP2Config, device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None = None) -> None:
        if moe_mesh is not None:
            raise ValueError("moe_mesh: expert parallelism is not supported in this release; pass None.")
        check_supported(config)
        self.config = config
        self.device_mesh = device_mesh
        self.mp_policy = resolve_mp_policy(config.mp_policy)

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` in place and return it; see :func:`fsdp2_strategy_parallelize` for what it may be.

        Raises:
            ValueError: When the model cannot be sharded so, or is sharded already.
        """
        config = self.config
        return fsdp2_strategy_parallelize(
            model,
            self.device_mesh,
            mp_policy=self.mp_policy,
            sequence_parallel=config.sequence_parallel,
            tp_shard_plan=config.tp_plan,
            activation_checkpointing=config.activation_checkpointing,
            activation_checkpointing_scope=config.activation_checkpointing_scope,
            autocast_dtype=config.autocast_dtype,
            enable_async_tensor_parallel=config.enable_async_tensor_parallel,
            enable_compile=config.enable_compile,
            loss_parallel=config.loss_parallel,
            patch_is_packed_sequence=config.patch_is_packed_sequence,
            offload_policy=cast(OffloadPolicy | None, config.offload_policy),  # a bool became a policy in __post_init__
            reshard_after_forward=config.reshard_after_forward,
            enable_fsdp2_prefetch=config.enable_fsdp2_prefetch,
            fsdp2_backward_prefetch_depth=config.fsdp2_backward_prefetch_depth,
            fsdp2_forward_prefetch_depth=config.fsdp2_forward_prefetch_depth,
        )

    def maybe_compile(self, model: nn.Module) -> None:
        """Compile the layers of a model that was sharded without it, if the config asks for compilation.

        :meth:`parallelize` has done it already for what it returned; a compiled model is left as it is.

        Raises:
            ValueError: When there are no layers, or asynchronous tensor parallelism is not possible.
        """
        config = self.config
        if not config.enable_compile or is_compiled(model):
            return
        tp_mesh = get_optional_tp_mesh(self.device_mesh)
        fusion = (
            build_collective_fusion(tp_mesh, sequence_parallel=config.sequence_parallel, enable_compile=True)
            if config.enable_async_tensor_parallel
            else None
        )
        apply_compile(model, tensor_parallel=tp_mesh is not None, fusion=fusion)


def check_supported(config: FSDP2Config) -> None:
    """Refuse flags that this version does not support yet.

    Raises:
        ValueError: The message names the flag.
    """
    for name in _NOT_YET:
        value = getattr(config, name)
        if value != _DEFAULTS[name]:
            raise ValueError(f"FSDP2Config.{name}={value!r} is not supported in this version yet; leave it out.")
