"""Types that jsonargparse, and so LightningCLI, must know to read our configs from YAML and the command line."""

import torch

from lightning_fsdp2.config import dtype_from_str

__all__ = ["register_cli_types"]


def register_cli_types() -> None:
    """Teach jsonargparse to read a ``torch.dtype`` from ``bf16`` and to write it as ``bfloat16``.

    Can be called again, and does nothing if jsonargparse is not installed.
    """
    try:
        from jsonargparse.typing import register_type
    except ImportError:
        return
    register_type(torch.dtype, serializer=_dtype_to_str, deserializer=dtype_from_str)


def _dtype_to_str(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
