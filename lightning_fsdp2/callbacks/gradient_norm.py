"""Callback that logs the norm of the gradients before clipping."""

from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp2.callbacks.logging_steps import is_logging_step, log_metrics
from lightning_fsdp2.parallel.data.gradients import get_total_norm


class GradientNorm(Callback):
    """Callback that logs ``gradients/norm``, the norm of all gradients before clipping, on the Trainer's logging steps.

    If the Trainer clips by norm under a strategy of this package, the callback reuses the norm that clipping computes.
    Otherwise, the callback computes the norm on logging steps. Under manual optimisation, it logs the norm that the
    last call of ``self.clip_gradients`` computed.
    """

    def __init__(self) -> None:
        self._norm: Tensor | None = None  # of the current batch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._norm = None
        observe_clipping(trainer, self._keep)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ignore_clipping(trainer, self._keep)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if must_measure(trainer):
            self.measure(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        norm, self._norm = self._norm, None
        if norm is not None and is_logging_step(trainer):
            log_metrics(trainer, {"gradients/norm": float(norm)})

    def measure(self, trainer: Trainer, optimizer: Optimizer) -> Tensor:
        """Return the norm of the gradients that ``optimizer`` is about to use. Every rank must call this.

        Further calls for the same batch return the norm from the first call.

        Returns:
            A float32 scalar tensor on the device.
        """
        if self._norm is None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            # a pipeline stage without trained parameters takes part, too
            self._norm = get_total_norm(parameters, pipeline=getattr(trainer.precision_plugin, "pipeline", None))
        return self._norm

    def _keep(self, norm: Tensor) -> None:
        self._norm = norm


def must_measure(trainer: Trainer) -> bool:
    """Return whether this is a logging step for which a callback must compute the gradient norm itself.

    A callback does not compute the norm if clipping reports it, or under manual optimisation.
    """
    return trainer.lightning_module.automatic_optimization and is_logging_step(trainer) and not reports_norm(trainer)


def reports_norm(trainer: Trainer) -> bool:
    """Return whether gradients are clipped by norm under a strategy that supports :func:`observe_clipping`."""
    clips = cast(Any, trainer).gradient_clip_val and cast(Any, trainer).gradient_clip_algorithm in (None, "norm")
    return bool(clips) and hasattr(trainer.precision_plugin, "norm_observers")


def observe_clipping(trainer: Trainer, observer: Callable[[Tensor], None]) -> None:
    """Register the function ``observer``, to be called with the gradient norm whenever gradients are clipped by norm.

    The norm is a tensor on the device.
    """
    # remove the observer first, because it may still be registered after a run that ended with an error
    ignore_clipping(trainer, observer)
    if hasattr(trainer.precision_plugin, "norm_observers"):
        cast(Any, trainer.precision_plugin).norm_observers.append(observer)


def ignore_clipping(trainer: Trainer, observer: Callable[[Tensor], None]) -> None:
    """Remove the function ``observer`` if :func:`observe_clipping` has registered it."""
    if observer in getattr(trainer.precision_plugin, "norm_observers", ()):
        cast(Any, trainer.precision_plugin).norm_observers.remove(observer)
