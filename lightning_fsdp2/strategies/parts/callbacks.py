"""Changes to the Trainer's callbacks: a strategy adds callbacks to every fit, and corrects throughput monitors."""

from datetime import timedelta
from typing import Any, cast

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fsdp2.callbacks.preemption import Preemption
from lightning_fsdp2.callbacks.process_group_timeout import ProcessGroupTimeout
from lightning_fsdp2.compat.lightning import end_by_sigterm, give_signals_back
from lightning_fsdp2.compat.lightning import set_available_flops as set_monitor_flops


class OwnCallbacks:
    """Callbacks that a strategy adds to a fit, unless the Trainer already has one of the same kind.

    Args:
        strategy: Name of the strategy, for error messages.
        steady_timeout: Timeout for an added :class:`ProcessGroupTimeout`. None adds no such callback.
    """

    def __init__(self, strategy: str, steady_timeout: timedelta | None) -> None:
        self._strategy = strategy
        self._steady_timeout = steady_timeout
        self._added: list[Callback] = []

    def attach(self, trainer: Trainer) -> None:
        """Add the strategy's callbacks after the Trainer's own, if the stage is a fit.

        An evaluation gets no callbacks, since it has nothing to save. During an evaluation, SIGTERM ends the process.

        Raises:
            ValueError: When ``steady_timeout`` is set but the Trainer already has a :class:`ProcessGroupTimeout`.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            end_by_sigterm(trainer)
            return
        has_preemption, has_timeout = (
            any(isinstance(callback, kind) for callback in cast(Any, trainer).callbacks)
            for kind in (Preemption, ProcessGroupTimeout)
        )
        if has_timeout and self._steady_timeout is not None:
            raise ValueError(
                f"{self._strategy}(steady_timeout={str(self._steady_timeout)!r}) adds a ProcessGroupTimeout, but the"
                " Trainer already has one; remove one of them."
            )
        if not has_preemption:
            self._added.append(Preemption())
        if self._steady_timeout is not None:
            self._added.append(ProcessGroupTimeout(self._steady_timeout))
        cast(Any, trainer).callbacks += self._added

    def detach(self, trainer: Trainer) -> None:
        """Remove the added callbacks, and restore the Trainer's signal handling."""
        for callback in self._added:
            cast(Any, trainer).callbacks.remove(callback)
        self._added.clear()
        give_signals_back(trainer)


def set_available_flops(trainer: Trainer, dtype: torch.dtype) -> None:
    """Tell Lightning's throughput monitors the peak FLOP/s of the device for ``dtype``.

    With a precision plugin that is not Lightning's own, Lightning would assume float32 and overstate the utilisation.
    """
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, ThroughputMonitor):
            set_monitor_flops(callback, get_available_flops(trainer.strategy.root_device, dtype))
