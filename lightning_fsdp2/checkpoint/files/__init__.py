"""Files of a checkpoint on disk: drafts that are published whole, checksummed chunks, and their readers and writers."""
