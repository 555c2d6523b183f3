"""Export of checkpoints and sharded modules in Hugging Face's format."""

from lightning_fsdp2.export.hugging_face import export_hf

__all__ = ["export_hf"]
