"""Data parallelism: division of a model into FSDP2 units, ``fully_shard``, gradients and DDP."""
