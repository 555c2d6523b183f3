"""Dtypes with which a manager's models are trained."""

from typing import Any

import torch
from torch import nn

from lightning_fsdp2.config import MegatronFSDPConfig
from lightning_fsdp2.managers.fsdp2 import FSDP2Manager


def get_dtypes(manager: Any, module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of stored weights, gathered weights, computation and gradient reduction in training."""
    config, weights = manager.config, next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    gathered, reduction = weights, torch.float32
    if isinstance(manager, FSDP2Manager):
        gathered = manager.mp_policy.param_dtype or weights
        reduction = manager.mp_policy.reduce_dtype or weights
    elif isinstance(config, MegatronFSDPConfig):
        reduction = torch.float32 if config.grad_reduce_in_fp32 else weights
        weights = torch.float32 if config.preserve_fp32_weights else weights
    return {
        "weights": weights,
        "gathered": gathered,
        "compute": config.autocast_dtype or gathered,
        "reduction": reduction,
    }
