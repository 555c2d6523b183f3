"""Changes to a model's layers and forwards: activation checkpointing, compilation, autocast, and packed sequences."""
