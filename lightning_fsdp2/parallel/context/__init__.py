"""Context parallelism; ``apply.py`` is the way in."""
