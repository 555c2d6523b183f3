"""Small jobs whose loggers are looked at."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import wandb.sdk.launch  # which `wandb.init` would import in each rank
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.ranks import run_ranks
from helpers.user_modules import Batch, make_language_model, make_loader, make_trainer
from helpers.wandb_reader import WandbRun, read_runs
from lightning_fsdp2 import CheckpointConfig, FSDP2Strategy
from lightning_fsdp2.callbacks import Throughput

LENGTHS = (12, 8, 16, 12, 4, 12, 20, 8)


def make_batches() -> list[Batch]:
    """Two sequences each, of another length from batch to batch."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 100, (2, length), generator=generator) for length in LENGTHS]
    return [{"input_ids": batch, "labels": batch} for batch in batches]


def run_job(
    folder: Path,
    make_loggers: Callable[[], Sequence[Any]],
    *,
    world_size: int = 2,
    callbacks: Callable[[], Sequence[pl.Callback]] = list,
    ckpt_path: Path | None = None,
    checkpoint: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Train as a job that starts on these ranks; returns the attributes ``result`` of its own callbacks, by rank."""

    def run() -> Any:
        saver = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
        own = list(callbacks())
        trainer = make_trainer(
            FSDP2Strategy(checkpoint=CheckpointConfig(**checkpoint or {})),
            **{
                "logger": make_loggers(),
                "callbacks": [*own, Throughput(), saver],
                "max_steps": 4,
                "log_every_n_steps": 2,
                "enable_checkpointing": True,
                **options,
            },
        )
        with finished_runs():
            trainer.fit(make_language_model(), make_loader(make_batches()), ckpt_path=ckpt_path)
        return [getattr(callback, "result", None) for callback in own]

    return run_ranks(run, world_size)


class DiesOnce(pl.Callback):
    """Ends all ranks behind a step as a power cut does, once W&B has written it; not when the job is started again.

    W&B's is the last of the loggers.

    Args:
        marker: File that tells that it has died.
        behind: Number of steps.
    """

    def __init__(self, marker: str, behind: int = 5) -> None:
        self.marker, self.behind = Path(marker), behind

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step != self.behind or trainer.strategy.broadcast(self.marker.exists()):
            return
        folder, deadline = Path(trainer.loggers[-1].save_dir), time.monotonic() + 60
        while trainer.is_global_zero and len(read_runs(folder)[0].get_column("train/loss")) < self.behind:
            assert time.monotonic() < deadline
        self.marker.touch()
        trainer.strategy.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def finished_runs() -> Iterator[None]:
    """A forked rank ends without exit handlers, in which wandb waits for its service."""
    try:
        yield
    finally:
        with suppress(OSError):  # of a service that was killed
            wandb.teardown()


def start_job(
    config: Path, *options: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `lightning-fsdp2 fit` in the folder of its config, with W&B quiet."""
    command = [python, "-m", "lightning_fsdp2", "fit", f"--config={config}", *options]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    variables = {**os.environ, "PYTHONPATH": paths, "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=config.parent, env=variables, capture_output=True, text=True, check=False, timeout=250
    )


def get_rows(run: WandbRun) -> dict[int, dict[str, Any]]:
    """What the steps have logged, by step; a later row of a step must not contradict an earlier one."""
    rows: dict[int, dict[str, Any]] = {}
    for row in run.rows:
        rows.setdefault(row["trainer/global_step"], {}).update(row)
    return rows
