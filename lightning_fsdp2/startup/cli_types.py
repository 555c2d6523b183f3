"""Registration of types with jsonargparse, so that LightningCLI can read this package's configs."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register_cli_types"]


def register_cli_types(dtype_from_str: Callable[[Any], torch.dtype]) -> None:
    """Let jsonargparse read a ``torch.dtype`` from a name such as ``bf16``, and write it as ``bfloat16``.

    It is safe to call this more than once. Without jsonargparse, nothing happens.

    Args:
        dtype_from_str: Function that returns the dtype with a name.
    """
    try:
        from jsonargparse.typing import register_type
    except ImportError:
        return
    register_type(torch.dtype, serializer=_dtype_to_str, deserializer=dtype_from_str)


def _dtype_to_str(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
