"""Lightning strategies. Each strategy calls its manager, which contains the sharding code, in the Trainer's stages."""

from lightning_fsdp2.strategies.ddp import DDPStrategy
from lightning_fsdp2.strategies.fsdp2 import FSDP2Strategy
from lightning_fsdp2.strategies.megatron_fsdp import MegatronFSDPStrategy

__all__ = ["DDPStrategy", "FSDP2Strategy", "MegatronFSDPStrategy"]
