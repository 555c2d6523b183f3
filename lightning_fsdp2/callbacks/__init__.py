"""Lightning callbacks; they work under any strategy."""

from lightning_fsdp2.callbacks.run_report import RunReport

__all__ = ["RunReport"]
