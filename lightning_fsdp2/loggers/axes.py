"""Names of metrics that can serve as x-axes instead of the step. They are added to every row of metrics."""

TOTAL_TOKENS = "train/total_tokens"
"""Name of the metric that counts all tokens read by a run, including padding and tokens read before it was resumed."""
