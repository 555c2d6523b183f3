"""Megatron-FSDP for any torch loop: ``MegatronFSDPManager(config, device_mesh).parallelize(model, optimizer)``."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_fsdp2.config import MegatronFSDPConfig
from lightning_fsdp2.parallelizer import megatron_fsdp_strategy_parallelize


class MegatronFSDPManager:
    """Shards models as a :class:`~lightning_fsdp2.MegatronFSDPConfig` says, on a mesh made elsewhere.

    Args:
        config: The flags.
        device_mesh: From :func:`~lightning_fsdp2.create_device_mesh`.

    Example::

        mesh = create_device_mesh(config)
        model, optimizer = MegatronFSDPManager(config, mesh).parallelize(model, optimizer)
    """

    def __init__(self, config: MegatronFSDPConfig, device_mesh: DeviceMesh) -> None:
        self.config = config
        self.device_mesh = device_mesh

    def parallelize(self, model: nn.Module, optimizer: Optimizer | None = None) -> tuple[Any, Optimizer | None]:
        """Wrap ``model``, and let ``optimizer`` step its shards.

        Raises:
            ImportError: When ``megatron-fsdp`` is not installed, or too old.
            ValueError: See :func:`~lightning_fsdp2.parallelizer.megatron_fsdp_strategy_parallelize`.
        """
        config = self.config
        return megatron_fsdp_strategy_parallelize(
            model,
            self.device_mesh,
            optimizer,
            megatron_fsdp_unit_modules=config.megatron_fsdp_unit_modules,
            zero_dp_strategy=config.zero_dp_strategy,
            init_fsdp_with_meta_device=config.init_fsdp_with_meta_device,
            grad_reduce_in_fp32=config.grad_reduce_in_fp32,
            preserve_fp32_weights=config.preserve_fp32_weights,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            report_nan_in_param_grad=config.report_nan_in_param_grad,
            average_in_collective=config.average_in_collective,
            disable_bucketing=config.disable_bucketing,
            calculate_per_token_loss=config.calculate_per_token_loss,
            keep_fp8_transpose_cache=config.keep_fp8_transpose_cache,
            nccl_ub=config.nccl_ub,
            fsdp_double_buffer=config.fsdp_double_buffer,
            activation_checkpointing=config.activation_checkpointing,
            autocast_dtype=config.autocast_dtype,
        )
