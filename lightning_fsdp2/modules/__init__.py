"""Foundation of every pass: the structure of a model, and methods wrapped in place."""
