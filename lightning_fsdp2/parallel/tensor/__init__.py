"""Tensor and sequence parallelism, which split layers over ranks; ``apply.py`` is the entry point."""
