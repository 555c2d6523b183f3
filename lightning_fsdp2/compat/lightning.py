"""Every private Lightning name that callbacks, loggers and what strategies tell them touch, with the reason."""

import os
import signal
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher


def logs_graph(logger: Logger) -> bool:
    """Whether ``logger`` traces the module's forward, on rank 0 alone."""
    return isinstance(logger, TensorBoardLogger) and bool(logger._log_graph)


def is_accumulating(trainer: Trainer) -> bool:
    """Whether no optimizer step follows the current micro-batch; the Trainer does not say how it has decided."""
    return bool(trainer.fit_loop._should_accumulate())


def logs_current_step(trainer: Trainer) -> bool:
    """Whether the Trainer logs the current step: ``log_every_n_steps``, or the last one of a run that shall stop."""
    return bool(cast(Any, trainer)._logger_connector.should_update_logs)


def get_logged_step(trainer: Trainer) -> int:
    """The number under which ``self.log`` writes now; ``global_step`` counts every optimizer, and is one ahead."""
    return int(cast(Any, trainer).fit_loop.epoch_loop._batches_that_stepped)


def count_batches_of_resumed_epoch(trainer: Trainer) -> int:
    """How many batches of its first epoch a resumed run counts, in that epoch's first iteration; 0 at other times."""
    loop = cast(Any, trainer).fit_loop.epoch_loop
    return int(loop.batch_progress.current.ready) if loop.restarting else 0


def watch_fetches(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` around each ``next(dataloader)`` of the training.

    These are the Trainer's own marks for its profiler. What else lies between two batches includes its waiting for the
    device (the broadcast of SIGTERM), logging and checkpoints.
    """
    loop = cast(Any, trainer).fit_loop.epoch_loop
    loop._on_before_fetch = _call_both(partial(type(loop)._on_before_fetch, loop), before)
    loop._on_after_fetch = _call_both(after, partial(type(loop)._on_after_fetch, loop))


def ignore_fetches(trainer: Trainer) -> None:
    """End what :func:`watch_fetches` began."""
    for name in ("_on_before_fetch", "_on_after_fetch"):
        cast(Any, trainer).fit_loop.epoch_loop.__dict__.pop(name, None)


def take_signals(trainer: Trainer, note: Callable[[int, Any], None]) -> None:
    """Let ``note`` have SIGTERM and SLURM's signal in the place of Lightning's handlers, which it registers later.

    Those communicate, at whatever place the rank is. Without them the broadcast in every micro-batch, for which the
    host waits for the device, says nothing, and is left out.

    Raises:
        RuntimeError: When Lightning has none of these.
    """
    connector, loop = cast(Any, trainer)._signal_connector, cast(Any, trainer).fit_loop.epoch_loop
    _replace(connector, "_sigterm_notifier_fn", note)
    _replace(connector, "_slurm_sigusr_handler_fn", note)
    _replace(loop, "_broadcast_sigterm_tensor", lambda: None)


def end_by_sigterm(trainer: Trainer) -> None:
    """Let SIGTERM end an evaluation as it ends any process, unless the program itself handles it; pass SLURM's over.

    Lightning's handlers communicate, at whatever place the rank is, and nothing reads what they leave.
    """
    is_handled = signal.getsignal(signal.SIGTERM) not in (None, signal.SIG_DFL)  # and called behind Lightning's
    launcher = trainer.strategy.launcher

    def end(number: int, frame: Any) -> None:
        if isinstance(launcher, _SubprocessScriptLauncher):  # nobody else tells the ranks that it has started
            launcher.kill(signal.Signals(number))
        if not is_handled:
            die_of(number)

    connector = cast(Any, trainer)._signal_connector
    _replace(connector, "_sigterm_notifier_fn", end)
    _replace(connector, "_slurm_sigusr_handler_fn", lambda *args: None)


def die_of(number: int) -> None:
    """Do what a signal does where nobody handles it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def give_signals_back(trainer: Trainer) -> None:
    """End what :func:`take_signals` or :func:`end_by_sigterm` began."""
    connector, loop = cast(Any, trainer)._signal_connector, cast(Any, trainer).fit_loop.epoch_loop
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        connector.__dict__.pop(name, None)
    loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def end_signal_handling(trainer: Trainer) -> None:
    """Give the program its own handlers back, at once and not when the Trainer has torn everything down."""
    cast(Any, trainer)._signal_connector.teardown()


class StepBoundary:
    """Where a fit is left and goes on: the hooks and metrics of a batch are done, and nothing that follows them.

    What follows may be a validation, an update of ``ReduceLROnPlateau``, the end of an epoch. Lightning leaves it out
    in a run that goes on from a checkpoint of that moment. One that is saved while ``is_left`` goes on with it. And
    all checkpoints of the fit have the metrics that callbacks and schedulers monitor, which Lightning's have not.

    Args:
        trainer: Of a fit that has loaded no checkpoint yet.
        behind_batch: Called there, behind each batch.
    """

    _REPLACED = ("on_save_checkpoint", "on_load_checkpoint", "advance", "on_advance_end")

    def __init__(self, trainer: Trainer, behind_batch: Callable[[], None]) -> None:
        self.is_left = False
        self._trainer: Any = trainer
        self._loop = self._trainer.fit_loop.epoch_loop
        self._behind_batch = behind_batch
        self._has_metrics = False
        self._is_entered = False
        for name in self._REPLACED:
            _replace(self._loop, name, getattr(self, f"_{name}"))

    def remove(self) -> None:
        """Let the loop be Lightning's again."""
        for name in self._REPLACED:
            self._loop.__dict__.pop(name, None)

    def is_end_of_fit(self) -> bool:
        """Whether no step follows: a run that goes on from here would leave out what does."""
        is_last = 0 <= self._loop.max_steps <= self._trainer.global_step
        return bool(is_last or (self._trainer.should_stop and self._trainer.fit_loop._can_stop_early))

    def _on_save_checkpoint(self) -> dict[str, Any]:
        metrics = dict(self._trainer.callback_metrics)
        if self.is_left and self._loop._num_ready_batches_reached():
            metrics |= self._loop._results.metrics(on_step=False)["callback"]  # of the epoch, which has all its batches
        state = type(self._loop).on_save_checkpoint(self._loop)
        # users may put there what is no metric
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
            self._loop.val_loop.restarting = False  # from its first batch
        elif not self._has_no_batch_left(fetcher):
            type(self._loop).advance(self._loop, fetcher)

    def _has_no_batch_left(self, fetcher: Any) -> bool:
        """Whether an epoch that goes on only has to end; without a validation Lightning would train a batch more."""
        is_ended = self._loop.restarting and self._loop._num_ready_batches_reached()
        return is_ended and not self._loop._should_check_val_fx(fetcher)

    def _on_advance_end(self, fetcher: Any) -> None:
        if self._has_metrics:  # else Lightning does not update ReduceLROnPlateau at the end of this epoch
            self._trainer.fit_loop._restarting = False
        self._behind_batch()
        type(self._loop).on_advance_end(self._loop, fetcher)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    if not hasattr(owner, name):
        raise RuntimeError(
            f"lightning {version('lightning')} has no {type(owner).__name__}.{name}, which Preemption replaces; install"
            " lightning 2.6.6."
        )
    setattr(owner, name, replacement)


def get_optional_model_checkpoint(trainer: Trainer) -> ModelCheckpoint | None:
    """The callback whose last checkpoint a run goes on from: the first one that keeps it, or the first one."""
    if cast(Any, trainer).fast_dev_run:  # saves nothing
        return None
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    callbacks.sort(key=lambda callback: callback.save_weights_only)  # from which no run goes on
    return next((callback for callback in callbacks if callback.save_last), next(iter(callbacks), None))


def save_last(callback: ModelCheckpoint, trainer: Trainer, *, save_weights_only: bool = False) -> str:
    """Save as ``callback`` names its last checkpoint, and return the path."""
    choices = callback.save_last, callback.save_weights_only
    # where it makes links, there is nothing yet to link
    callback.save_last, callback.save_weights_only = True, save_weights_only
    try:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    finally:
        callback.save_last, callback.save_weights_only = choices
    return callback.last_model_path


def get_slurm_checkpoint_path(trainer: Trainer) -> str:
    """Where Lightning looks for a checkpoint on SLURM if it is given no ``ckpt_path``."""
    connector = cast(Any, trainer)._checkpoint_connector
    return str(connector._hpc_resume_path or connector.hpc_save_path(trainer.default_root_dir))


def is_last_epoch(trainer: Trainer) -> bool:
    """Whether the fit ends with the epoch that now ends, finished or not.

    ``fit_loop.done`` knows that too, and says it each time it is asked.
    """
    loop = cast(Any, trainer.fit_loop)
    return _is_told_to_end(trainer) or _is_max_limit_reached(loop.epoch_progress.current.processed, loop.max_epochs)


def is_epoch_cut_short(trainer: Trainer) -> bool:
    """Whether ``max_steps`` or a request to stop has ended the fit before its epoch had all its batches."""
    loop = cast(Any, trainer.fit_loop)
    epoch, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    return epoch.started == epoch.processed > 0 and not batches.is_last_batch and _is_told_to_end(trainer)


def _is_told_to_end(trainer: Trainer) -> bool:
    loop = cast(Any, trainer.fit_loop)
    return _is_max_limit_reached(trainer.global_step, loop.max_steps) or (trainer.should_stop and loop._can_stop_early)


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Let a run that goes on from this state end the epoch that the state counts as processed.

    Where :func:`is_epoch_cut_short`, the run would leave out the rest of it.
    """
    for count in ("current", "total"):
        progress = fit_loop["epoch_progress"][count]
        progress["processed"] = progress["completed"] = progress["started"] - 1


def prepare_resume(fit_loop: dict[str, Any], trainer: Trainer) -> int:
    """Count the epochs right in the state of a fit that goes on, and return the number of the epoch that it goes on in.

    A fit with ``max_steps`` ends an epoch anew that was saved while it ended, and would count it twice: samplers that
    shuffle by epoch would be one ahead.
    """
    _end_last_batch(fit_loop)
    progress = fit_loop["epoch_progress"]["current"]
    if trainer.max_steps != -1 and progress["started"] == progress["processed"] == progress["completed"] + 1:
        reopen_epoch(fit_loop)
        if fit_loop["epoch_loop.batch_progress"]["is_last_batch"]:
            fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # the end of the epoch counts it again
    return int(progress["processed"])


def _end_last_batch(fit_loop: dict[str, Any]) -> None:
    """Let an epoch that was saved in the hooks of its last batch be ended, which Lightning would take for ended.

    Its data loaders have come to their end, and the next epoch would have no batch.
    """
    epoch, batches = fit_loop["epoch_progress"]["current"], fit_loop["epoch_loop.batch_progress"]
    batch = batches["current"]
    is_amid_epoch = epoch["ready"] == epoch["started"] == epoch["processed"] + 1
    if is_amid_epoch and batches["is_last_batch"] and batch["ready"] == batch["processed"] == batch["completed"] + 1:
        for count in ("current", "total"):
            batches[count]["completed"] += 1


def set_sampler_epoch(dataloader: Any, epoch: int) -> None:
    """Tell the samplers of ``dataloader`` the epoch; Lightning does so only once a resumed run has its iterators."""
    _set_sampler_epoch(dataloader, epoch)


def begin_epoch_after_complete_one(trainer: Trainer) -> None:
    """Let a fit that goes on after a complete epoch begin the next one with its first batch.

    With ``max_steps`` Lightning would begin it with the number of batches that the complete one had.
    """
    loop = cast(Any, trainer.fit_loop)
    epoch = loop.epoch_progress.current
    if loop.restarting and epoch.ready == epoch.started == epoch.processed == epoch.completed:
        cast(Any, _Loop).restarting.fset(loop, False)  # the setter of its own class sets it again


def get_last_saved(callback: ModelCheckpoint) -> tuple[str, int]:
    """Path and step of the checkpoint just saved; ``last_model_path`` and ``best_model_path`` may be others."""
    return callback._last_checkpoint_saved, callback._last_global_step_saved


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
