"""Checkpoints: directories that all ranks write and read on any mesh, single files, and Hugging Face's format."""

from lightning_fsdp2.checkpoint.convert import consolidate_checkpoint
from lightning_fsdp2.checkpoint.hugging_face import export_hf
from lightning_fsdp2.checkpoint.plain_loop import load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint.verify import verify_checkpoint

__all__ = ["consolidate_checkpoint", "export_hf", "load_checkpoint", "save_checkpoint", "verify_checkpoint"]
