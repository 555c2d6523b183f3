"""Megatron-FSDP: wrapping of a model, and a driver that calls the wrapper during a training step."""
