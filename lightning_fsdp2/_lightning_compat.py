"""Every private Lightning name that callbacks, loggers and what strategies tell them touch, with the reason."""

import os
import signal
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


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


def take_signals(trainer: Trainer, note: Callable[[int, Any], None], behind_batch: Callable[[], None]) -> None:
    """Let ``note`` have SIGTERM and SLURM's signal, and call ``behind_batch`` when all hooks of a batch have run.

    Lightning registers its handlers later. They communicate, at whatever place the rank is. Without them the broadcast
    in every micro-batch, for which the host waits for the device, says nothing, and is left out.

    Raises:
        RuntimeError: When Lightning has none of these.
    """
    for (owner, name), replacement in zip(
        _get_signal_handling(trainer),
        (note, note, lambda: None, partial(_end_batch, trainer, behind_batch)),
        strict=True,
    ):
        if not hasattr(owner, name):
            raise RuntimeError(
                f"lightning {version('lightning')} has no {type(owner).__name__}.{name}, which Preemption replaces;"
                " install lightning 2.6.6."
            )
        setattr(owner, name, replacement)


def die_of_sigterm(trainer: Trainer) -> None:
    """Let SIGTERM end an evaluation as it ends any process, unless the program itself handles it.

    Lightning's handler communicates, at whatever place the rank is, and nothing reads what it leaves.
    """
    is_handled = signal.getsignal(signal.SIGTERM) not in (None, signal.SIG_DFL)  # and called behind Lightning's
    cast(Any, trainer)._signal_connector._sigterm_notifier_fn = (lambda *args: None) if is_handled else die_of


def die_of(number: int, frame: Any = None) -> None:
    """A handler that does what would have happened without one."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def give_signals_back(trainer: Trainer) -> None:
    """End what :func:`take_signals` or :func:`die_of_sigterm` began."""
    for owner, name in _get_signal_handling(trainer):
        owner.__dict__.pop(name, None)


def _get_signal_handling(trainer: Any) -> list[tuple[Any, str]]:
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    return [
        (connector, "_sigterm_notifier_fn"),
        (connector, "_slurm_sigusr_handler_fn"),
        (loop, "_broadcast_sigterm_tensor"),
        (loop, "on_advance_end"),
    ]


def _end_batch(trainer: Any, behind_batch: Callable[[], None], fetcher: Any) -> None:
    loop = trainer.fit_loop.epoch_loop
    behind_batch()
    if loop.val_loop.batch_progress.current.ready == 0:  # left out by a run that was told to end; see `mark_step`
        loop._skip_next_val = False
    type(loop).on_advance_end(loop, fetcher)


def mark_step(trainer: Trainer) -> bool:
    """Let the loops say what a run that goes on from here does next; whether that is a validation.

    Lightning takes a batch for one that is over if its hooks have run and it is not yet counted as completed, and a
    validation for done, whatever it has done of it, once the batch before is completed.
    """
    loop = cast(Any, trainer).fit_loop.epoch_loop
    validation = loop.val_loop.batch_progress
    is_timed = cast(Any, trainer)._val_check_time_interval is not None  # the time begins anew
    is_due = not is_timed and (trainer.validating or loop._should_check_val_fx(trainer.fit_loop._data_fetcher))
    if not is_due:
        for progress in (loop.batch_progress.total, loop.batch_progress.current):
            progress.completed -= 1
        return False
    if trainer.validating:
        for name, done in vars(validation.current).items():
            setattr(validation.total, name, getattr(validation.total, name) - done)
    validation.current.reset()
    return True


def get_optional_model_checkpoint(trainer: Trainer) -> ModelCheckpoint | None:
    """The callback whose last checkpoint a run goes on from: the first one that keeps it, or the first one."""
    if cast(Any, trainer).fast_dev_run:  # saves nothing
        return None
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    callbacks.sort(key=lambda callback: callback.save_weights_only)  # from which no run goes on
    return next((callback for callback in callbacks if callback.save_last), next(iter(callbacks), None))


def save_last(callback: ModelCheckpoint, trainer: Trainer, *, anew: bool) -> str:
    """Save as ``callback`` names its last checkpoint, if ``anew`` even where it has just done so; return the path."""
    is_saved = callback.save_last and not callback.save_weights_only and not anew
    if not (is_saved and callback._last_global_step_saved == trainer.global_step):
        choices = callback.save_last, callback.save_weights_only
        # where it makes links, there is nothing yet to link
        callback.save_last, callback.save_weights_only = True, False
        try:
            callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
        finally:
            callback.save_last, callback.save_weights_only = choices
    return callback.last_model_path


def get_slurm_checkpoint_path(trainer: Trainer) -> str:
    """Where Lightning looks for a checkpoint on SLURM if it is given no ``ckpt_path``."""
    connector = cast(Any, trainer)._checkpoint_connector
    return str(connector._hpc_resume_path or connector.hpc_save_path(trainer.default_root_dir))


def get_last_saved(callback: ModelCheckpoint) -> tuple[str, int]:
    """Path and step of the checkpoint just saved; ``last_model_path`` and ``best_model_path`` may be others."""
    return callback._last_checkpoint_saved, callback._last_global_step_saved


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
