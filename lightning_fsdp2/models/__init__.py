"""LightningModules, so that YAML alone trains a model, and Hugging Face models for anybody's own."""

from lightning_fsdp2.models.causal_lm import CausalLM
from lightning_fsdp2.models.hugging_face import from_pretrained

__all__ = ["CausalLM", "from_pretrained"]
