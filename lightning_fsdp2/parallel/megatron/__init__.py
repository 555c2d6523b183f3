"""Megatron-FSDP: its wrapper, and the driver that leads the wrapper through a step."""
