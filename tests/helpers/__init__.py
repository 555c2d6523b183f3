"""Shared test machinery: a runner that forks ranks, and the one-process oracle."""
