"""Devices, their rates, and the time that a recorded step takes on them."""
