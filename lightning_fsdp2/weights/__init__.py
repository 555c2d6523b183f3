"""How shards get their values: from nothing, from pretrained files, from adapters."""
