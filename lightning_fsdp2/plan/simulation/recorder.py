"""Recorder of the allocations, collectives and computations of a training step, as torch's dispatcher sees them.

Nothing is measured: the tensors may be fake, with shapes but no values, and the ranks of the collectives need not
exist.
"""

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import TorchDispatchMode, get_schema, is_traceable_wrapper_subclass_type, tree_leaves
from lightning_fsdp2.compat.torch_simulation import get_process_group, observe_resizes, surround_shape_propagation
from lightning_fsdp2.parallel.pipeline.schedule import Action
from lightning_fsdp2.plan.simulation.flops import get_optional_flop_formula
from lightning_fsdp2.sizes import (
    CONTEXT_PARALLEL,
    CP_TP,
    DATA_PARALLEL,
    DP_CP,
    DP_REPLICATE,
    DP_SHARD,
    DP_SHARD_CP,
    EFSDP,
    EXPERT_PARALLEL,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
)

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer states"
UNSHARDED_WEIGHTS = "unsharded weights"
UNSHARDED_GRADIENTS = "unsharded gradients"
COMMUNICATION_BUFFERS = "communication buffers"
ACTIVATIONS = "activations"
LOGITS = "logits and loss"
TEMPORARIES = "temporaries"
CATEGORIES = (
    WEIGHTS,
    GRADIENTS,
    OPTIMIZER_STATES,
    UNSHARDED_WEIGHTS,
    UNSHARDED_GRADIENTS,
    COMMUNICATION_BUFFERS,
    ACTIVATIONS,
    LOGITS,
    TEMPORARIES,
)

_KINDS = {
    # operations in `c10d`, which torch.distributed and FSDP2 call
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "send": "send",
    "recv_": "receive",
    # operations in `_c10d_functional`, which DTensor calls
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_out": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "broadcast": "broadcast",
    "all_to_all_single": "all-to-all",
}
TRANSFERS = ("send", "receive")
"""Kinds of collectives that are calls of one rank of two."""

_NOT_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operations that allocate a tensor without writing to it."""

_OVERWRITES = {
    "copy_",
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "_foreach_copy_",
    "_foreach_zero_",
}
"""Operations that change their first argument without reading it."""

_LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""Operations that read as much of their first tensor as they write."""

_SCATTERS = {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"}
"""Operations that read and write as much of their first tensor as their last tensor holds."""

_COPIES_IN = "fsdp::all_gather_copy_in"
"""FSDP2's operation that copies shards into a buffer. Its schema does not declare that it writes."""

_UNCHANGED = {"grads"}
"""Arguments that fused optimizers declare as changed because of ``GradScaler``, but do not change."""


_AXES = (
    TENSOR_PARALLEL,
    CONTEXT_PARALLEL,
    EXPERT_PARALLEL,
    EFSDP,
    DP_REPLICATE,
    DP_SHARD,
    DP_SHARD_CP,
    DP_CP,
    DATA_PARALLEL,
    CP_TP,
    PIPELINE_PARALLEL,
)
_AXES_OF_UNITS = (DP_SHARD, DP_SHARD_CP, EFSDP, DP_REPLICATE)
"""Axes in the order of preference for naming a collective. Several axes can consist of the same ranks: without context
parallelism, ``dp_shard`` and ``dp_shard_cp`` have the same ranks, for example."""


@dataclass(frozen=True)
class Group:
    """Group of ranks that communicate with each other."""

    axes: tuple[str, ...]
    """Axes of the mesh's views that consist of these ranks; empty for a group outside of the mesh."""

    ranks: tuple[int, ...] = field(hash=False)  # hashing many ranks is slow, and the hash of `axes` is enough


@dataclass(frozen=True)
class Collective:
    """One call of a collective operation."""

    kind: str
    """Name: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"``, ``"broadcast"``, ``"send"``,
    ``"receive"``, or torch's own name."""

    group: Group

    is_of_unit: bool
    """Whether FSDP2 gathers the weights of a unit, or reduces its gradients, with this call."""

    bytes: int
    """Size of the whole tensor: what each rank has after an all-gather, and before a reduce-scatter."""

    @property
    def axis(self) -> str:
        """Name of the mesh axis over which the collective runs; ``"other"`` for a group outside of the mesh.

        If several axes consist of the same ranks, this is the axis that fits the collective's purpose best.
        """
        order = _AXES_OF_UNITS if self.is_of_unit else _AXES
        return next((axis for axis in order if axis in self.group.axes), "other")


@dataclass(frozen=True)
class Attention:
    """Properties of an attention call that determine the speed of a fused kernel."""

    head_size: int
    length: int
    """Number of keys."""

    query_elements: int
    is_causal: bool
    is_backward: bool


@dataclass(frozen=True)
class Operation:
    """The work of one torch operation on this rank."""

    flops: int
    bytes: int
    """Bytes that are read and written if nothing is in a cache."""

    dtype: torch.dtype | None
    """Dtype of the first tensor that the operation reads; None if it reads no tensor."""

    collective: Collective | None = None
    attention: Attention | None = None
    times: int = 1
    """Number of times that the step runs the operation."""


@dataclass(eq=False)
class Allocation:
    """Storage of one or more tensors.

    Its category is read at the end of the step, since it may not be known yet when the storage is allocated.
    """

    phase: str
    """Phase in which the storage was allocated."""

    label: str = TEMPORARIES
    is_of_vocabulary: bool = False
    size: int = 0

    @property
    def category(self) -> str:
        """Category of the storage. Temporaries and activations whose last dim has the vocabulary's size are logits."""
        return LOGITS if self.is_of_vocabulary and self.label in (TEMPORARIES, ACTIVATIONS) else self.label


class MemoryChange(NamedTuple):
    """Change of a storage's size because the storage was allocated, freed or resized."""

    moment: int
    """Number of operations that came before the change."""

    category: str
    bytes: int
    """Bytes by which the storage grew; negative if it shrank."""

    storage: int
    """Number that identifies the storage."""


@dataclass(frozen=True)
class Recording:
    """Recording of a step. A moment in the step is the number of operations that came before it."""

    operations: list[Operation]
    changes: list[MemoryChange]

    marks: list[tuple[int, str]]
    """Moments at which the parts of the step begin, with the names of the parts."""

    phases: list[tuple[int, str]]
    """Moments at which ``"forward"``, ``"backward"`` and ``"optimizer"`` begin, with these names."""

    actions: list[tuple[int, int, Action]] = field(default_factory=list)
    """Moments at which the actions of a pipeline begin and end, with these actions. Empty without a pipeline."""

    @cached_property
    def collectives(self) -> list[Collective]:
        """Collectives in the order of their calls. The collectives of identical micro-batches appear once."""
        return [operation.collective for operation in self.operations if operation.collective is not None]

    @property
    def flops(self) -> int:
        """FLOPs of all operations."""
        return sum(operation.flops * operation.times for operation in self.operations)


class StepRecorder(TorchDispatchMode):
    """Dispatch mode that records every operation, every change in the size of a storage, and each storage's category.

    FSDP2's unsharded weights, unsharded gradients and communication buffers are recognised by FSDP2's own operations on
    them. Logits, and tensors that the loss computes from logits, are recognised because the size of their last dim is
    that of the vocabulary. Activations are the step's inputs, the model's buffers, and all other tensors from forward
    that are still alive when backward begins. All remaining tensors are temporaries, including recomputed activations.
    Tensors that tensor parallelism gathers or reduces are activations or temporaries. Workspace that an operation
    allocates internally is not recorded.

    torch's own ``FSDPMemTracker`` is not used: it relies on FSDP2's hooks, records neither logits nor traffic, and
    requires that another step has run before the recorded one.

    Args:
        groups: Groups of ranks, by the names that torch gives to their process groups.
        vocabulary: Sizes of the models' vocabularies, and of the part of each that this rank holds.
    """

    def __init__(self, groups: Mapping[str, Group], vocabulary: Collection[int] = ()) -> None:
        super().__init__()
        self._groups = groups
        self._vocabulary = frozenset(vocabulary)
        self._operations: list[Operation] = []
        self._changes: list[tuple[int, Allocation, int]] = []
        self._marks: list[tuple[int, str]] = []
        self._phases: list[tuple[int, str]] = []
        self._actions: list[tuple[int, int, Action]] = []
        self._live: dict[int, Allocation] = {}
        self._kinds: dict[Any, _OperationKind] = {}
        self._blocks = ExitStack()
        self._is_paused = False
        self.times = 1
        """Number of times that the step runs the operations that are recorded next."""

    def __enter__(self) -> "StepRecorder":
        self._blocks.enter_context(observe_resizes(self._observe))
        self._blocks.enter_context(surround_shape_propagation(self._pause))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._blocks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # do not record operations on DTensors: torch repeats them on the local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = _get_tensors(result)
        if self._is_paused or (results and results[0].device.type == "meta"):
            return result  # do not record this operation: DTensor only needs the shape of its result
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _OperationKind(func))
        for tensor in results:
            allocation = self._observe(tensor.untyped_storage())
            if tensor.ndim > 1 and tensor.size(-1) in self._vocabulary:
                allocation.is_of_vocabulary = True
        if kind.is_view:
            return result
        self._operations.append(self._read(kind, args, kwargs, result))
        match kind.name:
            case "fsdp::all_gather_copy_in":
                self.label([*args[0], args[1]], COMMUNICATION_BUFFERS)
            case "fsdp::split_with_sizes_copy":
                self.label(kwargs["out"], UNSHARDED_WEIGHTS)
            case "fsdp::chunk_cat":
                self.label(args[0], UNSHARDED_GRADIENTS)
                self.label([kwargs["out"]], COMMUNICATION_BUFFERS)
        return result

    @contextmanager
    def _pause(self) -> Iterator[None]:
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    @property
    def part(self) -> str:
        """Name of the current part of the step, such as the forward of one layer."""
        return self._marks[-1][1]

    def begin(self, phase: str, part: str | None = None) -> None:
        """Begin a phase of the step, such as backward, and the first part of this phase."""
        self._phases.append((len(self._operations), phase))
        self.mark(part or phase)

    def mark(self, part: str) -> None:
        """Begin a part of the current phase, such as the forward of one layer."""
        self._marks.append((len(self._operations), part))

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of tensors. A tensor that already has a category keeps that category."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            _set_category(self._observe(local.untyped_storage()), category)

    def label_rest(self, category: str, *, phase: str) -> None:
        """Set the category of all tensors that were made in ``phase``, are still alive and have no category yet."""
        for allocation in self._live.values():
            if allocation.phase == phase:
                _set_category(allocation, category)

    @contextmanager
    def record_action(self, action: Action) -> Iterator[None]:
        """Record that the block performs an action of a pipeline."""
        begin = len(self._operations)
        yield
        self._actions.append((begin, len(self._operations), action))

    def get_recording(self) -> Recording:
        """Return the recording so far."""
        numbers: dict[Allocation, int] = {}
        changes = [
            MemoryChange(moment, allocation.category, size, numbers.setdefault(allocation, len(numbers)))
            for moment, allocation, size in self._changes
        ]
        return Recording(self._operations, changes, self._marks, self._phases, self._actions)

    def _read(self, kind: "_OperationKind", args: Any, kwargs: Any, result: Any) -> Operation:
        tensors = _get_tensors((args, kwargs))
        if kind.collective is None:
            traffic = kind.count_bytes(args, kwargs, result)
            dtype = tensors[0].dtype if tensors else None
            flops, attention = kind.count_flops(args, kwargs, result), kind.get_attention(args, kwargs)
            return Operation(flops, traffic, dtype, attention=attention, times=self.times)
        values = (*args, *kwargs.values())
        group = self._groups.get(get_process_group(values).group_name, _OTHER)
        allocations = [self._live.get(id(tensor.untyped_storage())) for tensor in tensors]
        is_of_unit = any(a is not None and a.category == COMMUNICATION_BUFFERS for a in allocations)
        is_of_unit &= kind.collective not in TRANSFERS
        size = max(_count_bytes(_get_tensors(value)) for value in (*values, result))
        return Operation(0, 0, None, Collective(kind.collective, group, is_of_unit, size), times=self.times)

    def _observe(self, storage: torch.UntypedStorage) -> Allocation:
        # the id identifies a storage, since torch keeps one Python object per storage as long as the storage lives
        if id(storage) not in self._live:
            self._live[id(storage)] = Allocation(self._phases[-1][1] if self._phases else "")
            weakref.finalize(storage, self._free, id(storage))
        allocation = self._live[id(storage)]
        self._change(allocation, storage.nbytes())
        return allocation

    def _free(self, key: int) -> None:
        self._change(self._live.pop(key), 0)

    def _change(self, allocation: Allocation, size: int) -> None:
        if size != allocation.size:
            self._changes.append((len(self._operations), allocation, size - allocation.size))
            allocation.size = size


class _OperationKind:
    """Properties that all calls of one torch operation have in common."""

    def __init__(self, func: Any) -> None:
        schema = get_schema(func)
        self.name: str = schema.name
        namespace, self._short_name = self.name.split("::")
        is_collective = namespace in ("c10d", "_c10d_functional") and self._short_name not in _NOT_COLLECTIVES
        self.is_view: bool = func.is_view or torch.Tag.inplace_view in func.tags
        self.collective = _KINDS.get(self._short_name, self._short_name) if is_collective else None
        self._flop_formula = get_optional_flop_formula(func)
        self._arguments = [argument.name for argument in schema.arguments]
        self._changed = [a.name for a in schema.arguments if _is_changed(a) and a.name not in _UNCHANGED]
        self._unread = {argument.name for argument in schema.arguments if argument.is_out}
        # operations such as zeros_like and new_full read only the shape of their first argument
        is_by_shape = self._short_name.endswith("_like") or self._short_name.startswith("new_")
        if is_by_shape or self._short_name in _OVERWRITES:
            self._unread.add(self._arguments[0])

    def count_flops(self, args: Any, kwargs: Any, result: Any) -> int:
        return 0 if self._flop_formula is None else self._flop_formula(*args, **kwargs, out_val=result)

    def get_attention(self, args: Any, kwargs: Any) -> Attention | None:
        """Return the properties of a call of fused attention; None for other operations."""
        if self._flop_formula is None or "attention" not in self._short_name:
            return None
        given = self._name(args, kwargs)
        is_backward = "backward" in self._short_name
        query, has_segments = given["query"], "most_keys" in given
        has_heads_last = self._short_name.startswith(("_flash_attention", "_efficient_attention"))
        length = given["most_keys"] if has_segments else given["key"].size(-3 if has_heads_last else -2)
        is_causal = has_segments or bool(given.get("is_causal", False))
        return Attention(query.size(-1), length, query.numel(), is_causal, is_backward)

    def _name(self, args: Any, kwargs: Any) -> dict[str, Any]:
        return {**dict(zip(self._arguments, args, strict=False)), **kwargs}

    def count_bytes(self, args: Any, kwargs: Any, result: Any) -> int:
        """Count the bytes that a call reads and writes.

        A call writes the arguments that its schema declares as mutated, and the results that do not share a storage
        with an argument. For a call that writes nothing, such as a reshape, the count is 0, however large its arguments
        are.
        """
        given = self._name(args, kwargs)
        tensors = _get_tensors([value for name, value in given.items() if name not in self._unread])
        if self.name == _COPIES_IN:
            return 2 * _count_bytes(_get_tensors(args[0]))
        if self._short_name in _SCATTERS:
            return 2 * _count_bytes(tensors[-1:]) + _count_bytes(tensors[1:])
        known = {id(tensor.untyped_storage()) for tensor in _get_tensors(given)}
        made = [tensor for tensor in _get_tensors(result) if id(tensor.untyped_storage()) not in known]
        written = _count_bytes(made) + sum(_count_bytes(_get_tensors(given.get(name))) for name in self._changed)
        if not written or self._short_name in _ALLOCATIONS:
            return 0
        if self._short_name in _LOOKUPS:
            return 2 * written + _count_bytes(tensors[1:])
        return written + _count_bytes(tensors)


def _is_changed(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


_OTHER = Group((), ())


def _get_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in ``values``, without duplicates."""
    return list({id(value): value for value in tree_leaves(values) if isinstance(value, Tensor)}.values())


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the elements that ``tensors`` have in memory. An expanded dim counts as a dim of size 1."""
    return sum(
        math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
        * tensor.itemsize
        for tensor in tensors
    )


def _set_category(allocation: Allocation, category: str) -> None:
    if allocation.label == TEMPORARIES:
        allocation.label = category
