"""The collectives of tensor and sequence parallelism, as differentiable functions of plain local tensors.

Which function to use depends on the values that the ranks hold:

===================  ====================================  ==================  =====================
function             input -> output                       forward             backward
===================  ====================================  ==================  =====================
copy_to_ranks        equal -> equal, used differently      nothing             all-reduce
reduce_from_ranks    summands -> equal                     all-reduce          nothing
gather_shards        shards -> equal, used equally         all-gather          slice
gather_for_ranks     shards -> equal, used differently     all-gather          reduce-scatter
split                equal -> shards                       slice               all-gather
reduce_scatter       summands -> shards                    reduce-scatter      all-gather
sum_over_ranks       summands -> equal, used differently   all-reduce          all-reduce
exchange             rows for each rank -> received rows   all-to-all          all-to-all
===================  ====================================  ==================  =====================

:data:`KINDS` holds the column ``input -> output`` for :mod:`~lightning_fsdp2.parallel.tensor.verification`.

"Equal" values are the same on every rank. "Used equally" means that every rank does the same computation with them, so
that every rank has the complete gradient. "Used differently" means that each rank computes a different part of the
result, so that each rank's gradient is only a summand. "Summands" must be added up over the ranks.

The first two functions are *f* and *g* of Megatron-LM (https://arxiv.org/abs/1909.08053). ``gather_shards`` and
``reduce_scatter`` come from Megatron-LM's sequence parallelism (https://arxiv.org/abs/2205.05198). ``torch.compile``
can trace all functions.

Tensors are cut into shards as :func:`torch.chunk` cuts them. If the size is not divisible by the number of ranks, the
last ranks hold a shorter shard or an empty one.
"""

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_fsdp2.compat.torch import (
    all_gather_tensor,
    all_reduce_tensor,
    all_to_all_tensor,
    reduce_scatter_tensor,
)


def copy_to_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor`` unchanged, and sum its gradient over the ranks in backward."""
    return _Copy.apply(group, tensor)[0]


def copy_last_to_ranks(tensor: Tensor, features: int, group: dist.ProcessGroup) -> Tensor:
    """Apply :func:`copy_to_ranks` to only the last ``features`` elements of the last dim."""
    return _CopyLast.apply(tensor, features, group)


def copy_together(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Apply :func:`copy_to_ranks` to several small tensors, with a single all-reduce in float32."""
    return list(_Copy.apply(group, *tensors))


def reduce_from_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``tensor`` over the ranks.

    All ranks must do the same computation with the sum, because backward does not sum the gradient over the ranks.
    """
    return _Reduce.apply(tensor, group)


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``tensor`` over the ranks.

    Each rank may use the sum in a different computation, because backward also sums the gradient over the ranks.
    """
    return copy_to_ranks(reduce_from_ranks(tensor, group), group)


def gather_shards(tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along ``dim``, to a total size of ``size``.

    All ranks must do the same computation with the result, because backward does not sum the gradient over the ranks.
    """
    return _Gather.apply(tensor, dim % tensor.ndim, size, group)


def gather_for_ranks(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the equally sized shards of all ranks along ``dim``.

    Each rank may use the result in a different computation, because backward sums the gradient over the ranks.
    """
    return _GatherForRanks.apply(tensor, dim % tensor.ndim, group)


def gather_twice(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the results of :func:`gather_shards` and :func:`gather_for_ranks`, with one all-gather for both.

    The two results share the same memory.
    """
    size = tensor.size(dim) * group.size()
    complete = gather_shards(tensor, dim, size, group)
    return complete, _Twin.apply(tensor, complete, dim % tensor.ndim, group)


def split(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of ``tensor`` along ``dim``."""
    return _Split.apply(tensor, dim % tensor.ndim, group)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of the sum of ``tensor`` over the ranks.

    The sum is cut along ``dim``, whose size must be divisible by the number of ranks.
    """
    return _ReduceScatter.apply(tensor, dim % tensor.ndim, group)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0 of ``group``, the next ``sent[1]`` rows to rank 1, and so on.

    Args:
        rows: Tensor [sum of ``sent``, ...].
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        group: Ranks that exchange rows.

    Returns:
        Tensor [sum of ``received``, ...] with the rows of all ranks, in the order of the ranks.
    """
    return _Exchange.apply(rows, sent, received, group)


def get_shard_range(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the start and the length of a rank's shard along a dim of ``size``, as :func:`torch.chunk` cuts it."""
    chunk = -(-size // ranks)
    start = min(rank * chunk, size)
    return start, min(chunk, size - start)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if len(gradients) == 1:
            return None, all_reduce_tensor(gradients[0], ctx.group)
        flat = all_reduce_tensor(torch.cat([gradient.flatten().float() for gradient in gradients]), ctx.group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(p.view(g.shape).to(g.dtype) for p, g in zip(parts, gradients, strict=True))


class _CopyLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, features: int, group: dist.ProcessGroup) -> Tensor:
        ctx.features, ctx.group = features, group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rest, last = gradient.split([gradient.size(-1) - ctx.features, ctx.features], -1)
        return torch.cat([rest, all_reduce_tensor(last.contiguous(), ctx.group)], -1), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce_tensor(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _concatenate(tensor, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _take(gradient, ctx.dim, ctx.group), None, None, None


class _GatherForRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_tensor(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_scatter_tensor(gradient, ctx.dim, ctx.group), None, None


class _Twin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gathered: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_scatter_tensor(gradient, ctx.dim, ctx.group), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, tensor.size(dim), group
        return _take(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _concatenate(gradient, ctx.dim, ctx.size, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter_tensor(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather_tensor(gradient, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all_tensor(rows, group, received=received, sent=sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_to_all_tensor(gradient, ctx.group, received=ctx.sent, sent=ctx.received), None, None, None


class Kind(Enum):
    """Kind of values in a tensor: equal on all ranks or not. The table at the top of this file explains the terms."""

    EQUAL = "equal"
    OWN = "shards or summands, or values that a rank computed from them"
    EITHER = "both kinds in one tensor, or a DTensor, which records its own kind"


KINDS: dict[type[torch.autograd.Function], tuple[Kind, Kind]] = {
    _Copy: (Kind.EQUAL, Kind.OWN),
    _CopyLast: (Kind.EQUAL, Kind.EITHER),
    _Reduce: (Kind.OWN, Kind.EQUAL),
    _Gather: (Kind.OWN, Kind.EQUAL),
    _GatherForRanks: (Kind.OWN, Kind.OWN),
    _Split: (Kind.EQUAL, Kind.OWN),
    _ReduceScatter: (Kind.OWN, Kind.OWN),
    _Exchange: (Kind.OWN, Kind.OWN),
    _Twin: (Kind.EITHER, Kind.OWN),  # EITHER: one input is a shard (OWN), the other is the gathered tensor (EQUAL)
}
"""Kinds of the input and of the output of each autograd function."""


def _take(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    start, length = get_shard_range(tensor.size(dim), group.rank(), group.size())
    # always return a copy: with torch 2.11, an input gets a zero gradient if a compiled function returns a view of it
    return tensor.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _concatenate(tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards that may be of unequal size. Only the last shards are short, so all padding is at the end."""
    chunk = -(-size // group.size())
    missing = chunk - tensor.size(dim)
    if missing:
        tensor = F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing])
    gathered = all_gather_tensor(tensor, dim, group)
    # detach the unpadded slice: autograd treats it as a view, and FSDP2 warns about modules that return a view
    return gathered.narrow(dim, 0, size).detach() if gathered.size(dim) != size else gathered
