"""Files of a checkpoint on disk: drafts that become visible when complete, and chunks with checksums."""
