"""What every pass stands on: the structure of a model, and methods wrapped in place."""
