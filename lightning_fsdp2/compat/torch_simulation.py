"""Access to private parts of torch that simulate many ranks in one process, or tensors without values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator

FakeTensorMode: Any = fake_tensor.FakeTensorMode
"""Mode in which tensors are fake: they have shapes and dtypes but no values. torch documents this private name."""

FakeTensor: type[Tensor] = fake_tensor.FakeTensor
"""Class of fake tensors."""

DATA_DEPENDENT_ERRORS: Any = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
"""Errors that operations on fake tensors raise if the result, or its shape, depends on values."""

with_values: Any = fake_tensor.unset_fake_temporarily
"""Context manager that temporarily disables the mode of fake tensors, to compute with real values."""


@contextmanager
def simulate_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Let this process act as one of ``world_size`` ranks inside the block, to see how tensors would be sharded.

    The rank joins a fake process group, whose collectives do nothing. torch's own tests (2.11 to 2.15) use such groups
    too. torch has no public equivalent.

    Raises:
        RuntimeError: If this process already belongs to a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("This process already belongs to a process group; run the simulation in a separate process.")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_group(ranks: Sequence[int], timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        # leave out the backend: a real one, which a group may ask for, would wait for other ranks
        return make_group(ranks, timeout, **options) if rank in ranks else None

    make_group = dist.new_group
    with ExitStack() as patches:
        patches.callback(dist.destroy_process_group)
        # Replace this function with one that does nothing. The original would read uninitialised memory, because the
        # fake process group does not broadcast any data.
        patches.enter_context(_replaced(dist, "broadcast_object_list", lambda *args, **kwargs: None))
        # make only this rank's groups and shards: making them for thousands of ranks would take too long
        patches.enter_context(_replaced(device_mesh, "new_group", new_group))
        patches.enter_context(_replaced(dist, "new_group", new_group))
        patches.enter_context(_replaced(_fsdp_param, "_chunk_with_empty", _Chunks))
        yield


class _Chunks:
    """Sequence of the chunks that ``torch.chunk`` would return. Each chunk is made only when it is read.

    If ``torch.chunk`` would return fewer chunks than requested, the missing chunks are empty.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._size
        size = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, size) if size > 0 else self._tensor.new_empty(0)


@contextmanager
def observe_resizes(observe: Callable[[torch.UntypedStorage], Any]) -> Iterator[None]:
    """Call ``observe`` after each resize of a storage inside the block.

    FSDP2 allocates and frees gathered weights by resizing their storages. A dispatch mode does not see these resizes,
    so ``UntypedStorage.resize_`` is replaced. torch's own memory trackers (2.11 to 2.15) replace this method too.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_observe(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        observe(storage)

    with _replaced(torch.UntypedStorage, "resize_", resize_and_observe):
        yield


@contextmanager
def surround_shape_propagation(get_block: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter the context that ``get_block`` returns around each operation that DTensor runs only for a result's shape.

    DTensor runs these operations on fake tensors with the shapes of whole tensors, which no rank ever allocates. A
    dispatch mode sees them (torch 2.11 and 2.13), and torch does not say which operations they are.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_in_block(*args: Any, **kwargs: Any) -> Any:
        with get_block():
            return propagate(*args, **kwargs)

    with _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_in_block):
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
    """Return the process group of a collective, given the arguments of the collective.

    The arguments contain either the group, wrapped in a ``torch.ScriptObject``, or its name.
    """
    names = [argument for argument in arguments if isinstance(argument, str)]
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and argument._type().qualified_name().endswith(".ProcessGroup"):
            return dist.ProcessGroup.unbox(argument)
    return cast(Any, dist.distributed_c10d)._resolve_process_group(names[-1])
