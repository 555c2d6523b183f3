"""Sharding over data parallel ranks: units, ``fully_shard``, gradients, DDP."""
