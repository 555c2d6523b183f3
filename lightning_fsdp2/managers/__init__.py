"""Managers, which parallelise models on a mesh for a plain torch loop, without Lightning."""

from lightning_fsdp2.managers.ddp import DDPManager
from lightning_fsdp2.managers.fsdp2 import FSDP2Manager
from lightning_fsdp2.managers.megatron_fsdp import MegatronFSDPManager

__all__ = ["DDPManager", "FSDP2Manager", "MegatronFSDPManager"]
