"""Lets megatron-fsdp run on CPU ranks: stands in for the streams and events of CUDA, which there need not be.

For tests alone. The package calls functions of ``torch.cuda`` around its collectives; those are replaced by ones that
do nothing, since everything here happens in order anyway. Races between streams are not seen this way.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp2.parallel.megatron import wrap as megatron_fsdp


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


def _reduce_as_gloo_can(data: Tensor, factor: float | None, ddp_config: Any) -> Any:
    """What megatron-fsdp does for dtypes that NCCL cannot scale while it sums, as gloo never can."""
    if factor is not None:
        data.mul_(factor)
    return dist.ReduceOp.SUM


def _wait_for_each(group: dist.ProcessGroup, device: Any = None, async_ops: bool = False) -> Any:
    """The streams keep later work behind a collective; without them somebody must wait for it."""
    return dist._coalescing_manager(group, device)


def _get_tensor_on_cpu(self: Any, shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Any = None) -> Tensor:
    """What the buffers of ``fsdp_double_buffer`` do, without the number of a CUDA device."""
    size = torch.Size(shape).numel()
    if (name, dtype) not in self.buffer or self.buffer[name, dtype].numel() < size:
        self.buffer[name, dtype] = torch.empty(size, dtype=dtype)
    return self.buffer[name, dtype][:size].view(*shape)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Replace what megatron-fsdp calls, in this process, until the end of the block."""
    current = _Stream()
    fakes = {
        "current_device": lambda: 0,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda *args: current,
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "set_device": lambda *args: None,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **fakes))
        stack.enter_context(patch.object(Tensor, "cuda", lambda self, *args, **kwargs: self))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda self, stream: None))
        stack.enter_context(patch.object(megatron_fsdp, "DEVICE_TYPES", ("cpu",)))
        from megatron_fsdp import param_and_grad_buffer
        from megatron_fsdp.utils import GlobalMemoryBuffer

        stack.enter_context(patch.object(param_and_grad_buffer, "gradient_reduce_preprocessing", _reduce_as_gloo_can))
        stack.enter_context(patch.object(param_and_grad_buffer, "_coalescing_manager", _wait_for_each))
        stack.enter_context(patch.object(GlobalMemoryBuffer, "get_tensor", _get_tensor_on_cpu))
        yield
