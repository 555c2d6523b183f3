"""Losses for sharded logits, and for batches with different numbers of labels."""

from lightning_fsdp2.parallel.loss.cross_entropy import causal_lm_loss, token_cross_entropy
from lightning_fsdp2.parallel.loss.token_mean import apply_token_mean_, token_mean_loss

__all__ = ["apply_token_mean_", "causal_lm_loss", "token_cross_entropy", "token_mean_loss"]
