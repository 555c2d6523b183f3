"""Export of models in Hugging Face's format, from checkpoints or sharded modules."""

from lightning_fsdp2.export.hugging_face import export_hf

__all__ = ["export_hf"]
