"""Initialise a sharded model that was built on the meta device, without the full model on any rank.

The weights match those that a single process would draw. Every rank draws the random numbers of a whole parameter and
keeps its shard, so a seed gives the same model on any mesh. A rank holds whole parameters of only one module at a time.
For modules of other pipeline stages, a rank draws the same numbers too, and discards them.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy

from lightning_fsdp2.compat.torch import TorchDispatchMode
from lightning_fsdp2.compat.transformers import get_initializer
from lightning_fsdp2.mesh import get_optional_mesh
from lightning_fsdp2.modules.structure import find_hf_models
from lightning_fsdp2.modules.stubs import (
    get_absent_tensors,
    get_tensors_without_values,
    mark_initialized,
    with_skeletons,
)
from lightning_fsdp2.ranks.failures import describe_ranks, list_names
from lightning_fsdp2.ranks.random_state import get_torch_random_state, set_torch_random_state
from lightning_fsdp2.sizes import PIPELINE_PARALLEL
from lightning_fsdp2.weights.adapters import check_can_initialize as check_adapters_can_initialize
from lightning_fsdp2.weights.adapters import initialize_adapters

_RANDOM_FILLS = (
    torch.ops.aten.normal_,
    torch.ops.aten.uniform_,
    torch.ops.aten.bernoulli_,
    torch.ops.aten.exponential_,
    torch.ops.aten.random_,
)


def is_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of ``module`` is on the meta device.

    Tensors of other pipeline stages count too, so that the answer is the same on all stages.
    """
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())) or bool(
        get_tensors_without_values(module)
    )


def check_initialized(model: nn.Module) -> None:
    """Refuse parameters and buffers of lazy modules that no forward has given a shape yet.

    Raises:
        ValueError: When there are such tensors. The message names them.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{list_names(lazy)} belong to lazy modules, such as LazyLinear, and have no shape yet. Call the model once"
            " on a batch before it is passed to the Trainer or sharded, in `__init__` for example, or use modules with"
            " sizes."
        )


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, device_mesh: DeviceMesh | None = None) -> None:
    """Allocate the tensors that are on the meta device, and initialise them with the model's own methods.

    Hugging Face models are initialised by their ``_init_weights``, in the order of ``initialize_weights``. LoRA layers
    are initialised by peft's method. Any other module with tensors of its own is initialised by its
    ``reset_parameters`` or ``_reset_parameters``. These methods also rebuild non-persistent buffers.

    Tied parameters stay tied. Tensors that are not on the meta device stay as they are. Every rank uses the random
    state of the mesh's first rank. At the end, each rank gets its own random state back.

    Args:
        model: Any module; parameters may be DTensors of any placement.
        device: Device to allocate the tensors on.
        device_mesh: Mesh whose first rank provides the random state; None for one process.

    Raises:
        ValueError: If a module has tensors on the meta device but no method to initialise them.
    """
    if not is_meta(model):
        return
    _check_can_initialize(model)
    check_adapters_can_initialize(model)
    fresh = allocate(model, device)
    with random_numbers_of_one_process(device, device_mesh), with_skeletons(model):
        _initialize(model, fresh, set(find_hf_models(model)))
        initialize_adapters(model, fresh.is_allocated)
    mark_initialized(model, get_absent_tensors(model))


def broadcast_from_first_rank(model: nn.Module, device: torch.device, device_mesh: DeviceMesh) -> None:
    """Broadcast the parameters and buffers of the mesh's first rank to all ranks, as DDP does.

    Otherwise, ranks with different seeds would start with different weights.

    Args:
        model: Model that is not sharded yet. Its tensors on the meta device are skipped.
        device: Device on which the mesh's groups can communicate.
        device_mesh: Mesh to broadcast over, along all of its axes.

    Raises:
        ValueError: On every rank, if names, shapes or dtypes of the tensors differ between ranks.
    """
    groups = get_groups(device_mesh)
    if not groups:
        return
    _check_same_tensors(model, groups)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor):
            continue
        message = tensor.detach().to(device).contiguous()
        # some backends do not know all dtypes, such as float8
        octets = message.reshape(-1).view(torch.uint8)
        for group in groups:
            dist.broadcast(octets, group=group, group_src=0)
        if 0 in tensor.stride():  # an expanded buffer, whose elements share memory
            tensor.data = tensor.data.contiguous()
        tensor.data.copy_(message)


@contextmanager
def random_numbers_of_one_process(device: torch.device, device_mesh: DeviceMesh | None) -> Iterator[None]:
    """Run the block so that filling a DTensor with random numbers gives the same values as in a single process.

    The block starts with the random state of the mesh's first rank. At its end, each rank gets its own random state
    back. Every rank must enter the block and draw the same numbers in the same order.
    """
    with _random_state_of_first_rank(device, device_mesh), _WholeRandomNumbers(device):
        yield


class _Fresh:
    """Record of the tensors that :func:`allocate` made on ``device``, and of those that other pipeline stages make.

    It also tracks which of them still lack values.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device = device
        self._all = set(tensors)
        self._uninitialized = set(self._all)

    def is_allocated(self, tensor: Tensor) -> bool:
        return tensor in self._all

    def is_in(self, module: nn.Module) -> bool:
        return any(tensor in self._all for tensor in _direct_tensors(module))

    def is_below(self, module: nn.Module) -> bool:
        return any(self.is_in(submodule) for submodule in module.modules())

    def is_uninitialized(self, tensor: Tensor) -> bool:
        return tensor in self._uninitialized

    def mark_initialized(self, module: nn.Module) -> None:
        self._uninitialized.difference_update(_direct_tensors(module))


def allocate(model: nn.Module, device: torch.device) -> _Fresh:
    """Replace every meta tensor with an uninitialised tensor on ``device``. Shared tensors stay shared."""
    replaced: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in replaced:
                    empty = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replaced[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    replaced[tensor].__dict__.update(tensor.__dict__)
                slots[name] = replaced[tensor]  # type: ignore[assignment]
    return _Fresh([*replaced.values(), *get_tensors_without_values(model)], device)


def _initialize(
    module: nn.Module, fresh: _Fresh, hf_models: set[nn.Module], init: Callable[[nn.Module], None] | None = None
) -> None:
    """Initialise the children of ``module`` and then ``module`` itself.

    Args:
        module: Module to initialise.
        fresh: Record of the tensors that :func:`allocate` made.
        hf_models: All Hugging Face models.
        init: Initialiser of the Hugging Face model that contains ``module``; None outside such models.
    """
    guard: AbstractContextManager[Any] = nullcontext()
    if module in hf_models:
        from transformers.initialization import guard_torch_init_functions

        init, guard = get_initializer(module), guard_torch_init_functions()
    with guard:
        for child in module.children():
            _initialize(child, fresh, hf_models, init)
        if init is not None and fresh.is_below(module):
            with _whole_parameters(module, fresh):
                init(module)
        elif init is None and fresh.is_in(module):
            with _whole_parameters(module, fresh):
                _get_reset(module)()


@contextmanager
def _whole_parameters(module: nn.Module, fresh: _Fresh) -> Iterator[None]:
    """Run the block with whole parameters in place of the module's own DTensors, then copy shards into the DTensors.

    A parameter that already has its values keeps them, for example if another module shares it and was initialised
    earlier. The values of a parameter on the meta device, which another pipeline stage holds, are discarded.
    """
    parameters: dict[str, Any] = {name: p for name, p in module._parameters.items() if p is not None}
    sharded = {name: p for name, p in parameters.items() if isinstance(p, DTensor) or p.is_meta}
    whole = {name: nn.Parameter(_empty_whole(p, fresh.device), p.requires_grad) for name, p in sharded.items()}
    plain = {name: p for name, p in parameters.items() if name not in sharded}
    kept = {name: p.detach().clone() for name, p in plain.items() if not fresh.is_uninitialized(p)}
    module._parameters.update(whole)
    try:
        yield
    finally:
        module._parameters.update(sharded)
    for name, parameter in sharded.items():
        if fresh.is_uninitialized(parameter) and not parameter.is_meta:
            copy_shard_(parameter, whole[name].detach())
    for name, value in kept.items():
        plain[name].detach().copy_(value)
    fresh.mark_initialized(module)


def copy_shard_(target: DTensor, whole: Tensor) -> None:
    """Copy this rank's part of ``whole`` into ``target`` without communication; ``whole`` is the same on every rank."""
    mesh, placements = target.device_mesh, target.placements
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    target.to_local().copy_(replicated.redistribute(mesh, placements).to_local())


class _WholeRandomNumbers(TorchDispatchMode):
    """Dispatch mode in which filling a DTensor draws random numbers for the whole tensor, and keeps this rank's shard.

    Initialisers that also fill parameters of submodules need this mode, because :func:`_whole_parameters` replaces only
    the module's own parameters. DTensor's own random state would give results that depend on the mesh and the device.
    Filling a tensor on the meta device, which another pipeline stage holds, draws random numbers and discards them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _RANDOM_FILLS and (isinstance(args[0], DTensor) or args[0].is_meta):
            whole = _empty_whole(args[0], self._device)
            func(whole, *args[1:], **(kwargs or {}))
            if not args[0].is_meta:
                copy_shard_(args[0], whole)
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _random_state_of_first_rank(device: torch.device, device_mesh: DeviceMesh | None) -> Iterator[None]:
    own = get_torch_random_state(device)
    states = [own]
    for group in get_groups(device_mesh):
        dist.broadcast_object_list(states, group=group, group_src=0)
    set_torch_random_state(states[0], device)
    try:
        yield
    finally:
        set_torch_random_state(own, device)


def get_groups(device_mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return one process group per mesh axis, the pipeline axis included.

    Broadcasts over these groups, in order, reach every rank of the run.
    """
    if device_mesh is None:
        return []
    pipeline = get_optional_mesh(device_mesh, PIPELINE_PARALLEL)
    own = [device_mesh.get_group(axis) for axis in range(device_mesh.ndim) if device_mesh.size(axis) > 1]
    return own if pipeline is None else [pipeline.get_group(), *own]


def _check_same_tensors(model: nn.Module, groups: list[dist.ProcessGroup]) -> None:
    """Refuse a module whose tensors differ between ranks, because collectives of different sizes would hang or fail."""
    if any(dist.get_backend(group) == "fake" for group in groups):
        return
    tensors = (*model.named_parameters(), *model.named_buffers())
    own = [(name, [*tensor.shape], tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
    digest = zlib.crc32(repr(own).encode())
    if len(set(_gather({dist.get_rank(): digest}, groups).values())) == 1:
        return
    known = _gather({dist.get_rank(): own}, groups)
    first = known[min(known)]
    others = [rank for rank, described in sorted(known.items()) if described != first]
    pairs = zip_longest(first, known[others[0]], fillvalue="nothing")
    here, there = next((here, there) for here, there in pairs if here != there)
    raise ValueError(
        "The module is not the same on all ranks: its parameters and buffers on ranks"
        f" {describe_ranks(others)} differ from those on rank {min(known)}. The first difference (name, shape,"
        f" dtype, requires_grad) is {there} on rank {others[0]} and {here} on rank {min(known)}. Build the same module"
        " on every rank, even if the ranks have different data and files."
    )


def _gather(values: dict[int, Any], groups: list[dist.ProcessGroup]) -> dict[int, Any]:
    """Gather a value from every rank of a mesh. Return a dict with the rank as the key."""
    for group in groups:
        parts: list[dict[int, Any]] = [{}] * group.size()
        dist.all_gather_object(parts, values, group=group)
        values = {rank: value for part in parts for rank, value in part.items()}
    return values


def _check_can_initialize(model: nn.Module) -> None:
    inside_hf = {module for hf_model in find_hf_models(model) for module in hf_model.modules()}
    stuck = [
        f"{name or 'the root'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module not in inside_hf
        and any(tensor.is_meta for tensor in _direct_tensors(module))
        and _get_reset(module) is None
    ]
    if stuck:
        raise ValueError(
            f"These modules were built on the meta device and cannot be initialised: {', '.join(stuck)}. Give each of"
            " them a `reset_parameters()` method that fills its own parameters and buffers, or build them outside"
            ' `torch.device("meta")`.'
        )


def _get_reset(module: nn.Module) -> Any:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _empty_whole(tensor: Tensor, device: torch.device) -> Tensor:
    device = tensor.to_local().device if isinstance(tensor, DTensor) else device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
