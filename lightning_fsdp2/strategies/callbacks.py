"""The Trainer's callbacks: those that a strategy refuses, sets right, and adds to every fit."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fsdp2.callbacks.preemption import Preemption
from lightning_fsdp2.callbacks.process_group_timeout import ProcessGroupTimeout
from lightning_fsdp2.compat.lightning import end_by_sigterm, give_signals_back, logs_graph


class OwnCallbacks:
    """Those of a strategy, in a fit whose Trainer has none of their kind.

    Args:
        strategy: Its name, for errors.
        steady_timeout: Of a :class:`ProcessGroupTimeout`; None for none.
    """

    def __init__(self, strategy: str, steady_timeout: timedelta | None) -> None:
        self._strategy = strategy
        self._steady_timeout = steady_timeout
        self._added: list[Callback] = []

    def attach(self, trainer: Trainer) -> None:
        """Add them behind the Trainer's own; an evaluation needs none, and saves nothing if it is told to end.

        Raises:
            ValueError: When the Trainer has what the strategy is told to add.
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
                f"{self._strategy}(steady_timeout={str(self._steady_timeout)!r}) is a ProcessGroupTimeout, and the"
                " Trainer has one already; remove one of them."
            )
        if not has_preemption:
            self._added.append(Preemption())
        if self._steady_timeout is not None:
            self._added.append(ProcessGroupTimeout(self._steady_timeout))
        cast(Any, trainer).callbacks += self._added

    def detach(self, trainer: Trainer) -> None:
        """Give the Trainer its own list back."""
        for callback in self._added:
            cast(Any, trainer).callbacks.remove(callback)
        self._added.clear()
        give_signals_back(trainer)


def refuse_callbacks(trainer: Trainer, refused: Mapping[type[Callback], str]) -> None:
    """Refuse callbacks of these classes.

    Args:
        trainer: Of a run.
        refused: Why, and what to do instead, by class.

    Raises:
        ValueError: Naming the first.
    """
    for callback in cast(Any, trainer).callbacks:
        for kind, reason in refused.items():
            if isinstance(callback, kind):
                raise ValueError(f"Trainer(callbacks=[{type(callback).__name__}(...)]) {reason}")


def refuse_graphs(trainer: Trainer) -> None:
    """Refuse loggers that trace a module which is then sharded: its forward is a collective, and has no trace.

    Raises:
        ValueError: Naming the first.
    """
    for logger in cast(Any, trainer).loggers:
        if logs_graph(logger):
            raise ValueError(
                f"{type(logger).__name__}(log_graph=True) traces the module on one rank, and a sharded one has no"
                " forward there; leave it out, or log the graph of a module that no Trainer has had"
                " (`logger.log_graph(module)`)."
            )


def set_available_flops(trainer: Trainer, dtype: torch.dtype) -> None:
    """Lightning's monitor takes all precisions but its own for float32, and the utilisation would be too high."""
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, ThroughputMonitor):
            callback.available_flops = get_available_flops(trainer.strategy.root_device, dtype)
            for throughput in callback._throughputs.values():
                throughput.available_flops = callback.available_flops
