"""Tensor and sequence parallelism; ``apply.py`` is the entry point."""
