"""Tools for code that parallelises a model: search for the model's parts, and replacement of methods in place."""
