"""Passes over a model, one per file: each is a function of (model, mesh, settings) and knows nothing of Lightning."""
