"""Names that ``lightning_fsdp2.checkpoint`` imports when they are first used."""

from .convert import consolidate_checkpoint
from .plain_loop import load_checkpoint, save_checkpoint
from .verify import verify_checkpoint

__all__ = ["consolidate_checkpoint", "load_checkpoint", "save_checkpoint", "verify_checkpoint"]
