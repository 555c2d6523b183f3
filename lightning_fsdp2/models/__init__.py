"""LightningModules, so that YAML alone trains a model."""

from lightning_fsdp2.models.causal_lm import CausalLM

__all__ = ["CausalLM"]
