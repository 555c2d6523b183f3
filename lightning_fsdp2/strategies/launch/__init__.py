"""Start and end of a run's processes, their process groups, and checks that all processes have the same config."""
