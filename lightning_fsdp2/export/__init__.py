"""Hugging Face files from checkpoints and sharded modules."""

from lightning_fsdp2.export.hugging_face import export_hf

__all__ = ["export_hf"]
