"""Helpers for callbacks that log metrics on the Trainer's logging steps."""

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_fsdp2.compat.lightning import get_logged_step, is_accumulating, logs_current_step


def is_logging_step(trainer: Trainer) -> bool:
    """Return whether the current batch is the last micro-batch of a step that the Trainer logs.

    Callbacks communicate between ranks and wait for the device only in such a batch.
    """
    return is_of_logging_step(trainer) and not is_accumulating(trainer)


def is_of_logging_step(trainer: Trainer) -> bool:
    """Return whether the current batch belongs to a step that the Trainer logs."""
    return logs_current_step(trainer)


def gather_numbers(trainer: Trainer, numbers: Sequence[float | Tensor]) -> Tensor:
    """Gather a few numbers from every rank, with one collective and one wait for the device. All ranks must call this.

    Args:
        trainer: Trainer of the run.
        numbers: This rank's numbers, as Python numbers or as scalar tensors on any device.

    Returns:
        A float64 tensor of shape [ranks, numbers], in host memory.
    """
    strategy = trainer.strategy
    device = strategy.root_device
    row = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    return strategy.all_gather(row).reshape(-1, len(numbers)).cpu()


def log_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Pass metrics of the current step to the loggers, and to callbacks that monitor a metric.

    ``self.log`` would store the metrics as tensors on the device. Lightning would then read these tensors after every
    batch, and each read makes the host wait for the device.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=get_logged_step(trainer))
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
