"""Gradient norm, clipping and deferred synchronisation for parameters sharded over any mix of meshes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from lightning_fsdp2.compat.fsdp import ensure_gathered_once
from lightning_fsdp2.compat.gradients import (
    PlaceholderGradient,
    drop_unreduced_gradients,
    find_gathered_parameters,
    separate_unreduced_gradients,
)
from lightning_fsdp2.compat.torch import scale_in_float32
from lightning_fsdp2.modules.sharder import get_optional_sharder
from lightning_fsdp2.modules.stages import PipelineRanks, get_optional_pipeline_ranks
from lightning_fsdp2.parallel.data.fully_shard import get_fsdp_modules
from lightning_fsdp2.ranks.failures import list_names


class UnreducedGradient(PlaceholderGradient):
    """Placeholder in ``parameter.grad`` for a gradient that is not reduced over the ranks yet.

    Without the placeholder, ``parameter.grad`` would be None, although the parameter has a gradient in one process.
    """

    __slots__ = ()

    remedy: ClassVar[str] = (
        "Use gradients in `on_before_optimizer_step`; or in `on_after_backward`, since a module or callback with this"
        " hook makes every micro-batch reduce gradients; or set FSDP2Config(defer_fsdp_grad_sync=False), if there are"
        " no replicas. In a plain loop, leave out `defer_grad_sync`."
    )

    @classmethod
    def refuse(cls) -> NoReturn:
        raise ValueError(
            "A gradient was used in the middle of an accumulation window, but gradients are reduced over the ranks only"
            f" in the last micro-batch. {cls.remedy}"
        )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their total norm is at most ``max_norm``.

    Unlike :func:`torch.nn.utils.clip_grad_norm_`, this function accepts a mix of plain parameters and parameters on
    different meshes (https://github.com/pytorch/pytorch/issues/180346). Partial gradients, which torch's own tensor
    parallelism leaves on replicated parameters, are reduced first. Every rank must call this function.

    Args:
        parameters: Parameters of the optimizer, sharded or not. Those without a gradient are skipped.
        max_norm: Largest total norm; ``inf`` only measures the norm, and does not clip.
        norm_type: Order p of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise, before any gradient is changed, if the norm is NaN or infinite. The check
            waits for the device; nothing else does.

    Returns:
        The total norm before clipping: a plain float32 scalar, the same on every rank.

    Raises:
        RuntimeError: See ``error_if_nonfinite``.
        ValueError: If ``max_norm`` is negative or NaN. Under Megatron-FSDP, also if ``parameters`` were taken from the
            model after a backward and another forward: the model then holds parameters that have no gradients.
    """
    return clip_to_norm(parameters, max_norm, norm_type, error_if_nonfinite)


@torch.no_grad()
def clip_to_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pipeline: PipelineRanks | None = None,
) -> Tensor:
    """Clip gradients as :func:`clip_grad_norm_` does, also where a stage of a pipeline trains no parameters.

    Args:
        parameters: See :func:`clip_grad_norm_`.
        max_norm: See :func:`clip_grad_norm_`.
        norm_type: See :func:`clip_grad_norm_`.
        error_if_nonfinite: See :func:`clip_grad_norm_`.
        pipeline: See :func:`get_total_norm`.
    """
    _check_bound("max_norm", max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _check_distributed(parameters)
    total = get_total_norm(parameters, norm_type, pipeline=pipeline)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped."
            " No gradient was changed. Pass `error_if_nonfinite=False` to clip them nevertheless."
        )
    # the same formula as torch's clip_grads_with_norm_, so that clipping is the same on one rank and on many
    scale_gradients(parameters, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient element to ``[-clip_value, clip_value]``, in place.

    Partial gradients are first reduced over the ranks. All other gradients need no communication.

    Raises:
        ValueError: If ``clip_value`` is negative or NaN. Under Megatron-FSDP, also see :func:`clip_grad_norm_`.
    """
    _check_bound("clip_value", clip_value)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _check_distributed(parameters)
    _reduce_partial(parameters)
    gradients = _local_gradients(parameters)
    for group in _group_for_foreach(gradients):
        torch._foreach_clamp_min_(group, -clip_value)
        torch._foreach_clamp_max_(group, clip_value)


@torch.no_grad()
def get_total_norm(
    parameters: Iterable[Tensor], norm_type: float = 2.0, *, pipeline: PipelineRanks | None = None
) -> Tensor:
    """Return the norm of all gradients together.

    Each element counts once, even if several ranks hold a copy. Norms are accumulated in float32. For all parameters
    that are sharded over the same mesh axes, only one scalar is reduced over the ranks. With replicas (HSDP), the
    result is also sent from one replica to the others, because rounding may differ between replicas.

    Args:
        parameters: Parameters, sharded or not. Those without a gradient are skipped.
        norm_type: Order p of the norm; ``inf`` for the largest absolute value.
        pipeline: Ranks over whose stages the norm is taken. None for those that
            :func:`~lightning_fsdp2.modules.stages.set_pipeline_ranks` has set on the parameters, if any.
    """
    parameters = list(parameters)
    pipeline = pipeline or get_optional_pipeline_ranks(parameters)
    if pipeline is not None:
        parameters = [parameter for parameter in parameters if parameter not in pipeline.elsewhere]
    _reduce_partial(parameters)
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    copies: dict[dist.ProcessGroup, None] = {}
    device = None if pipeline is None else pipeline.device
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        spread, copied = _split_axes(gradient)
        groups.setdefault(spread, []).append(_to_local(gradient))
        copies.update(dict.fromkeys(copied))
        device = groups[spread][-1].device if device is None else device
    if device is None:
        return torch.tensor(0.0)
    powers = [_reduce_power(_local_power(gradients, norm_type), key, norm_type) for key, gradients in groups.items()]
    zero = torch.zeros((), device=device)
    power = _combine(torch.stack([zero, *(power.to(device) for power in powers)]), norm_type)
    if pipeline is not None:
        power = _reduce_power(power, (pipeline.group,), norm_type)
    total = _root(power, norm_type)
    for group in copies:
        if not any(group in spread for spread in groups):
            # replicas may sum the same numbers in different orders. If their norms differed in the last bit, so would
            # the clipped gradients, and the weights of the replicas would drift apart.
            dist.broadcast(total, group=group, group_src=0)
    return total


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by the scalar tensor ``factor`` in place, without making the host wait for its value.

    For bfloat16 and float16 gradients, only the product is rounded to their dtype. The factor is not, so each element
    is rounded only once.
    """
    for group in _group_for_foreach(_local_gradients(parameters)):
        device, dtype = group[0].device, group[0].dtype
        if dtype in (torch.bfloat16, torch.float16):
            scale_in_float32(group, factor.to(device))
        else:
            # a factor of a different dtype would force torch's slow path, with one kernel per gradient
            torch._foreach_mul_(group, factor.to(device, dtype))


@contextmanager
def defer_grad_sync(model: nn.Module, *, reduce_scatter: bool = False) -> Iterator[None]:
    """Keep gradients unsynchronised inside the ``with`` block; the first backward after it synchronises their sum.

    Use this context manager for all micro-batches of an optimizer step except the last. To discard the gradients
    instead, call :func:`drop_deferred_gradients`. Under a Trainer, the optimizer's ``zero_grad`` also discards them.

    Args:
        model: A module that holds FSDP2 units, or one that Megatron-FSDP has wrapped; other modules are left alone.
        reduce_scatter: Whether to reduce-scatter the gradients of every micro-batch. False avoids all communication,
            but keeps whole gradients in memory on every rank. True keeps only shards of gradients, but avoids only the
            all-reduce over the replicas (HSDP). Under Megatron-FSDP, ``zero_dp_strategy`` decides instead.
    """
    modules = get_fsdp_modules(model)
    sharder = get_optional_sharder(model)
    # The unreduced gradients of several parameters may share memory. A backward that adds to one of these gradients in
    # place would also change the others. So in the `with` block, these hooks copy shared gradients before each forward.
    tops = cast(list[nn.Module], modules[:1])
    hooks = [top.register_forward_pre_hook(lambda *_: separate_unreduced_gradients(modules)) for top in tops]
    try:
        with (
            defer_unit_sync(modules, reduce_scatter=reduce_scatter),
            sharder.defer_sync() if sharder is not None else nullcontext(),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def defer_unit_sync(units: Sequence[FSDPModule], *, reduce_scatter: bool = False) -> Iterator[None]:
    """Keep the gradients of FSDP2 units unsynchronised inside the ``with`` block; see :func:`defer_grad_sync`.

    If several backwards run inside the block, call
    :func:`~lightning_fsdp2.compat.gradients.separate_unreduced_gradients` between them.
    """
    for unit in units:
        ensure_gathered_once(unit)

    def set_sync(enabled: bool) -> None:
        for unit in units:
            if reduce_scatter:
                unit.set_requires_all_reduce(enabled, recurse=False)
            else:
                unit.set_requires_gradient_sync(enabled, recurse=False)

    set_sync(False)
    try:
        yield
    finally:
        # copy shared gradients once more, because the first backward after the block adds to the unreduced gradients
        separate_unreduced_gradients(units)
        set_sync(True)


def drop_deferred_gradients(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Discard the gradients that :func:`defer_grad_sync` has kept in the FSDP2 units of ``model``.

    torch does not keep these gradients in ``parameter.grad``, so the ``zero_grad`` of an optimizer does not clear them.

    Args:
        model: A module that holds FSDP2 units.
        parameters: Parameters whose gradients are discarded. Pass the same objects that the optimizer holds.
    """
    cleared = set(parameters)
    for module in get_fsdp_modules(model):
        for parameter in drop_unreduced_gradients(module, cleared):
            if isinstance(parameter.grad, UnreducedGradient):
                parameter.grad = None


def extend_zero_grad(optimizer: Optimizer, clear: Callable[[], None]) -> None:
    """Make ``optimizer.zero_grad`` also call ``clear``, for gradients that are not in ``parameter.grad``.

    The method is replaced on the optimizer, because torch has no hook for ``zero_grad``.
    """
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        clear()  # first, because `zero_grad` cannot set a placeholder for an unreduced gradient to zero
        zero_grad(set_to_none)

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]


def choose_backward_inputs(model: nn.Module, inputs: Sequence[Tensor], accumulates: bool) -> list[Tensor]:
    """Return the tensors that autograd knows instead of the sharded parameters in ``inputs``.

    Use it with :func:`~lightning_fsdp2.compat.gradients.replace_backward_inputs`.

    Args:
        model: A module that holds FSDP2 units.
        inputs: Tensors that ``backward(inputs=...)`` or ``torch.autograd.grad`` was called with.
        accumulates: Whether the gradients are added to ``.grad``, and so reduced over the ranks by FSDP2.

    Raises:
        ValueError: If the gradient of a sharded parameter would be returned, and not reduced.
    """
    parameters = [tensor for tensor in inputs if isinstance(tensor, nn.Parameter)]
    if not parameters:  # a gradient penalty, which may be in every step, must not look through all parameters
        return list(inputs)
    gathered = find_gathered_parameters(get_fsdp_modules(model), parameters)
    names = [gathered[id(tensor)][0] for tensor in inputs if id(tensor) in gathered]
    if names and not accumulates:
        raise ValueError(
            f"`torch.autograd.grad` was called for sharded parameters ({list_names(names)}), but it would return the"
            " gradients of this rank alone. Call `self.manual_backward(loss, inputs=parameters)` (in a plain loop,"
            " `loss.backward(inputs=parameters)`), which adds the gradients over all ranks to each `.grad`."
        )
    return [gathered[id(tensor)][1] if id(tensor) in gathered else tensor for tensor in inputs]


def _check_bound(name: str, bound: float) -> None:
    """Refuse a negative bound, which would reverse all gradients, and a NaN bound, which would make them NaN."""
    if not bound >= 0:
        raise ValueError(f"{name}={bound!r} must be 0 or more; to only measure the norm, use max_norm=float('inf').")


def _check_distributed(parameters: list[Tensor]) -> None:
    """Refuse Megatron-FSDP's raw compute parameters: only the optimizer's parameters have gradients to clip."""
    if any(
        hasattr(parameter, "_megatron_fsdp_model") and not isinstance(parameter, DTensor) for parameter in parameters
    ):
        raise ValueError(
            "These parameters have no gradients: the model was called again after its backward, and now holds the"
            " parameters that Megatron-FSDP computes with. Clip the gradients of the optimizer's parameters, or clip"
            " before that call."
        )


def _split_axes(gradient: Tensor) -> tuple[tuple[dist.ProcessGroup, ...], tuple[dist.ProcessGroup, ...]]:
    """Return the process groups over which ``gradient`` is sharded, and those over which it is replicated."""
    if not isinstance(gradient, DTensor):
        return (), ()
    mesh = gradient.device_mesh
    axes = [
        (mesh.get_group(axis), placement) for axis, placement in enumerate(gradient.placements) if mesh.size(axis) > 1
    ]
    spread = tuple(group for group, placement in axes if not placement.is_replicate())
    return spread, tuple(group for group, placement in axes if placement.is_replicate())


def _reduce_partial(parameters: Iterable[Tensor]) -> None:
    """Reduce partial gradients over the ranks, so that each gradient has the same placements as its parameter.

    The gradient of a parameter that is partial itself becomes whole, since its norm would be that of a part.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            own = parameter.placements if isinstance(parameter, DTensor) else [Replicate()] * gradient.device_mesh.ndim
            whole = [Replicate() if isinstance(placement, Partial) else placement for placement in own]
            parameter.grad = gradient.redistribute(placements=whole)


def _to_local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [_to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _group_for_foreach(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _local_power(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of |g|^p over this rank's gradient elements, or the largest |g| for the infinity norm.

    The result is 0 if this rank has no elements.
    """
    powers = [torch.zeros((), dtype=torch.float32, device=gradients[0].device)]
    for group in _group_for_foreach(gradients):
        norms = torch.stack(torch._foreach_norm(group, norm_type, dtype=torch.float32)).to(powers[0].device)
        powers.append(norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum())
    return _combine(torch.stack(powers), norm_type)


def _reduce_power(power: Tensor, groups: tuple[dist.ProcessGroup, ...], norm_type: float) -> Tensor:
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    if math.isinf(norm_type):
        # replace NaN with infinity, because gloo's MAX may ignore a NaN that comes from another rank
        power = power.nan_to_num(nan=math.inf, posinf=math.inf)
    for group in groups:
        dist.all_reduce(power, op=op, group=group)
    return power


def _combine(powers: Tensor, norm_type: float) -> Tensor:
    return powers.max() if math.isinf(norm_type) else powers.sum()


def _root(power: Tensor, norm_type: float) -> Tensor:
    return power if math.isinf(norm_type) else power.pow(1.0 / norm_type)
