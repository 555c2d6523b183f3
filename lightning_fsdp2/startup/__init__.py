"""What the import of the package does: names for Lightning, types for the command line, old paths, a version check."""
