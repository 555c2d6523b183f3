"""Devices, their rates, and what a recorded step costs on them."""
