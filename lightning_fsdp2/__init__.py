"""FSDP2 for PyTorch Lightning's Trainer and Hugging Face models, with the same gradients as a single-process run.

The public names are listed in ``__init__.pyi``. Each is imported when it is first used, so that commands that do not
need torch start without it.
"""

from lazy_loader import attach_stub

from lightning_fsdp2.startup.moved import keep_moved_paths
from lightning_fsdp2.startup.registry import register_with_lightning
from lightning_fsdp2.startup.versions import warn_of_newer_transformers

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

keep_moved_paths()
register_with_lightning()
warn_of_newer_transformers()
