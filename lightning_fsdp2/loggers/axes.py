"""Axes that the rows of every logger have beside their step."""

TOTAL_TOKENS = "train/total_tokens"
"""All tokens that a run has read, padding included, also before it was resumed."""
