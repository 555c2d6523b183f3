"""Passes that work layer by layer: activation checkpointing, compilation, autocast, and packed sequences."""
