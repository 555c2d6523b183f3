"""Random numbers for DTensors, as one process draws them: each rank draws those of the whole, and keeps its part.

On a mesh of CPUs, DTensor fills the shards of all ranks with the same numbers: after ``reset_parameters()``, rows of a
weight are equal. On GPUs it draws different numbers for each shard, but other ones than a single process.

The ranks draw from the state that they share (:func:`~lightning_fsdp2.ranks.own_random.shared_random_numbers`), so it
stays the same on all of them, and so do copies of a tensor. They draw without communication, unless the numbers depend
on values, such as the probabilities of ``torch.bernoulli``.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.dtensor import compute_as_dtensor, has_random_tracker, has_values, set_handler
from lightning_fsdp2.compat.torch import get_schema, get_shard, tree_leaves, tree_map_only
from lightning_fsdp2.ranks.own_random import shared_random_numbers
from lightning_fsdp2.ranks.whole_tensors import copy_part_, gather
from lightning_fsdp2.sizes import TENSOR_PARALLEL

_BY_SHAPE = (
    "bernoulli_.float",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "rand_like",
    "randint_like",
    "randn_like",
    "random_",
    "uniform_",
)
"""Operations, or single overloads, whose result depends on the shape of their first argument, not on its values."""

_BY_VALUES = ("bernoulli", "bernoulli_.Tensor", "binomial", "multinomial", "normal", "poisson")
"""Operations, or single overloads, whose result depends on values."""


def draw_whole_random_numbers() -> None:
    """Make every DTensor of this process get the random numbers of the whole tensor, from now on."""
    for names, handler in ((_BY_SHAPE, _draw_by_shape), (_BY_VALUES, _draw_by_values)):
        for operation in _list_operations(names):
            set_handler(operation, handler)
    set_handler(torch.ops.aten.native_dropout.default, _drop)


def _list_operations(names: tuple[str, ...]) -> list[Any]:
    """Return the named overloads. Where only an operation is named, return those that draw and take no ``out``."""
    found = []
    for name, _, overload in (name.partition(".") for name in names):
        packet = getattr(torch.ops.aten, name)
        operations = [getattr(packet, one) for one in ([overload] if overload else packet.overloads())]
        found += [one for one in operations if not any(argument.is_out for argument in get_schema(one).arguments)]
    return found


def _draw_by_shape(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, *rest = args
    if not _can_draw(like):
        return compute_as_dtensor(operation, args, kwargs)
    if has_random_tracker(like.device_mesh) and all(placement.is_replicate() for placement in like.placements):
        with _use_state(like, kwargs):
            return compute_as_dtensor(operation, args, kwargs)
    whole = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=get_shard(like).device)
    return _keep_part(operation, like, _draw(operation, like, whole, *rest, **kwargs))


def _draw_by_values(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    if not _can_draw(like):
        return compute_as_dtensor(operation, args, kwargs)
    whole_args, whole_kwargs = tree_map_only(DTensor, gather, (args, kwargs))
    return _keep_part(operation, like, _draw(operation, like, *whole_args, **whole_kwargs))


def _drop(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drop the elements that one process would drop; see ``torch.nn.functional.dropout``.

    Activations are large, so torch drops elements of theirs, unless it would draw the same numbers for all shards.
    """
    tensor, *rest = args
    if not _can_draw(tensor) or (_is_activation(tensor) and has_random_tracker(tensor.device_mesh)):
        return compute_as_dtensor(operation, args, kwargs)
    ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=get_shard(tensor).device)
    factors, mask = (_keep_part(operation, tensor, drawn) for drawn in _draw(operation, tensor, ones, *rest, **kwargs))
    return tensor * factors, mask


def _can_draw(like: Any) -> bool:
    """Return whether a result can be laid out like ``like``, which has to be a DTensor that is no unfinished sum."""
    return isinstance(like, DTensor) and has_values(like) and not any(p.is_partial() for p in like.placements)


def _is_activation(like: DTensor) -> bool:
    """Return whether ``like`` is sharded over tensor parallel ranks only: weights are sharded over data ranks too."""
    return like.device_mesh.mesh_dim_names == (TENSOR_PARALLEL,)


def _draw(operation: Any, like: DTensor, *args: Any, **kwargs: Any) -> Any:
    with _use_state(like, kwargs):
        return operation(*args, **kwargs)


def _use_state(like: DTensor, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
    """Use the random state that all ranks share, or that of a replica for activations under tensor parallelism."""
    is_given = isinstance(kwargs.get("generator"), torch.Generator)
    return nullcontext() if is_given or _is_activation(like) else shared_random_numbers()


def _keep_part(operation: Any, like: DTensor, whole: Tensor) -> DTensor:
    """Return this rank's part of ``whole``: in ``like``, if the operation works in place, or in a new DTensor."""
    if get_schema(operation).is_mutable:
        copy_part_(like, whole)
        return like
    if whole.shape != like.shape:
        return DTensor.from_local(whole, like.device_mesh, run_check=False)
    part: Any = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    copy_part_(part, whole)
    return part
