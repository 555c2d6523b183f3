"""Losses over sharded logits and uneven batches."""
