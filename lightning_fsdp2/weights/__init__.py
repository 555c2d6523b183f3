"""Values for sharded parameters: initialisation, and loading from pretrained files and adapters."""
