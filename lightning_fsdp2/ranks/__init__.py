"""Work that ranks do together: collectives, shared errors, random states, and gathering shards into whole tensors."""
