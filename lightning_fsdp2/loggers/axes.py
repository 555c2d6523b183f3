"""Names of metrics that can serve as x-axes besides the step. Every logger gets them in each row."""

TOTAL_TOKENS = "train/total_tokens"
"""Name of the metric that counts all tokens read by a run, including padding and tokens read before it was resumed."""
