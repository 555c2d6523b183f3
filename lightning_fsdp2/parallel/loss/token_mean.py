"""Mean of a loss over all label tokens of an optimizer step, on all ranks and in all micro-batches.

Averaging the mean losses of ranks and micro-batches would be wrong, because tokens in micro-batches with few labels
would count more than others. The right divisor is the number of label tokens (tokens with a label) in the whole step,
which is known only after the last micro-batch. Backward therefore starts from the *sum* of the token losses, divided by
a fixed constant. The gradients are divided by the number of label tokens once per step: after they are reduced, and
before they are clipped and used by the optimizer.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.compat.torch import assert_async
from lightning_fsdp2.labels import IGNORE_INDEX, shift_left
from lightning_fsdp2.parallel.data.gradients import scale_gradients
from lightning_fsdp2.parallel.loss.cross_entropy import token_cross_entropy
from lightning_fsdp2.parallel.loss.load_balance import LoadBalance

LOSS_UNIT = 1024
"""Constant by which sums of token losses are divided. It is a power of two, so the division has no rounding error."""

_WINDOW_ATTRIBUTE = "_lightning_fsdp2_token_window"


@dataclass
class TokenWindow:
    """Sum of this rank's token losses, and number of its label tokens, since the last optimizer step.

    Both are tensors on the device.
    """

    loss_sum: Tensor
    """Sum of the token losses. [] float64."""

    tokens: Tensor
    """Number of label tokens. [] float64, because float32 counts exactly only up to 2^24."""

    load_balance: Tensor | None = None
    """Sum of the auxiliary losses of micro-batches, each times the number of its label tokens on all ranks. [] float64.
    None without an auxiliary loss."""


@dataclass(frozen=True)
class TokenMean:
    """Mean loss and token count of one optimizer step, over all data and context parallel ranks.

    The tensors are on the device. The CPU has not waited for their values.
    """

    loss: Tensor
    """Mean loss per label token. [] float64."""

    tokens: Tensor
    """Number of label tokens. [] float64."""

    own: TokenWindow
    """Sums of this rank only."""

    load_balance: Tensor | None = None
    """Mean of the auxiliary losses of the step's micro-batches, weighted by their label tokens. [] float64.
    None without an auxiliary loss."""


def token_mean_loss(
    module: nn.Module,
    logits: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Compute a cross entropy that is averaged over all label tokens of the optimizer step.

    After backward, :func:`apply_token_mean_` must turn the gradients into the gradients of this mean. The strategies of
    this package call :func:`apply_token_mean_` for every ``module`` that was passed to :func:`token_mean_loss`. In a
    plain torch loop, call it yourself after the last backward of each step.

    Do not add other terms to this loss, because their gradients would also be divided by the number of label tokens. Do
    not use this function both for a module and for one of its submodules, because the submodule's gradients would be
    scaled twice.

    Args:
        module: Any module, usually the LightningModule. It holds the running sums until :func:`apply_token_mean_` is
            called.
        logits: [batch, sequence, vocabulary], any float dtype. The loss is computed in float32.
        labels: [batch, sequence], int64.
        shift: Whether position t predicts the label at position t + 1. False if the labels are already shifted.
        ignore_index: Value of ``labels`` at positions without a label.

    Returns:
        The sum of this rank's token losses, divided by ``LOSS_UNIT``, as a float32 scalar. Call ``backward`` on this
        loss; the mean loss is known only after the step.
    """
    if shift:
        labels = shift_left(labels, ignore_index)
    losses = token_cross_entropy(logits, labels, ignore_index=ignore_index, model=module)
    return reduce_token_losses(module, losses, labels != ignore_index)


def reduce_token_losses(module: nn.Module, losses: Tensor, has_label: Tensor) -> Tensor:
    """Compute the loss of :func:`token_mean_loss` from token losses that were already computed.

    Args:
        module: See :func:`token_mean_loss`.
        losses: [batch, sequence], token losses, which are 0 where there is no label.
        has_label: [batch, sequence], bool: True where there is a label.

    Returns:
        The sum of this rank's token losses, divided by ``LOSS_UNIT``: a scalar with the dtype of ``losses``.
    """
    loss_sum = losses.sum()
    if torch.is_grad_enabled():
        _add_to_window(module, loss_sum.detach(), has_label.sum())
    return loss_sum / LOSS_UNIT


def add_load_balance(module: nn.Module, balance: LoadBalance, coefficient: float) -> Tensor:
    """Return an auxiliary loss in a form that can be added to the result of :func:`reduce_token_losses`.

    That result is a sum over label tokens, so the auxiliary loss of the micro-batch is multiplied by the number of its
    label tokens. The auxiliary loss of a step is then the mean over its micro-batches, weighted by their label tokens.

    Args:
        module: See :func:`token_mean_loss`.
        balance: Auxiliary loss of the micro-batch.
        coefficient: Number to multiply the auxiliary loss with.

    Returns:
        This rank's part of the auxiliary loss, divided by ``LOSS_UNIT``, as a float32 scalar.
    """
    window: TokenWindow | None = module.__dict__.get(_WINDOW_ATTRIBUTE)
    if window is not None:
        weighted = balance.loss * balance.label_tokens
        window.load_balance = weighted if window.load_balance is None else window.load_balance + weighted
    return (coefficient / LOSS_UNIT * balance.label_tokens * balance.summand).float()


@torch.no_grad()
def apply_token_mean_(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, loss_divisor: float = 1.0
) -> TokenMean | None:
    """Scale the gradients of :func:`token_mean_loss`, so that they are the gradients of the step's mean loss per token.

    Also reset the running sums. Call this function on every rank, once per optimizer step, after the last backward and
    before clipping. It needs one all-reduce of two numbers, and scales the gradients in place. The CPU does not wait
    for the device.

    Args:
        module: The module that was passed to :func:`token_mean_loss`. The gradients of its parameters must be averages
            over ``group``, as FSDP2 and DDP compute them.
        group: Process group of the data and context parallel ranks (the ``"dp_cp"`` axis). None if there is only one
            process.
        loss_divisor: Number by which the loss of each micro-batch was divided before backward. In Lightning, this is
            ``accumulate_grad_batches``.

    Returns:
        The mean loss and the number of label tokens of the step, or None if :func:`token_mean_loss` was not called
        since the last call of this function.

    Raises:
        RuntimeError: If the step had no label token on any rank. On an accelerator, this is a device-side assertion,
            because the CPU does not wait for the number of tokens.
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
    load_balance = None if window.load_balance is None else window.load_balance / tokens
    return TokenMean(loss=loss_sum / tokens, tokens=tokens, own=window, load_balance=load_balance)


def drop_token_windows(module: nn.Module) -> None:
    """Discard the running sums of :func:`token_mean_loss` for ``module`` and all modules in it."""
    for submodule in module.modules():
        submodule.__dict__.pop(_WINDOW_ATTRIBUTE, None)


def find_token_windows(module: nn.Module) -> dict[str, TokenWindow]:
    """Return the running sums of :func:`token_mean_loss` for ``module`` and all modules in it, by the module's name."""
    return {
        name: submodule.__dict__[_WINDOW_ATTRIBUTE]
        for name, submodule in module.named_modules()
        if _WINDOW_ATTRIBUTE in submodule.__dict__
    }


def set_token_window(module: nn.Module, name: str, window: TokenWindow) -> None:
    """Set the running sums of :func:`token_mean_loss` for the submodule ``name`` of ``module``."""
    module.get_submodule(name).__dict__[_WINDOW_ATTRIBUTE] = window


def _add_to_window(module: nn.Module, loss_sum: Tensor, tokens: Tensor) -> None:
    window: TokenWindow | None = module.__dict__.get(_WINDOW_ATTRIBUTE)
    if window is None:
        module.__dict__[_WINDOW_ATTRIBUTE] = TokenWindow(loss_sum.double(), tokens.double())
    else:
        window.loss_sum += loss_sum
        window.tokens += tokens
