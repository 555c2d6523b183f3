"""Simulation and recording of a training step on a rank that does not exist."""
