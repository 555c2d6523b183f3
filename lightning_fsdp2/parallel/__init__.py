"""One pass per file: a function of (model, mesh, settings) that knows nothing of Lightning."""
