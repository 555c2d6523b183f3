"""Reading and writing of checkpoints, as directories that all ranks share or as single files."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
