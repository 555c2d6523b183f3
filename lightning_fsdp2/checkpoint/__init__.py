"""Reading and writing of checkpoints, as directories that all ranks share or as single files."""

from lightning_fsdp2.checkpoint.convert import consolidate_checkpoint
from lightning_fsdp2.checkpoint.plain_loop import load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint.verify import verify_checkpoint

__all__ = ["consolidate_checkpoint", "load_checkpoint", "save_checkpoint", "verify_checkpoint"]
