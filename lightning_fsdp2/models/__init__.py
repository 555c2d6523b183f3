"""LightningModule for causal language models, and functions that load models from Hugging Face and from checkpoints."""

from lightning_fsdp2.models.causal_lm import CausalLM
from lightning_fsdp2.models.from_checkpoint import load_from_checkpoint
from lightning_fsdp2.models.hugging_face import from_pretrained

__all__ = ["CausalLM", "from_pretrained", "load_from_checkpoint"]
