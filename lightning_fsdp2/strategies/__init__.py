"""Lightning strategies. Each one implements the Trainer's hooks, and parallelises the module with a manager.

Managers such as :class:`~lightning_fsdp2.FSDP2Manager` also work without Lightning.
"""

from lightning_fsdp2.strategies.ddp import DDPStrategy
from lightning_fsdp2.strategies.fsdp2 import FSDP2Strategy
from lightning_fsdp2.strategies.megatron_fsdp import MegatronFSDPStrategy

__all__ = ["DDPStrategy", "FSDP2Strategy", "MegatronFSDPStrategy"]
