"""Names that ``lightning_fsdp2.cli`` imports when they are first used."""

from .app import FSDP2CLI
from .main import main

__all__ = ["FSDP2CLI", "main"]
