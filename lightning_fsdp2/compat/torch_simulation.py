"""Private torch names that stand in for ranks and values which are not there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param

FakeTensorMode: Any = fake_tensor.FakeTensorMode
"""Makes tensors of shapes and dtypes without values; torch documents it, and exports it by no public name."""

FakeTensor: type[Tensor] = fake_tensor.FakeTensor
"""The class of those tensors."""

DATA_DEPENDENT_ERRORS: Any = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
"""What an operation on fake tensors raises whose result, or its shape, depends on values."""

with_values: Any = fake_tensor.unset_fake_temporarily
"""Makes the tensors of a block real ones where a plan's are fake, to compute what does not depend on the run."""


@contextmanager
def simulate_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one of ``world_size`` ranks whose collectives do nothing, to see how tensors would be sharded over them.

    Torch's own tests do so (2.11 to 2.15); nothing public stands in for a process group.

    Raises:
        RuntimeError: When this process belongs to a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("This process belongs to a process group already; simulate others in a process of its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_group(ranks: Sequence[int], **options: Any) -> Any:
        return make_group(ranks=ranks, **options) if rank in ranks else None

    make_group = dist.new_group
    with ExitStack() as patches:
        patches.callback(dist.destroy_process_group)
        # what no rank sends would be read from memory as it comes; this rank's own objects stand for those of others
        patches.enter_context(_replaced(dist, "broadcast_object_list", lambda *args, **kwargs: None))
        # torch makes the groups of all ranks, and FSDP2 the shards of all: more work than all the rest on thousands
        patches.enter_context(_replaced(device_mesh, "new_group", new_group))
        patches.enter_context(_replaced(_fsdp_param, "_chunk_with_empty", _Chunks))
        yield


class _Chunks:
    """What ``torch.chunk`` makes of a tensor, each when it is asked for; empty ones where it makes fewer."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._size
        size = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, size) if size > 0 else self._tensor.new_empty(0)


@contextmanager
def observe_resizes(observe: Callable[[torch.UntypedStorage], Any]) -> Iterator[None]:
    """Call ``observe`` behind each resize of a storage, which is how FSDP2 frees and allocates what it has gathered.

    No operation is dispatched there; torch's own trackers of memory (2.11 to 2.15) replace the method, too.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_observe(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        observe(storage)

    with _replaced(torch.UntypedStorage, "resize_", resize_and_observe):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def get_process_group(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """The group among the arguments of a collective operation, which the dispatcher hands on boxed or by its name."""
    names = [argument for argument in arguments if isinstance(argument, str)]
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and argument._type().qualified_name().endswith(".ProcessGroup"):
            return dist.ProcessGroup.unbox(argument)
    return cast(Any, dist.distributed_c10d)._resolve_process_group(names[-1])
