"""Megatron-FSDP: its wrapper, and what drives it through a step."""
