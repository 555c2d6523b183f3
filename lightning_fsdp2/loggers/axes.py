"""Names of metrics that plots can use as the x-axis instead of the step. They are logged with all other metrics."""

TOTAL_TOKENS = "train/total_tokens"
"""Name of the metric that counts all tokens read by a run, including padding and tokens read before it was resumed."""
