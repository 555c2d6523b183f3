"""Command line of the package: LightningCLI for any model and data module, and commands for checkpoints.

::

    lightning-fsdp2 fit --config run.yaml --trainer.max_steps 100
    lightning-fsdp2 fit --trainer.strategy.help lightning_fsdp2.FSDP2Strategy --trainer.strategy.config.help
    torchrun --nproc-per-node 8 -m lightning_fsdp2 fit --config run.yaml
    lightning-fsdp2 describe --config run.yaml --world_size 512
    lightning-fsdp2 verify checkpoints/last.ckpt
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
