"""Progress bar that also shows the speed and the memory use of training, or writes them into a log file."""

from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.progress import TimeRemainingColumn
from typing_extensions import override

from lightning_fsdp2.callbacks.expert_load import ExpertLoad
from lightning_fsdp2.callbacks.logging_steps import is_logging_step
from lightning_fsdp2.callbacks.memory_usage import MemoryUsage
from lightning_fsdp2.callbacks.standard_output import StandardOutput
from lightning_fsdp2.callbacks.throughput import Throughput
from lightning_fsdp2.compat.lightning import count_batches_of_epoch

_BAR_WIDTH = 6


class TrainingProgressBar(RichProgressBar):
    """Progress bar like Lightning's ``RichProgressBar`` that also shows tokens per second, MFU and memory.

    These three values come from the callbacks ``Throughput`` and ``MemoryUsage``, if the Trainer has them. With
    ``ExpertLoad``, the bar also shows the highest load of an expert, as a multiple of the mean load. The bar updates
    its values only after the Trainer's logging steps, so that it does not wait for the device in other steps.

    If the output is not a terminal but a file, as in a SLURM job, the log gets a line with the same values after each
    logging step and each validation.

    Args:
        refresh_rate: Number of times per second that the bar is drawn; 0 draws no bar.
        leave: Whether the bar of an epoch stays on the screen after the epoch.
    """

    def __init__(self, refresh_rate: int = 4, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave, console_kwargs={"file": StandardOutput()})
        self._shown: dict[str, Any] = {}
        self._is_due = True
        self._line = ""  # last line in the log, if there is no terminal

    @override
    def configure_columns(self, trainer: Trainer) -> list[Any]:
        # with Lightning's column widths, the metrics would wrap into lines of one word each
        description, bar, batches, *_ = super().configure_columns(trainer)
        bar.bar_width = _BAR_WIDTH
        return [description, bar, batches, TimeRemainingColumn()]

    @property
    @override
    def total_train_batches(self) -> int | float:
        # Lightning takes the number of remaining steps as the total number of batches.
        # This number is wrong if a step has several batches, or if the run was resumed.
        trainer: Any = self.trainer
        if trainer.max_epochs != -1 or trainer.max_steps < 0:
            return super().total_train_batches
        steps = trainer.max_steps - trainer.global_step
        done = count_batches_of_epoch(trainer) // trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, (done + steps) * trainer.accumulate_grad_batches)

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning would write "Epoch 0/-2" if `max_steps` ends the run
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # update the bar here: the previous step has been logged, and logging has already waited for the device
        if self._is_due:
            self._update_metrics(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._is_due = is_logging_step(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_due = True
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_due = True
        super().on_validation_end(trainer, pl_module)

    @override
    def _update_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_due = self._is_due
        super()._update_metrics(trainer, pl_module)
        if is_due and self.is_enabled and self._shown and not trainer.sanity_checking and not _has_terminal():
            line = f"Epoch {trainer.current_epoch}, {_describe_step(trainer)}: {_format_metrics(self._shown)}"
            if line != self._line:  # the end of an epoch may have nothing new
                rank_zero_info(line)
            self._line = line

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if self._is_due:
            self._is_due = False
            own = super().get_metrics(trainer, pl_module)
            own.pop("v_num", None)
            self._shown = {**{name.removeprefix("train/"): value for name, value in own.items()}, **_get_costs(trainer)}
        return self._shown


def _has_terminal() -> bool:
    console = Console()
    return console.is_interactive or console.is_jupyter


def _describe_step(trainer: Any) -> str:
    return f"step {trainer.global_step}" + (f"/{trainer.max_steps}" if trainer.max_steps > 0 else "")


def _format_metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name} {f'{v:.4g}' if isinstance(v, float) else v}" for name, v in metrics.items())


def _get_costs(trainer: Trainer) -> dict[str, str]:
    numbers: dict[str, float] = {}
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, Throughput | MemoryUsage | ExpertLoad):
            numbers |= callback.latest
    costs = {}
    if tokens := numbers.get("throughput/tokens_per_second"):
        costs["tok/s"] = _format_count(tokens)
    if mfu := numbers.get("throughput/mfu"):
        costs["mfu"] = f"{mfu:.1%}"
    if memory := numbers.get("memory/reserved_gib", numbers.get("memory/process_gib")):
        costs["mem"] = f"{memory:.1f}GiB" if memory < 10 else f"{memory:.0f}GiB"
    if load := numbers.get("experts/max_load"):
        costs["load"] = f"{load:.1f}x"
    return costs


def _format_count(number: float) -> str:
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if number >= 10 * size:
            return f"{number / size:.1f}{unit}"
    return f"{number:,.0f}"
