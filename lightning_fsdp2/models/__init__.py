"""LightningModules, so that YAML alone trains a model, and what builds them from checkpoints."""

from lightning_fsdp2.models.causal_lm import CausalLM
from lightning_fsdp2.models.from_checkpoint import load_from_checkpoint

__all__ = ["CausalLM", "load_from_checkpoint"]
