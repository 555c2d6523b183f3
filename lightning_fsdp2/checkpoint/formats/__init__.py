"""The two formats of checkpoints: a directory with shards from all ranks, and a single file with whole tensors."""
