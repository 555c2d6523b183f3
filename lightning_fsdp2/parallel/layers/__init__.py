"""Passes that are applied layer by layer: checkpointing, compilation, autocast, packed sequences."""
