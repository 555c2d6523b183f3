"""Tensor and sequence parallelism; ``apply.py`` is the way in."""
