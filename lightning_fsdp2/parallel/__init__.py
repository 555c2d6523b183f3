"""Passes over a model, one per file. A pass is a function of (model, mesh, settings) and knows nothing of Lightning."""
