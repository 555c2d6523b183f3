"""Axes that the rows of every logger have besides their step."""

TOTAL_TOKENS = "train/total_tokens"
"""Name of the count of all tokens that a run has read, including padding and tokens read before it was resumed."""
