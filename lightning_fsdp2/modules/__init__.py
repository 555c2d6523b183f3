"""Tools that every pass uses: the structure of a model, and methods that are wrapped in place."""
