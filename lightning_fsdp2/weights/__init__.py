"""Values of shards: initialised, or read from pretrained files and adapters."""
