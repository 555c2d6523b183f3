"""What one GPU can tell: whether what runs on CPUs is right there (``check``), and how fast it is (``speed``)."""
