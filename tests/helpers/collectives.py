"""Count what a step sends and how often it waits for the device: numbers that do not depend on the machine."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVE_KINDS = {
    # c10d: what torch.distributed and FSDP2 call, under whichever Python name of their torch version
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    # _c10d_functional: what DTensor calls
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
_NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class StepCounter(TorchDispatchMode):
    """Counts, inside its ``with`` block and on this thread, collectives by kind, all operations, and host syncs.

    It reads the dispatcher, so that it sees the same under every Python name a collective has had (torch 2.11 to 2.15).

    Attributes:
        collectives: Calls by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ...
        elements: Elements of the largest tensor of each call, by kind, in order: which unit it was.
        operations: Everything that was dispatched, but for the profiler's marks.
        host_syncs: Reads of a device value by the host: ``item()``, ``bool(tensor)``, ``nonzero``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.elements: dict[str, list[int]] = {}
        self.operations: Counter[str] = Counter()

    @property
    def host_syncs(self) -> int:
        return sum(self.operations[name] for name in ("aten::_local_scalar_dense", "aten::nonzero"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace != "profiler":
            self.operations[f"{namespace}::{name}"] += 1
        if namespace in ("c10d", "_c10d_functional") and name not in _NOT_COLLECTIVES:
            kind = COLLECTIVE_KINDS.get(name, name)
            self.collectives[kind] += 1
            self.elements.setdefault(kind, []).append(max((t.numel() for t in _tensors_in(args)), default=0))
        return func(*args, **(kwargs or {}))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []


class CountsStep(pl.Callback):
    """Counts what one step does, from its batch to the next; the last of the callbacks."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.counter = StepCounter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            self.counter.__enter__()
        elif batch_idx == self.step + 1:
            self.counter.__exit__(None, None, None)
