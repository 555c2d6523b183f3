"""Sharding, compilation and other changes to a model, and losses of sharded models. Nothing here imports Lightning."""
