"""Megatron-FSDP: its wrapper, and the driver that takes the wrapper through a step."""
