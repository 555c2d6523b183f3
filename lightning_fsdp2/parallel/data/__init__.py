"""Data parallelism: the units of a model, ``fully_shard``, gradients and DDP."""
