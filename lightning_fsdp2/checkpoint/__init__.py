"""Checkpoints of sharded models: directories in the format of ``torch.distributed.checkpoint`` (DCP)."""

from lightning_fsdp2.checkpoint.distributed import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
