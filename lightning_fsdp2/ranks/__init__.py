"""Work that ranks do together: collectives, errors raised everywhere, random states, whole tensors out of shards."""
