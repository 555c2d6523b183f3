"""Estimates of the time that a recorded step takes on given devices, from the devices' rates."""
