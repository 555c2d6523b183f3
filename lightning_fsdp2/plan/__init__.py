"""Memory, traffic and time of a run on any number of devices, computed on one without any."""
