"""Registration of types with jsonargparse, so that LightningCLI can read this package's configs."""

import torch

from lightning_fsdp2.config import dtype_from_str

__all__ = ["register_cli_types"]


def register_cli_types() -> None:
    """Let jsonargparse read a ``torch.dtype`` from a name such as ``bf16``, and write it as ``bfloat16``.

    It is safe to call this more than once. Without jsonargparse, nothing happens.
    """
    try:
        from jsonargparse.typing import register_type
    except ImportError:
        return
    register_type(torch.dtype, serializer=_dtype_to_str, deserializer=dtype_from_str)


def _dtype_to_str(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
