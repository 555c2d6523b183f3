"""Files of a checkpoint on disk: drafts that are published whole, checksummed chunks, their readers and writers."""
