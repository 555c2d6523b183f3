"""Benchmarks for one GPU: ``check`` tests that everything is correct there, and ``speed`` measures how fast it is."""
