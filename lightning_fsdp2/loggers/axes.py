"""Names of the axes, besides the step, that the rows of every logger have."""

TOTAL_TOKENS = "train/total_tokens"
"""Name of the metric that counts all tokens read by a run, including padding and tokens read before it was resumed."""
