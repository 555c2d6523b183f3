"""Context parallelism; ``apply.py`` is the entry point."""
