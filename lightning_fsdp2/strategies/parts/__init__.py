"""Parts of a strategy: what surrounds steps, loaders, loggers and callbacks of a run."""
