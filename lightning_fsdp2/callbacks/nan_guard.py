"""Callback that stops a run before NaN or infinite gradients can spoil the weights."""

import math
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp2.callbacks.gradient_norm import (
    GradientNorm,
    ignore_clipping,
    must_measure,
    observe_clipping,
    reports_norm,
)
from lightning_fsdp2.compat.torch import assert_async

_REMEDY = (
    "No weight was changed. Start a new run from the last checkpoint's weights with a lower learning rate, or resume"
    " without the data of this step, or with Trainer(detect_anomaly=True), which names the operation."
)


class NaNGuard(Callback):
    """Callback that stops all ranks before an optimizer step if the loss or the gradients are NaN or infinite.

    It checks the gradient norm that clipping computes (``Trainer(gradient_clip_val=...)``) and, for modules that train
    with :func:`~lightning_fsdp2.token_mean_loss`, the mean loss. Every step computes these values anyway. They are the
    same on every rank, so all ranks stop in the same step. Without clipping by norm, gradients are checked only on the
    Trainer's logging steps.

    The check does not make the host wait for the device. On an accelerator, the run ends with a device-side assertion.
    The next call that waits for the device raises the error, and the message is on stderr. torchtitan does the same
    (https://github.com/pytorch/torchtitan, ``trainer.py``). On a CPU, the error is raised at once.

    Raises:
        RuntimeError: On every rank, when a checked value is NaN or infinite. The message names the step.
    """

    def __init__(self) -> None:
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        observe_clipping(trainer, self._check_norm)
        if not reports_norm(trainer) and pl_module.automatic_optimization:
            rank_zero_info(
                "NaNGuard: gradients are checked on logging steps only"
                f" (log_every_n_steps={cast(Any, trainer).log_every_n_steps}); set Trainer(gradient_clip_val=...) to"
                " check every step."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ignore_clipping(trainer, self._check_norm)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step + 1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if (mean := getattr(trainer.strategy, "token_mean", None)) is not None:
            self._check("mean loss", mean.loss)
        if must_measure(trainer):
            callbacks = (callback for callback in cast(Any, trainer).callbacks if isinstance(callback, GradientNorm))
            self._check_norm(next(callbacks, GradientNorm()).measure(trainer, optimizer))

    def _check_norm(self, norm: Tensor) -> None:
        self._check("norm of the gradients", norm)

    def _check(self, name: str, value: Tensor) -> None:
        # `value < math.inf` is false for infinity and for NaN; the loss and the norm are never minus infinity
        assert_async(value < math.inf, f"NaNGuard: the {name} of step {self._step} is not finite. {_REMEDY}")
