"""Peak memory of this process since a moment that a test chooses."""

from pathlib import Path


def get_peak_memory() -> int:
    """Return the largest resident size of this process since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def reset_peak_memory() -> int:
    """Reset the largest resident size to the present one, and return it, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return get_peak_memory()
