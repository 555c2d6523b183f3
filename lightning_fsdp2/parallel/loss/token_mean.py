"""The mean of a loss over all label tokens of an optimizer step, whatever their split over ranks and micro-batches.

A mean of means weighs a token by the company it happens to be in: ranks and micro-batches with few labels count as
much as full ones. Dividing by the right number needs the label count of the whole window, which is known only once the
last micro-batch has been read. So the loss that enters backward is a *sum* over tokens (over a fixed constant), and
the gradients are divided by the count once, after they were reduced and before anybody looks at them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.compat.torch import assert_async
from lightning_fsdp2.labels import IGNORE_INDEX, shift_left
from lightning_fsdp2.parallel.data.gradients import scale_gradients
from lightning_fsdp2.parallel.loss.cross_entropy import token_cross_entropy

LOSS_UNIT = 1024
"""Token losses are summed in this unit, a power of two so that rounding stays that of the sum itself."""

_WINDOW_ATTRIBUTE = "_lightning_fsdp2_token_window"


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


def _add_to_window(module: nn.Module, loss_sum: Tensor, tokens: Tensor) -> None:
    window: TokenWindow | None = module.__dict__.get(_WINDOW_ATTRIBUTE)
    if window is None:
        module.__dict__[_WINDOW_ATTRIBUTE] = TokenWindow(loss_sum.double(), tokens.double())
    else:
        window.loss_sum += loss_sum
        window.tokens += tokens
