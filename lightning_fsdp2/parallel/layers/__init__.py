"""Passes that treat each layer by itself: checkpointing, compilation, autocast, packed sequences."""
