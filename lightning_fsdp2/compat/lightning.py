"""Access to private names of Lightning, with the reasons for using them. Tested with lightning 2.6.6."""

import os
import signal
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.compat.ledger import get_ledger

DDPForwardRedirection = _DDPForwardRedirection
"""Redirection that runs a module's step inside the forward of its DDP wrapper."""

SubprocessScriptLauncher = _SubprocessScriptLauncher
"""Lightning's launcher for ``python script.py``."""


load_from_state = _load_state
"""Function that builds a module or data module from a checkpoint and its hyperparameters."""

migrate_checkpoint = _pl_migrate_checkpoint
"""Function that converts a checkpoint of an earlier version of Lightning to the current format."""

call_module_hook = call._call_lightning_module_hook
"""Function with which the Trainer calls a hook of its module."""


def logs_graph(logger: Logger) -> bool:
    """Return whether ``logger`` traces the module's forward to log its graph. Loggers trace on rank 0 only."""
    return isinstance(logger, TensorBoardLogger) and bool(logger._log_graph)


def set_logged_hyperparameters(owner: Any, values: dict[str, Any]) -> None:
    """Replace the hyper-parameters that loggers get, of a LightningModule or a data module. Checkpoints keep theirs."""
    owner._hparams_initial = type(owner._hparams_initial)(values)


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Set ``module.device_mesh``, as Lightning's own ``ModelParallelStrategy`` does."""
    module._device_mesh = mesh


def set_device(module: LightningModule, device: torch.device) -> None:
    """Set ``module.device``. Lightning sets it only when it moves a module, and it never moves sharded modules."""
    module._device = device


def has_trainer(module: LightningModule | None) -> bool:
    """Return whether ``module`` has a Trainer. It has none if Lightning rejected the arguments of ``fit``."""
    return module is not None and module._trainer is not None


def decide_on_validation_together(trainer: Trainer, decide: Callable[[bool], bool]) -> None:
    """Let all ranks decide together when to validate, if ``val_check_interval`` is a time interval.

    Otherwise each rank would decide by its own clock, and some ranks could validate while others train.

    Args:
        trainer: Trainer that runs ``fit``.
        decide: Function that returns the common decision of all ranks. Its argument is whether a validation is due by
            this rank's clock. All ranks call the function after each batch.
    """
    loop = cast(Any, trainer).fit_loop.epoch_loop
    is_due = type(loop)._should_check_val_fx
    if cast(Any, trainer)._val_check_time_interval is not None:
        check = _then(partial(is_due, loop), decide)
        get_ledger(trainer).replace(loop, "_should_check_val_fx", check, reason="each rank has a clock of its own")


def set_available_flops(monitor: ThroughputMonitor, flops: int | None) -> None:
    """Set the peak FLOP/s of a device in Lightning's throughput monitor."""
    monitor.available_flops = flops
    for throughput in monitor._throughputs.values():
        throughput.available_flops = flops


def get_loaders(trainer: Trainer) -> list[Any]:
    """Return the training data loaders of ``fit``."""
    loader = cast(Any, trainer).fit_loop._combined_loader
    return [] if loader is None else loader.flattened


def get_loader_states(trainer: Trainer) -> list[Any]:
    """Return the states of the training data loaders, in the form in which Lightning checkpoints store them."""
    loader = cast(Any, trainer).fit_loop._combined_loader
    return [] if loader is None else loader._state_dicts()


def restore_loader_states(trainer: Trainer) -> None:
    """Load the states of the training data loaders from the checkpoint if Lightning has failed to do so.

    Lightning fails if ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``, because reading this
    attribute builds the loaders too early (https://github.com/Lightning-AI/pytorch-lightning/issues/20550).
    """
    fit_loop = cast(Any, trainer).fit_loop
    if fit_loop._combined_loader_states_to_load:
        fit_loop._load_combined_loader_states()
        iter(fit_loop._data_fetcher)


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether gradient accumulation continues, so that no optimizer step follows the current micro-batch."""
    return bool(trainer.fit_loop._should_accumulate())


def logs_current_step(trainer: Trainer) -> bool:
    """Return whether the Trainer logs at the current step, either by ``log_every_n_steps`` or because the run ends."""
    return bool(cast(Any, trainer)._logger_connector.should_update_logs)


def get_logged_step(trainer: Trainer) -> int:
    """Return the step number that the Trainer currently passes to loggers.

    ``global_step`` is a different number: it counts the steps of all optimizers, and is one ahead of the logged step.
    """
    return int(cast(Any, trainer).fit_loop.epoch_loop._batches_that_stepped)


def count_logged_steps(fit_loop: dict[str, Any], trainer: Trainer) -> int:
    """Return the step that the next batch of a run logs, if the run resumes from this state of its fit loop.

    Lightning's own count is one less in a checkpoint that a hook of a step saved, and is right in one saved later.
    """
    if trainer.lightning_module.automatic_optimization:
        progress = fit_loop["epoch_loop.automatic_optimization.optim_progress"]
        return int(progress["optimizer"]["step"]["total"]["completed"])
    counted = fit_loop["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
    return int(min(counted + 1, fit_loop["epoch_loop.batch_progress"]["total"]["ready"]))


def set_logged_step(trainer: Trainer, step: int) -> None:
    """Set the step number that the Trainer passes to loggers."""
    cast(Any, trainer).fit_loop.epoch_loop._batches_that_stepped = step


def count_batches_of_epoch(trainer: Trainer) -> int:
    """Return how many batches of the current epoch have begun, those of a run that was resumed included."""
    loop = cast(Any, trainer).fit_loop
    epoch = loop.epoch_progress.current
    # in `on_train_epoch_start`, the batches are still those of the epoch before
    return int(loop.epoch_loop.batch_progress.current.ready) if epoch.ready == epoch.started else 0


def watch_fetches(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` around each ``next(dataloader)`` in training.

    Lightning calls its profiler at the same points. The time from the end of one batch to the start of the next would
    overstate the cost of a fetch, because it includes logging, saving checkpoints, and waiting for the device when
    Lightning broadcasts SIGTERM.
    """
    loop, ledger = cast(Any, trainer).fit_loop.epoch_loop, get_ledger(trainer)
    reason = "Lightning calls no callback hook around the fetch of a batch"
    before_fetch = _call_both(partial(type(loop)._on_before_fetch, loop), before)
    after_fetch = _call_both(after, partial(type(loop)._on_after_fetch, loop))
    ledger.replace(loop, "_on_before_fetch", before_fetch, reason=reason)
    ledger.replace(loop, "_on_after_fetch", after_fetch, reason=reason)


def ignore_fetches(trainer: Trainer) -> None:
    """Undo :func:`watch_fetches`, so that Lightning no longer calls ``before`` and ``after``."""
    get_ledger(trainer).put_back(cast(Any, trainer).fit_loop.epoch_loop, "_on_before_fetch", "_on_after_fetch")


def take_signals(trainer: Trainer, note: Callable[[int, Any], None]) -> None:
    """Make Lightning register ``note`` as the handler of SIGTERM and of SLURM's signal, instead of its own handlers.

    Lightning's own handlers run collectives at whatever point of the code the signal interrupts. Without these
    handlers, Lightning's broadcast of SIGTERM in every micro-batch serves no purpose. The broadcast is removed too,
    because it makes the CPU wait for the device.

    Raises:
        RuntimeError: If this version of Lightning lacks one of the replaced methods.
    """
    connector, loop = cast(Any, trainer)._signal_connector, cast(Any, trainer).fit_loop.epoch_loop
    ledger, reason = get_ledger(trainer), "Lightning's signal handlers communicate in whatever code the rank is running"
    ledger.replace(connector, "_sigterm_notifier_fn", note, reason=reason)
    ledger.replace(connector, "_slurm_sigusr_handler_fn", note, reason=reason)
    ledger.replace(loop, "_broadcast_sigterm_tensor", lambda: None, reason="the CPU waits for it in each micro-batch")


def end_by_sigterm(trainer: Trainer) -> None:
    """Let SIGTERM end the process during an evaluation, unless the program has its own handler; ignore SLURM's signal.

    This replaces Lightning's handlers. They run collectives at whatever point of the code the signal interrupts, and an
    evaluation does not use the results of these collectives.
    """
    # Lightning calls the program's own handler, if there is one, after `end`. In that case, `end` must not kill the
    # process.
    is_handled = signal.getsignal(signal.SIGTERM) not in (None, signal.SIG_DFL)
    launcher = trainer.strategy.launcher

    def end(number: int, frame: Any) -> None:
        if isinstance(launcher, SubprocessScriptLauncher):  # pass the signal on to the ranks that the launcher started
            launcher.kill(signal.Signals(number))
        if not is_handled:
            die_of(number)

    connector, ledger = cast(Any, trainer)._signal_connector, get_ledger(trainer)
    reason = "Lightning's signal handlers communicate, and an evaluation does not use their result"
    ledger.replace(connector, "_sigterm_notifier_fn", end, reason=reason)
    ledger.replace(connector, "_slurm_sigusr_handler_fn", lambda *args: None, reason=reason)


def die_of(number: int) -> None:
    """Kill this process with the signal ``number``, after restoring the signal's default handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def give_signals_back(trainer: Trainer) -> None:
    """Undo :func:`take_signals` or :func:`end_by_sigterm`, so that Lightning handles signals again."""
    connector, loop = cast(Any, trainer)._signal_connector, cast(Any, trainer).fit_loop.epoch_loop
    get_ledger(trainer).put_back(connector, "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
    get_ledger(trainer).put_back(loop, "_broadcast_sigterm_tensor")


def end_signal_handling(trainer: Trainer) -> None:
    """Restore the program's own signal handlers now, before the Trainer restores them at the end of its teardown."""
    cast(Any, trainer)._signal_connector.teardown()


class StepBoundary:
    """Boundary between two batches, where training can stop and resume without skipping any work.

    At the boundary, Lightning has run the hooks of the last batch and logged its metrics. A validation, an update of
    ``ReduceLROnPlateau`` or the end of the epoch may still be due. If a checkpoint is saved at this point, plain
    Lightning skips this work on resuming. To prevent this, the code that saves the checkpoint sets ``is_left`` to True
    during the save. A run that resumes from this checkpoint then starts with the work that is still due.

    Callbacks and schedulers monitor metrics that Lightning does not save. This class adds these metrics to all
    checkpoints of the run.

    Args:
        trainer: Trainer whose ``fit`` has not loaded a checkpoint yet.
        behind_batch: Function that is called at each boundary.
    """

    _REPLACED = ("on_save_checkpoint", "on_load_checkpoint", "advance", "on_advance_end")

    def __init__(self, trainer: Trainer, behind_batch: Callable[[], None]) -> None:
        self.is_left = False
        self._trainer: Any = trainer
        self._loop = self._trainer.fit_loop.epoch_loop
        self._behind_batch = behind_batch
        self._has_metrics = False
        self._is_entered = False
        reason = "a run that resumes between two batches would skip the work that follows the first one"
        for name in self._REPLACED:
            get_ledger(trainer).replace(self._loop, name, getattr(self, f"_{name}"), reason=reason)

    def remove(self) -> None:
        """Restore Lightning's own methods of the training loop."""
        get_ledger(self._trainer).put_back(self._loop, *self._REPLACED)

    def is_end_of_fit(self) -> bool:
        """Return whether ``fit`` ends after this step.

        In that case, the caller should let the run end normally instead of stopping it. Otherwise a resumed run would
        skip the last validation.
        """
        is_last = 0 <= self._loop.max_steps <= self._trainer.global_step
        return bool(is_last or (self._trainer.should_stop and self._trainer.fit_loop._can_stop_early))

    def _on_save_checkpoint(self) -> dict[str, Any]:
        metrics = dict(self._trainer.callback_metrics)
        if self.is_left and self._loop._num_ready_batches_reached():
            # this was the last batch of the epoch, so add the metrics of the whole epoch
            metrics |= self._loop._results.metrics(on_step=False)["callback"]
        state = type(self._loop).on_save_checkpoint(self._loop)
        # users may put any values into `callback_metrics`, so leave out those that are not scalars
        scalars = {name: float(value) for name, value in metrics.items() if _is_scalar(value)}
        return {**state, "callback_metrics": scalars, "is_left_behind_batch": self.is_left}

    def _on_load_checkpoint(self, state: dict[str, Any]) -> None:
        type(self._loop).on_load_checkpoint(self._loop, state)
        self._has_metrics = "callback_metrics" in state
        self._is_entered = state.get("is_left_behind_batch", False)
        metrics = {name: torch.tensor(value) for name, value in state.get("callback_metrics", {}).items()}
        self._trainer._logger_connector._callback_metrics.update(metrics)

    def _advance(self, fetcher: Any) -> None:
        if self._is_entered:
            self._is_entered = False
            self._loop.val_loop.restarting = False  # otherwise a validation would not start at its first batch
        elif not self._has_no_batch_left(fetcher):
            type(self._loop).advance(self._loop, fetcher)

    def _has_no_batch_left(self, fetcher: Any) -> bool:
        """Return whether a resumed epoch has no batch or validation left.

        For such an epoch, Lightning itself would still run a batch.
        """
        is_ended = self._loop.restarting and self._loop._num_ready_batches_reached()
        return is_ended and not self._loop._should_check_val_fx(fetcher)

    def _on_advance_end(self, fetcher: Any) -> None:
        if self._has_metrics:  # otherwise Lightning does not update ReduceLROnPlateau at the end of this epoch
            self._trainer.fit_loop._restarting = False
        self._behind_batch()
        type(self._loop).on_advance_end(self._loop, fetcher)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def get_optional_model_checkpoint(trainer: Trainer) -> ModelCheckpoint | None:
    """Return the callback that saves the checkpoints from which a run resumes, or None if there is none.

    Choose the first ``ModelCheckpoint`` with ``save_last``, or the first ``ModelCheckpoint`` if none has ``save_last``.
    """
    if cast(Any, trainer).fast_dev_run:  # no checkpoints are saved
        return None
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # callbacks with `save_weights_only` go last, because no run can resume from their checkpoints
    callbacks.sort(key=lambda callback: callback.save_weights_only)
    return next((callback for callback in callbacks if callback.save_last), next(iter(callbacks), None))


def save_last(callback: ModelCheckpoint, trainer: Trainer, *, save_weights_only: bool = False) -> str:
    """Save a checkpoint under the name that ``callback`` uses for its last checkpoint, and return the path."""
    choices = callback.save_last, callback.save_weights_only
    # with save_last="link", the callback would link to an earlier checkpoint, but there may be none yet
    callback.save_last, callback.save_weights_only = True, save_weights_only
    try:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    finally:
        callback.save_last, callback.save_weights_only = choices
    return callback.last_model_path


def is_last_epoch(trainer: Trainer) -> bool:
    """Return whether ``fit`` ends when the current epoch ends. The epoch may be complete or cut short.

    ``fit_loop.done`` has the same value, but prints a message each time it is read.
    """
    loop = cast(Any, trainer.fit_loop)
    return _is_told_to_end(trainer) or _is_max_limit_reached(loop.epoch_progress.current.processed, loop.max_epochs)


def is_epoch_cut_short(trainer: Trainer) -> bool:
    """Return whether ``max_steps`` or ``trainer.should_stop`` has ended ``fit`` in the middle of an epoch."""
    loop = cast(Any, trainer.fit_loop)
    epoch, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    return epoch.started == epoch.processed > 0 and not batches.is_last_batch and _is_told_to_end(trainer)


def _is_told_to_end(trainer: Trainer) -> bool:
    loop = cast(Any, trainer.fit_loop)
    return _is_max_limit_reached(trainer.global_step, loop.max_steps) or (trainer.should_stop and loop._can_stop_early)


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Reopen the last epoch in the saved state of a fit loop, so that a resumed run continues this epoch.

    Otherwise the run would skip the remaining batches of an epoch that was cut short; see :func:`is_epoch_cut_short`.
    """
    for count in ("current", "total"):
        progress = fit_loop["epoch_progress"][count]
        progress["processed"] = progress["completed"] = progress["started"] - 1


def prepare_resume(fit_loop: dict[str, Any], trainer: Trainer) -> int:
    """Correct the epoch counts in the fit loop state from which a run resumes, and return the current epoch's number.

    If the checkpoint was saved at the end of an epoch, a resumed run with ``max_steps`` ends this epoch a second time.
    Without the correction, it would count the epoch twice, and samplers that shuffle by epoch would be one epoch ahead.
    """
    _end_last_batch(fit_loop)
    progress = fit_loop["epoch_progress"]["current"]
    if trainer.max_steps != -1 and progress["started"] == progress["processed"] == progress["completed"] + 1:
        reopen_epoch(fit_loop)
        if fit_loop["epoch_loop.batch_progress"]["is_last_batch"]:
            # when the resumed run ends this epoch again, Lightning increments this count a second time
            fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    return int(progress["processed"])


def _end_last_batch(fit_loop: dict[str, Any]) -> None:
    """Count the last batch of an epoch as completed if the state was saved in a hook of this batch.

    Without this correction, Lightning would begin the next epoch with exhausted data loaders, so the epoch would have
    no batches. With the corrected count, Lightning ends the current epoch first.
    """
    epoch, batches = fit_loop["epoch_progress"]["current"], fit_loop["epoch_loop.batch_progress"]
    batch = batches["current"]
    is_amid_epoch = epoch["ready"] == epoch["started"] == epoch["processed"] + 1
    if is_amid_epoch and batches["is_last_batch"] and batch["ready"] == batch["processed"] == batch["completed"] + 1:
        for count in ("current", "total"):
            batches[count]["completed"] += 1


def set_sampler_epoch(dataloader: Any, epoch: int) -> None:
    """Set the epoch of a data loader's samplers.

    When a run resumes, Lightning sets the epoch too late: after making the iterator.
    """
    _set_sampler_epoch(dataloader, epoch)


def begin_epoch_after_complete_one(trainer: Trainer) -> None:
    """Make a run that resumes after a complete epoch begin the next epoch at batch 0.

    With ``max_steps``, Lightning would begin the next epoch at the batch number at which the last epoch ended.
    """
    loop = cast(Any, trainer.fit_loop)
    epoch = loop.epoch_progress.current
    if loop.restarting and epoch.ready == epoch.started == epoch.processed == epoch.completed:
        # use the setter of the base class, because the loop's own setter would set `restarting` to True again
        cast(Any, _Loop).restarting.fset(loop, False)


def get_last_saved(callback: ModelCheckpoint) -> tuple[str, int]:
    """Return the path and step of the checkpoint that ``callback`` has saved most recently.

    The path may differ from ``last_model_path`` and ``best_model_path``.
    """
    return callback._last_checkpoint_saved, callback._last_global_step_saved


def _then(first: Callable[[Any], bool], second: Callable[[bool], bool]) -> Callable[[Any], bool]:
    def call(argument: Any) -> bool:
        return second(first(argument))

    return call


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def let_steps_run_alone(trainer: Trainer, batches: int) -> None:
    """Prepare the fit loop for callers that run training steps one by one, without data loaders.

    Args:
        trainer: Trainer that runs ``fit``.
        batches: Number of batches in an epoch.
    """
    loop = cast(Any, trainer).fit_loop
    # schedulers may read `trainer.estimated_stepping_batches`, which fails without a loader
    loop._combined_loader = SimpleNamespace(iterables=())
    loop.max_batches = batches
    loop.max_epochs = 1


def begin_batch(trainer: Trainer, batch: Any, index: int) -> Any:
    """Begin a batch as the training loop does, and return the arguments of its training step."""
    loop = cast(Any, trainer).fit_loop.epoch_loop
    loop.batch_progress.increment_ready()
    cast(Any, trainer)._logger_connector.on_batch_start(batch)
    call_module_hook(trainer, "on_train_batch_start", batch, index)
    return loop._build_kwargs(OrderedDict(), batch, index)


def log_batch(trainer: Trainer) -> None:
    """Make Lightning collect the values that the module logged during the last batch."""
    cast(Any, trainer)._logger_connector.on_batch_end()
