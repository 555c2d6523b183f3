"""A sum over the tensor parallel ranks that is not computed before it is known what it is for."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_fsdp2._torch_compat import all_gather_tensor, all_reduce_tensor, reduce_scatter_tensor
from lightning_fsdp2.parallel.tp_collectives import split

_FREE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "is_sparse")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_base")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_complex")),
    Tensor.register_hook,  # FSDP2 has one for its backward, and looks for a base first
    torch.is_floating_point,
}
"""What can be asked of a tensor without reading it."""


class PendingSum(Tensor):
    """The sum of the ranks' ``summand`` tensors, as the input embedding of a sequence parallel model returns it.

    Between embedding and first layer most models ask such a tensor for its shape, dtype and device alone, and the layer
    then takes this rank's part of the sequence: :meth:`get_part` is one reduce-scatter. Whatever else reads it, a sum
    with learned positions, a scale, the embeddings of an image, gets the whole sum, by one all-reduce.

    Autograd knows it as a tensor of the whole shape, whose gradient is equal on all ranks.
    """

    summand: Tensor
    group: dist.ProcessGroup
    _whole: Tensor | None = None

    @staticmethod
    def make(summand: Tensor, group: dist.ProcessGroup) -> "PendingSum":
        """Return the sum of ``summand`` over the ranks of ``group``, without communication."""
        return _Pend.apply(summand, group)

    @staticmethod
    def __new__(cls, summand: Tensor, group: dist.ProcessGroup) -> "PendingSum":
        pending = torch.Tensor._make_wrapper_subclass(
            cls, summand.shape, strides=summand.stride(), dtype=summand.dtype, device=summand.device
        )
        pending.summand, pending.group = summand, group
        return pending

    def get_whole(self) -> Tensor:
        """Return the sum, a plain tensor; it is computed once."""
        if self._whole is None:
            self._whole = _AllReduce.apply(self)
        return self._whole

    def get_part(self, dim: int) -> Tensor:
        """Return this rank's part of the sum along ``dim``, whose size the ranks divide."""
        if self._whole is not None:  # something has read it, and may have changed it
            return split(self._whole, dim, self.group)
        return _Scatter.apply(self, dim)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FREE:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(PendingSum, PendingSum.get_whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # autograd saves it: the input of a checkpoint
            return PendingSum(args[0].summand, args[0].group)
        raise NotImplementedError(f"{func} of a sum over ranks that is not computed yet.")


class _Pend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> PendingSum:
        return PendingSum(summand.detach(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: PendingSum) -> Tensor:
        return all_reduce_tensor(pending.summand, pending.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: PendingSum, dim: int) -> Tensor:
        ctx.dim, ctx.group = dim, pending.group
        return reduce_scatter_tensor(pending.summand, dim, pending.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather_tensor(gradient, ctx.dim, ctx.group), None
