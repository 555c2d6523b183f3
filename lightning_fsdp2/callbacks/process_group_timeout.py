"""Callback that sets a short timeout for the collectives of training steps, so that a hang is found in minutes."""

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

_BACKENDS = {"gloo", "nccl"}  # backends whose timeout torch 2.11 to 2.15 can change


class ProcessGroupTimeout(Callback):
    """Callback that gives the collectives of training steps a shorter timeout than all other collectives.

    A collective of a training step takes seconds. If it takes minutes, another rank has failed or hangs. Other
    collectives may have good reasons to wait longer, such as data that rank 0 prepares, compilation or a slow disk.
    They keep the strategy's ``timeout``, which is half an hour by default. The idea comes from torchtitan
    (https://github.com/pytorch/torchtitan, ``trainer.py``).

    The short timeout starts with the second optimizer step of a fit. It does not apply during validation, while a
    checkpoint is saved, or between epochs. After each of these, the ranks first wait for each other under the long
    timeout. The short timeout must be longer than the slowest step, including its wait for data. It must also be longer
    than any other work that a single rank does between two batches.

    Args:
        train: Timeout of the collectives of training steps, shorter than the strategy's ``timeout``.

    Raises:
        ValueError: When ``train`` is not shorter than the strategy's ``timeout``, when the strategy is not one of this
            package, or when the backend's timeout cannot be changed.
    """

    def __init__(self, train: timedelta = timedelta(minutes=5)) -> None:
        if train <= timedelta(0):
            raise ValueError(f"ProcessGroupTimeout(train={str(train)!r}) must be longer than 0.")
        self.train = train
        self._first_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = cast(Any, trainer.strategy)
        if not hasattr(strategy, "set_group_timeout"):
            raise ValueError(
                f"ProcessGroupTimeout needs a strategy of lightning_fsdp2, not {type(strategy).__name__}; remove the"
                " callback."
            )
        if self.train >= strategy.group_timeout:
            raise ValueError(
                f"ProcessGroupTimeout(train={str(self.train)!r}) must be shorter than the timeout of"
                f" {type(strategy).__name__}, {str(strategy.group_timeout)!r}; change one of them."
            )
        backends = set(dist.BackendConfig(dist.Backend(dist.get_backend_config())).get_device_backend_map().values())
        if fixed := backends - _BACKENDS:
            raise ValueError(
                f"ProcessGroupTimeout: torch cannot change the timeout of {', '.join(sorted(fixed))}; remove the"
                f" callback, and set {type(strategy).__name__}(timeout=...)."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = cast(Any, trainer.strategy)
        if trainer.global_step == self._first_step or strategy.group_timeout == self.train:
            return
        # Wait here, under the long timeout, until slower ranks and their devices have caught up.
        # Otherwise, faster ranks would wait for slower ranks during a step, under the short timeout.
        if strategy.root_device.type != "cpu":
            torch.accelerator.synchronize(strategy.root_device)
        strategy.barrier("ProcessGroupTimeout")
        strategy.set_group_timeout(self.train)

    def _wait_long(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(Any, trainer.strategy).set_group_timeout(None)

    # saving a checkpoint needs no hook here, because the strategy itself sets the long timeout for it
    on_validation_start = on_train_epoch_end = on_train_end = _wait_long

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if getattr(trainer.strategy, "group_timeout", None) == self.train:
            self._wait_long(trainer, pl_module)
