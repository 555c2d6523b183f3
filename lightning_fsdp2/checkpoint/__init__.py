"""Checkpoints of sharded models: directories in the format of ``torch.distributed.checkpoint`` (DCP)."""

from lightning_fsdp2.checkpoint.distributed import load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint.hugging_face import export_hf

__all__ = ["export_hf", "load_checkpoint", "save_checkpoint"]
