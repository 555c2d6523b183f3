"""One step of a rank that does not exist, recorded."""
