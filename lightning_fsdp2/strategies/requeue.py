"""SLURM's signal before a job's time is over: save and queue the job again, at the end of a step, on all ranks.

Lightning does so inside of the signal handler: at any moment, on the ranks that got the signal, amid the collectives of
a step.
"""

from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override


class Requeue(Callback):
    """Takes the place of Lightning's signal handler, and calls it at the end of a step.

    Args:
        trainer: Its handlers must not be registered yet.
        is_anywhere: Tells whether something is true on any rank; all ranks call it.
    """

    def __init__(self, trainer: Trainer, is_anywhere: Callable[[bool], bool]) -> None:
        self._connector = cast(Any, trainer)._signal_connector
        self._save_and_requeue = self._connector._slurm_sigusr_handler_fn
        self._connector._slurm_sigusr_handler_fn = self._note
        self._is_anywhere = is_anywhere
        self._signal: Any = None
        self._step = 0
        self.is_saving = False

    def disconnect(self) -> None:
        """Give Lightning its handler back."""
        del self._connector._slurm_sigusr_handler_fn

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # amid accumulation: its gradients are in no checkpoint
        self._step = trainer.global_step
        if self._is_anywhere(self._signal is not None):
            signal, self._signal = self._signal, None
            self.is_saving = True
            try:
                self._save_and_requeue(signal, None)
            finally:
                self.is_saving = False

    def _note(self, signal: Any, frame: Any) -> None:
        rank_zero_info(f"Signal {signal}: a checkpoint will be saved and the job queued again at the end of the step.")
        self._signal = signal
