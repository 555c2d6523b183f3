"""Formats of checkpoints: a directory to which each rank adds its shards, and a single file with whole tensors."""
