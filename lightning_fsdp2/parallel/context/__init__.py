"""Context parallelism, which splits each sequence over ranks; ``apply.py`` is the entry point."""
