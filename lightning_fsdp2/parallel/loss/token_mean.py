"""The mean of a loss over all label tokens of an optimizer step, whatever their split over ranks and micro-batches.

A mean of means weighs a token by the company it happens to be in: ranks and micro-batches with few labels count as
much as full ones. Dividing by the right number needs the label count of the whole window, which is known only once the
last micro-batch has been read. So the loss that enters backward is a *sum* over tokens (over a fixed constant), and
the gradients are divided by the count once, after they were reduced and before anybody looks at them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.compat.torch import assert_async
from lightning_fsdp2.modules.structure import is_hf_model
from lightning_fsdp2.parallel.data.gradients import scale_gradients
from lightning_fsdp2.ranks.collectives import get_shard_range

IGNORE_INDEX = -100

LOSS_UNIT = 1024
"""Token losses are summed in this unit, a power of two so that rounding stays that of the sum itself."""

_WINDOW_ATTRIBUTE = "_lightning_fsdp2_token_window"

_BACKEND_ATTRIBUTE = "_lightning_fsdp2_loss_backend"
"""Name of the attribute with the backend of ``torch.compile``, on modules whose losses are compiled."""


@dataclass
class TokenWindow:
    """What :func:`token_mean_loss` has added up on this rank since the last optimizer step; all on the device."""

    loss_sum: Tensor
    """Sum of the token losses. [] float64."""

    tokens: Tensor
    """Number of label tokens. [] float64, exact beyond the 2^24 tokens where float32 ends."""


@dataclass(frozen=True)
class TokenMean:
    """The result of one optimizer step over all data and context parallel ranks; device tensors, nothing waited for."""

    loss: Tensor
    """Mean loss per label token. [] float64."""

    tokens: Tensor
    """Number of label tokens. [] float64."""

    own: TokenWindow
    """What this rank has added to it."""


def token_mean_loss(
    module: nn.Module,
    logits: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Cross entropy whose gradient, after :func:`apply_token_mean_`, is that of the mean over all label tokens.

    The strategies of this package call :func:`apply_token_mean_` for every module this was called with. In a plain
    torch loop call it yourself after the last backward of a step.

    Train on this loss alone: another term added to it would be divided by the tokens of the step as well. Call it for
    one module, not for one inside another: the gradients of the inner one would be scaled twice.

    Args:
        module: Carries the running count between the two calls; any module, usually the LightningModule.
        logits: [batch, sequence, vocabulary], any float dtype; the loss is computed in float32.
        labels: [batch, sequence], int64.
        shift: Whether position t predicts the label of t + 1. False if the labels were shifted before.
        ignore_index: Label of positions that do not count.

    Returns:
        The local sum of the token losses over ``LOSS_UNIT``, to call ``backward`` on: not the mean loss. [] float32.
    """
    if shift:
        labels = shift_left(labels, ignore_index)
    losses = token_cross_entropy(logits, labels, ignore_index=ignore_index, model=module)
    return reduce_token_losses(module, losses, labels != ignore_index)


def reduce_token_losses(module: nn.Module, losses: Tensor, has_label: Tensor) -> Tensor:
    """:func:`token_mean_loss` for token losses that are computed already.

    Args:
        module: As for :func:`token_mean_loss`.
        losses: [batch, sequence], 0 where there is no label.
        has_label: [batch, sequence], bool.

    Returns:
        The local sum of the token losses over ``LOSS_UNIT``. [], the dtype of ``losses``.
    """
    loss_sum = losses.sum()
    if torch.is_grad_enabled():
        _add_to_window(module, loss_sum.detach(), has_label.sum())
    return loss_sum / LOSS_UNIT


def shift_left(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Put the label of t + 1 where position t predicts it; the last position has none. [..., sequence].

    Shifting the labels, not the logits, spares a copy of the largest tensor of the step.
    """
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def token_cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX, model: nn.Module | None = None
) -> Tensor:
    """Return the loss of every position, 0 where there is no label. [batch, sequence], float32.

    Args:
        logits: [batch, sequence, vocabulary], any float dtype. Where they are a DTensor whose vocabulary is sharded
            (``FSDP2Config.loss_parallel``), they are not gathered.
        labels: [batch, sequence], int64; position t holds the label of its own logits.
        ignore_index: Label of positions that do not count.
        model: Whose logits they are: the loss is compiled where its layers are (``FSDP2Config.enable_compile``), but
            for that of a sharded vocabulary. None does not compile.
    """
    if isinstance(logits, DTensor):
        return _vocabulary_parallel_cross_entropy(logits, labels, ignore_index)
    backend = getattr(model, _BACKEND_ATTRIBUTE, None)
    compute = _cross_entropy if backend is None else _compile_cross_entropy(backend)
    return compute(logits, labels, ignore_index)


def compile_losses(model: nn.Module, backend: str) -> None:
    """Let :func:`token_cross_entropy` for ``model``, and for the Hugging Face models in it, run compiled.

    Args:
        model: Any module.
        backend: Of ``torch.compile``.
    """
    for module in (model, *filter(is_hf_model, model.modules())):
        module.__dict__[_BACKEND_ATTRIBUTE] = backend


def _cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return losses.view_as(labels)


@cache
def _compile_cross_entropy(backend: str) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Keep the logits' float32 copy and their log-softmax out of memory, by one kernel for each direction."""
    return torch.compile(_cross_entropy, backend=backend)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss of transformers' causal language models (``ForCausalLMLoss``) for logits of a sharded vocabulary.

    Args:
        logits: [batch, sequence, vocabulary].
        labels: [batch, sequence], before the shift.
        vocab_size: Not needed; transformers passes it.
        num_items_in_batch: What the sum is divided by; None for the number of labels of this batch.
        ignore_index: Label of positions that do not count.
        shift_labels: [batch, sequence], after the shift, in place of ``labels``.
        **kwargs: What transformers hands through the model for other losses.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("The loss of a causal language model needs `labels` or `shift_labels`.")
        shift_labels = shift_left(labels, ignore_index)
    losses = token_cross_entropy(logits, shift_labels.to(logits.device), ignore_index=ignore_index)
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum()
    return losses.sum() / num_items_in_batch


@torch.no_grad()
def apply_token_mean_(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, loss_divisor: float = 1.0
) -> TokenMean | None:
    """Turn the gradients of summed token losses into those of their mean over ``group``, and close the window.

    Call it once per optimizer step, after the last backward and before clipping, on every rank. Costs one all-reduce
    of two numbers and one in-place scaling; nothing waits for the device.

    Args:
        module: The one given to :func:`token_mean_loss`; its parameters' gradients must be averages over ``group``,
            as FSDP2 and DDP leave them.
        group: The data and context parallel ranks (the ``"dp_cp"`` axis); None for one process.
        loss_divisor: By what each micro-batch's loss was divided before backward (Lightning:
            ``accumulate_grad_batches``).

    Returns:
        The mean loss and the token count of the step, or None when no loss was computed since the last call.

    Raises:
        RuntimeError: When the window holds no label token at all; on an accelerator as a device-side assertion, since
            the host does not wait for the count.
    """
    window: TokenWindow | None = module.__dict__.pop(_WINDOW_ATTRIBUTE, None)
    if window is None:
        return None
    totals = torch.stack([window.loss_sum, window.tokens])
    ranks = 1
    if group is not None:
        dist.all_reduce(totals, group=group)
        ranks = group.size()
    loss_sum, tokens = totals.unbind()
    assert_async(tokens > 0, "No label token in a whole optimizer step: every label is ignore_index. Check the labels.")
    scale_gradients(module.parameters(), ranks * loss_divisor * LOSS_UNIT / tokens)
    return TokenMean(loss=loss_sum / tokens, tokens=tokens, own=window)


def drop_token_windows(module: nn.Module) -> None:
    """Forget what :func:`token_mean_loss` has added up for ``module`` and the modules in it."""
    for submodule in module.modules():
        submodule.__dict__.pop(_WINDOW_ATTRIBUTE, None)


def _vocabulary_parallel_cross_entropy(logits: DTensor, labels: Tensor, ignore_index: int) -> Tensor:
    (placement,) = logits.placements
    if placement != Shard(logits.ndim - 1):
        raise ValueError(f"Logits are sharded as {placement}, not over the vocabulary; gather them: `.full_tensor()`.")
    group = logits.device_mesh.get_group()
    size = logits.size(-1)
    start, _ = get_shard_range(size, group.rank(), group.size())
    return _VocabularyParallelCrossEntropy.apply(logits.to_local(), labels, start, size, ignore_index, group)


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Two all-reduces of a few numbers per token in forward, none in backward (https://arxiv.org/abs/1909.08053)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, size: int, ignore_index: int, group: dist.ProcessGroup
    ) -> Tensor:
        wide = logits.float()
        has_label = labels != ignore_index
        in_range = (labels >= 0) & (labels < size)
        assert_async((in_range | ~has_label).all(), f"A label is not in the vocabulary's range of 0 to {size - 1}.")
        is_own = has_label & (labels >= start) & (labels < start + logits.size(-1))
        index = (labels - start).where(is_own, 0).unsqueeze(-1)
        # a rank may hold nothing of a small vocabulary
        largest = wide.amax(-1) if logits.size(-1) else wide.new_full(labels.shape, -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (wide - largest.unsqueeze(-1)).exp_()
        own = wide.gather(-1, index).squeeze(-1) - largest if logits.size(-1) else torch.zeros_like(largest)
        totals = torch.stack([exponentials.sum(-1), own.where(is_own, 0)])
        dist.all_reduce(totals, group=group)
        denominator, target = totals.unbind()
        ctx.save_for_backward(exponentials.div_(denominator.unsqueeze(-1)), index, is_own, has_label)
        ctx.dtype = logits.dtype
        return (denominator.log() - target).where(has_label, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, index, is_own, has_label = ctx.saved_tensors
        gradient = gradient.where(has_label, 0).unsqueeze(-1)
        result = probabilities * gradient
        if result.size(-1):
            result.scatter_add_(-1, index, -gradient.where(is_own.unsqueeze(-1), 0))
        return result.to(ctx.dtype), None, None, None, None, None


def _add_to_window(module: nn.Module, loss_sum: Tensor, tokens: Tensor) -> None:
    window: TokenWindow | None = module.__dict__.get(_WINDOW_ATTRIBUTE)
    if window is None:
        module.__dict__[_WINDOW_ATTRIBUTE] = TokenWindow(loss_sum.double(), tokens.double())
    else:
        window.loss_sum += loss_sum
        window.tokens += tokens
