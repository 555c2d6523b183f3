"""The checkpoints from which jobs that SLURM has queued again resume. Tested with lightning 2.6.6.

Lightning looks for them in ``default_root_dir``, by their names alone. All tasks of a job array have this folder in
common unless they are given different ones, so a task would go on from the checkpoint of another. Here, each task has a
folder of its own.
"""

import os
from pathlib import Path
from typing import Any, cast

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fsdp2.compat.ledger import get_ledger


def get_slurm_checkpoint_path(trainer: Trainer) -> str:
    """Return the path of the checkpoint from which a job on SLURM resumes if no ``ckpt_path`` is given."""
    if (own := _get_optional_path_of_task(trainer)) is not None:
        return own
    connector = cast(Any, trainer)._checkpoint_connector
    return str(connector._hpc_resume_path or connector.hpc_save_path(trainer.default_root_dir))


def resume_array_task(trainer: Trainer) -> None:
    """Make a fit in a task of a job array, if it is given no ``ckpt_path``, resume from the checkpoint of this task."""
    own = _get_optional_path_of_task(trainer)
    if own is None or trainer.state.fn != TrainerFn.FITTING:
        return
    connector = cast(Any, trainer)._checkpoint_connector
    resume, shared = connector.resume_start, connector._hpc_resume_path

    def resume_own(checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        if checkpoint_path in (None, shared):
            checkpoint_path = own if get_filesystem(own).exists(own) else None
        resume(checkpoint_path, weights_only)

    get_ledger(trainer).replace(
        connector,
        "resume_start",
        resume_own,
        reason="Lightning resumes a task of a job array from any task's checkpoint",
    )


def is_array_task() -> bool:
    """Return whether this process is in a task of a SLURM job array."""
    return {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"} <= os.environ.keys()


def _get_optional_path_of_task(trainer: Trainer) -> str | None:
    """Return where this task of a job array has its checkpoint. None if this process is in no task of a job array."""
    if not is_array_task():
        return None
    job, task = (os.environ[f"SLURM_ARRAY_{name}_ID"] for name in ("JOB", "TASK"))
    return os.path.join(trainer.default_root_dir, f"slurm_array_{job}", f"task_{task}", "hpc_ckpt_1.ckpt")
