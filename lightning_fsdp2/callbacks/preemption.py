"""Callback that saves and ends a run when the scheduler announces the end of the job."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lightning_fsdp2.checkpoint.files.drafts import get_path, is_local
from lightning_fsdp2.compat.lightning import (
    StepBoundary,
    die_of,
    get_optional_model_checkpoint,
    give_signals_back,
    is_accumulating,
    save_last,
    take_signals,
)
from lightning_fsdp2.compat.lightning_slurm import get_slurm_checkpoint_path, is_array_task
from lightning_fsdp2.ranks.failures import ExitOfAllRanks

_BEFORE_SIGTERM = 128
"""Number added to signals other than SIGTERM, so that the maximum over all ranks prefers them to SIGTERM.

After SIGTERM, a SLURM job is not queued again.
"""


class Preemption(Callback):
    """Callback that saves ``last.ckpt`` and ends all ranks, once any rank has received SIGTERM or another signal.

    Schedulers announce the end of a job with a signal: SLURM with the signal of ``sbatch --signal``, Kubernetes and
    torchrun with SIGTERM. The signal may come at any moment, and may reach only some of the processes. The signal
    handler only records it. During the next optimizer step, the ranks tell each other whether they have received a
    signal. After that step, they save the ``last.ckpt`` of ``ModelCheckpoint``, and exit once the checkpoint is on
    disk. To resume, run the same command with ``--ckpt_path last``.

    If the signal comes during validation, the validation stops after its next batch, and the resumed run repeats the
    validation. If the run has already taken its last step, it saves and ends normally. If the run has not taken a step
    yet, it saves nothing.

    The strategies of this package add a ``Preemption`` with default arguments to every fit that has none. The ranks
    exchange one number per step, on the host and while the optimizer runs. This replaces Lightning's own broadcast,
    which makes the host wait for the device in every micro-batch, and hangs if only one rank receives the signal
    (https://github.com/Lightning-AI/pytorch-lightning/issues/21487).

    With Lightning's ``SLURMEnvironment(auto_requeue=True)``, the environment's ``requeue_signal`` is handled too. After
    this signal, rank 0 queues the job again, and the new job finds the checkpoint even if no ``ckpt_path`` is set. Each
    task of a job array finds its own, in ``slurm_array_<job>/task_<task>`` of ``default_root_dir``.

    Args:
        signals: Names of the signals to handle besides SIGTERM. If the program has its own handler for one of these
            signals, that handler stays in place.
        exit_code: Exit code of all ranks. None for 128 plus the number of the signal, the code that shells report for a
            process killed by that signal.

    Raises:
        ValueError: When a signal or the exit code is invalid, or when the strategy is not one of this package.
    """

    def __init__(self, signals: Sequence[str] = ("SIGUSR1",), exit_code: int | None = None) -> None:
        names = {member.name for member in signal.Signals} - {"SIGKILL", "SIGSTOP"}
        if isinstance(signals, str) or not set(signals) <= names:
            raise ValueError(
                f"Preemption(signals={signals!r}) must be a list of names of signals that a process can handle, such as"
                " ['SIGUSR1', 'SIGUSR2']."
            )
        if exit_code is not None and not 0 <= exit_code < 256:
            raise ValueError(
                f"Preemption(exit_code={exit_code}) must be from 0 to 255; omit it for 128 + the signal number."
            )
        self.signals = signals
        self.exit_code = exit_code
        self._received = 0
        self._get_agreed: Callable[[], int] | None = None
        self._ends_by_itself = False
        self._boundary: StepBoundary | None = None
        self._step = 0

    # ------------------------------------------------------------------ when

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(trainer.strategy, "start_maximum"):
            raise ValueError(
                f"Preemption needs a strategy of lightning_fsdp2, not {type(trainer.strategy).__name__}; remove the"
                " callback."
            )
        self._received, self._get_agreed, self._pid = 0, None, os.getpid()
        self._ends_by_itself = False
        take_signals(trainer, self._note)
        self._boundary = StepBoundary(trainer, partial(self._end_batch, trainer))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self._step = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._ask(trainer)

    def _end_batch(self, trainer: Trainer) -> None:
        """Save and leave the fit after an optimizer step, if any rank has received a signal.

        The hook ``on_train_batch_end`` would be too early, because other callbacks and the logging of metrics run after
        it.
        """
        # end the fit only after an optimizer step, because checkpoints do not hold accumulated gradients
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._leave_if_told(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not is_accumulating(trainer):
            self._ask(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._leave_if_told(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        give_signals_back(trainer)
        if self._boundary is not None:
            self._boundary.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _ask(self, trainer: Trainer) -> None:
        """Start telling the other ranks about received signals, while the optimizer or the model runs."""
        if self._get_agreed is None and not self._ends_by_itself:
            self._get_agreed = cast(Any, trainer.strategy).start_maximum(self._received)

    def _leave_if_told(self, trainer: Trainer) -> None:
        if self._get_agreed is None or self._boundary is None:
            return
        agreed, self._get_agreed = self._get_agreed(), None
        if not agreed:
            return
        number = signal.Signals(agreed % _BEFORE_SIGTERM)
        self._boundary.is_left = True
        _save(trainer, number)
        self._boundary.is_left = False
        # a run that has taken its last step must end normally: a resumed run would skip the last validation
        if self._boundary.is_end_of_fit():
            self._ends_by_itself = True
            return
        if (environment := _get_optional_slurm(trainer)) and number == environment.requeue_signal:
            rank_zero_only(_requeue)()
        # wait for all ranks, because a launcher may kill the remaining ranks as soon as one rank has ended
        trainer.strategy.barrier()
        raise ExitOfAllRanks(self._get_exit_code(trainer, number))

    def _get_exit_code(self, trainer: Trainer, signum: int) -> int:
        if trainer.local_rank > 0 and cast(Any, trainer.strategy).is_launched_by_lightning:
            return 0  # Lightning's launcher, which runs in rank 0, would treat a non-zero exit code as a crash
        return 128 + signum if self.exit_code is None else self.exit_code

    # ------------------------------------------------------------------ signals

    def _listen(self) -> None:
        """Install handlers for the signals that neither the program nor Lightning handles.

        Lightning restores all handlers after the fit.
        """
        # Python lets only the main thread install signal handlers
        if threading.current_thread() is threading.main_thread():
            for name in self.signals:
                if signal.getsignal(signal.Signals[name]) in (None, signal.SIG_DFL):
                    signal.signal(signal.Signals[name], self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._received = max(self._received, number + (_BEFORE_SIGTERM if number != signal.SIGTERM else 0))
        else:  # this process was forked from a rank, so let the signal end it
            die_of(number)


def _get_optional_slurm(trainer: Trainer) -> SLURMEnvironment | None:
    """Return Lightning's SLURM environment if it is set to queue the job again, else None."""
    environment = cast(Any, trainer.strategy).cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None


def _save(trainer: Trainer, number: signal.Signals) -> None:
    """Save a checkpoint if there is something to save, and wait until it is on disk. All ranks must call this."""
    if trainer.sanity_checking:
        rank_zero_info(f"{number.name}: ended before the first step.")
    elif (callback := get_optional_model_checkpoint(trainer)) is not None:
        path = save_last(callback, trainer)
        if _get_optional_slurm(trainer):
            _link_for_slurm(trainer, path)
        rank_zero_info(f"{number.name}: saved {path!r} after step {trainer.global_step}; resume with --ckpt_path last.")
    elif _get_optional_slurm(trainer):
        trainer.save_checkpoint(get_slurm_checkpoint_path(trainer))
    else:
        rank_zero_warn(
            f"{number.name}: ended after step {trainer.global_step}, and nothing was saved, because the Trainer has no"
            " ModelCheckpoint."
        )
    cast(Any, trainer.strategy).checkpoint_io.wait()
    for logger in trainer.loggers:
        logger.save()


def _link_for_slurm(trainer: Trainer, path: str) -> None:
    """Create a link to the last checkpoint, at the path from which a requeued SLURM job resumes.

    If a later checkpoint replaces the last checkpoint at the same path, the link points to the new one. In an object
    store, no link is created. Instead, the checkpoint is saved a second time. So it is in a task of a job array, whose
    last checkpoint may be in a folder that all tasks write to.
    """
    place = get_slurm_checkpoint_path(trainer)
    if is_local(get_path(path)) and is_local(get_path(place)) and not is_array_task():
        cast(Any, trainer.strategy).checkpoint_io.link(path, place)
    else:
        trainer.save_checkpoint(place)


def _requeue() -> None:
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"The job {job} was not queued again: {error}. Queue it yourself: `scontrol requeue {job}`.")
