"""Callback that logs the mean loss and the highest loss over all ranks."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_fsdp2.callbacks.logging_steps import (
    gather_numbers,
    is_logging_step,
    is_of_logging_step,
    log_metrics,
)
from lightning_fsdp2.parallel.loss.token_mean import TokenMean


class LossOverRanks(Callback):
    """Callback that logs ``loss/mean`` and ``loss/max`` over the ranks, on the Trainer's logging steps.

    A maximum far above the mean points to a problem with the data of one rank. For a module that trains with
    :func:`~lightning_fsdp2.token_mean_loss`, such as ``CausalLM``, losses are means over label tokens: ``loss/mean``
    over the tokens of all ranks, and ``loss/max`` over the tokens of the rank with the highest loss. For any other
    module, the loss of a rank is the result of ``training_step``, averaged over the micro-batches of the step.
    """

    def __init__(self) -> None:
        self._loss: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_of_logging_step(trainer):
            return
        mean = getattr(trainer.strategy, "token_mean", None)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if mean is None and isinstance(loss, Tensor):
            # adding up the losses gives their mean, since the Trainer has divided each by the number of micro-batches
            self._loss = loss if self._loss is None else self._loss + loss
        if is_logging_step(trainer):
            self._report(trainer, mean)
            self._loss = None

    def _report(self, trainer: Trainer, mean: TokenMean | None) -> None:
        if mean is not None:
            sums, counts = gather_numbers(trainer, (mean.own.loss_sum, mean.own.tokens)).unbind(1)
        elif self._loss is not None:
            sums, counts = gather_numbers(trainer, (self._loss, 1.0)).unbind(1)
        else:
            return
        highest = (sums / counts)[counts > 0].max()
        log_metrics(trainer, {"loss/mean": float(sums.sum() / counts.sum()), "loss/max": float(highest)})
