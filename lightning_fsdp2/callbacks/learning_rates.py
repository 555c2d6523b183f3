"""Callback that logs the learning rates of the optimizer steps."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_fsdp2.callbacks.logging_steps import is_logging_step, log_metrics


class LearningRates(Callback):
    """Callback that logs each parameter group's learning rate as ``learning_rate/group_<i>``, on logging steps.

    With several optimizers, the names are ``learning_rate/optimizer_<i>/group_<j>``. The logged rate is the rate that
    the step itself used. In contrast, Lightning's ``LearningRateMonitor`` logs the rate of the next step, and logs
    nothing if there is no scheduler.
    """

    def __init__(self) -> None:
        self._used: dict[int, list[float]] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # read the rates here, since schedulers step before `on_train_batch_end`
        if is_logging_step(trainer):
            self._used[id(optimizer)] = [float(group["lr"]) for group in optimizer.param_groups]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        used, self._used = self._used, {}
        if not used or not is_logging_step(trainer):
            return
        several = len(trainer.optimizers) > 1
        metrics = {}
        for number, optimizer in enumerate(trainer.optimizers):
            prefix = f"learning_rate/optimizer_{number}" if several else "learning_rate"
            for group, rate in enumerate(used.get(id(optimizer), ())):
                metrics[f"{prefix}/group_{group}"] = rate
        log_metrics(trainer, metrics)
