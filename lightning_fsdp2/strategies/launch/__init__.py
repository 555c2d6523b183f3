"""Code that starts and stops the processes of a run, sets up their process groups, and compares their configs."""
