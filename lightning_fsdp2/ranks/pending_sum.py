"""Lazy sum over the tensor parallel ranks. The whole sum, or a part of it, is computed only when it is read."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp2.compat.torch import (
    all_gather_tensor,
    all_reduce_tensor,
    make_wrapper_subclass,
    reduce_scatter_tensor,
    tree_map_only,
)
from lightning_fsdp2.ranks.collectives import split

_FREE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "is_sparse")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_base")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_complex")),
    # FSDP2 reads `_base` of every layer's output and registers a hook on the output; neither needs the values
    Tensor.register_hook,
    torch.is_floating_point,
}
"""Functions of a tensor that do not read its values."""


class Summands:
    """Summands of an input embedding's output, one on each rank, which the ranks can add up later.

    Each rank has only a summand because the embedding's weights are sharded.

    Args:
        tensor: Summand of this rank.
        group: Process group of the tensor parallel ranks.
        is_watched: Whether a user's hook may read the sum, perhaps on this rank only.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, *, is_watched: bool = False) -> None:
        self.group = group
        self.is_watched = is_watched
        self._tensor: Tensor | None = tensor
        self._sum: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    @property
    def is_added(self) -> bool:
        """Whether the whole sum was computed. Code that has read the sum may have changed it in place."""
        return self._sum is not None

    def add(self) -> Tensor:
        """Return the whole sum, without gradients. The sum is computed only once, so in-place changes to it persist."""
        if self._sum is None:
            if self.is_watched:
                raise RuntimeError(
                    "sequence_parallel=True: the output of the input embedding cannot be read, because a forward hook"
                    " was registered on the embedding after the first forward, perhaps not on all ranks. Register the"
                    " hook before the first forward, or use sequence_parallel=False."
                )
            self._sum = all_reduce_tensor(self._get_tensor(), self.group)
            self._tensor = None
        return self._sum

    def scatter(self, dim: int) -> Tensor:
        """Return this rank's part of the sum along ``dim``, without gradients.

        The part is computed only once and kept, because activation checkpointing reads it again in backward.
        """
        if dim not in self._parts:
            self._parts[dim] = reduce_scatter_tensor(self._get_tensor(), dim, self.group)
        return self._parts[dim].detach()

    def end(self) -> None:
        """Drop the summands. Called at the end of the forward, because adding them up later might hang."""
        self._tensor = None

    def _get_tensor(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeError(
                "sequence_parallel=True: the output of the input embedding was read after the model's forward had"
                " ended, when the ranks can no longer sum it. Read the output in the forward or in a forward hook of"
                " the embedding, or use sequence_parallel=False."
            )
        return self._tensor


class PendingSum(Tensor):
    """Tensor that stands for the sum of :class:`Summands`: the output of the input embedding with sequence parallelism.

    Between the embedding and the first layer, most models read only the shape, dtype and device of this tensor. The
    first layer then takes this rank's part of the sequence with :meth:`get_part`, which needs one reduce-scatter. Some
    models read the values before the first layer, for example to add learned positions, to scale the embeddings, or to
    insert the embeddings of an image. Such a read computes the whole sum, which needs one all-reduce.

    For autograd, this is a tensor with the shape of the whole sum, and its gradient is equal on all ranks.
    """

    summands: Summands
    _whole: Tensor | None = None

    @staticmethod
    def make(tensor: Tensor, group: dist.ProcessGroup, *, is_watched: bool = False) -> "PendingSum":
        """Return a lazy sum of ``tensor`` over the ranks of ``group``. For the arguments, see :class:`Summands`."""
        return _Pend.apply(tensor, Summands(tensor.detach(), group, is_watched=is_watched))

    # `like` is a Tensor, but annotated as Any, because jsonargparse's help would otherwise list all tensor classes.
    @staticmethod
    def __new__(cls, summands: Summands, like: Any) -> "PendingSum":
        pending = make_wrapper_subclass(cls, like)
        pending.summands = summands
        return pending

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get_whole(self) -> Tensor:
        """Return the sum as a plain tensor. The sum is computed only once."""
        if self._whole is None:
            # always record the sum for autograd, because later readers may need gradients even if the first does not
            with torch.inference_mode(False), torch.enable_grad():
                self._whole = _Whole.apply(self)
        return self._whole

    def get_part(self, dim: int) -> Tensor:
        """Return this rank's part of the sum along ``dim``. The number of ranks must divide the size of ``dim``."""
        if self.summands.is_added:
            return split(self.get_whole(), dim, self.summands.group)
        return _Part.apply(self, dim)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FREE:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(PendingSum, PendingSum.get_whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # do not sum when activation checkpointing detaches an input to save it
        if func is torch.ops.aten.detach.default:
            return PendingSum(args[0].summands, args[0])
        # calls that bypass __torch_function__ arrive here after autograd has recorded them, so add up the summands
        # without recording the sum
        args, kwargs = tree_map_only(PendingSum, lambda pending: pending.summands.add(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Pend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, summands: Summands) -> PendingSum:
        return PendingSum(summands, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: PendingSum) -> Tensor:
        return pending.summands.add().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: PendingSum, dim: int) -> Tensor:
        ctx.dim, ctx.group = dim, pending.summands.group
        return pending.summands.scatter(dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather_tensor(gradient, ctx.dim, ctx.group), None
