"""Callback that writes snapshots of GPU memory."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fsdp2.compat.lightning import is_accumulating
from lightning_fsdp2.compat.torch import dump_memory_snapshot, record_memory_history


class MemorySnapshot(Callback):
    """Callback that writes the history of GPU memory allocations to files when memory runs out, and after a given step.

    Open the files at https://pytorch.org/memory_viz. Use this callback only to investigate memory use, because
    recording the call stack of every allocation takes time on the host.

    Args:
        dirpath: Directory for ``step<n>-rank<r>.pickle`` and ``out-of-memory-rank<r>.pickle``. None for ``memory`` in
            the directory of the logger or, without one, the Trainer's ``default_root_dir``.
        at_step: Number of optimizer steps after which a snapshot is written. None writes a snapshot only when memory
            runs out.

    Raises:
        ValueError: When ``at_step`` is below 1, or when the run is not on GPUs.
    """

    def __init__(self, dirpath: str | Path | None = None, at_step: int | None = None) -> None:
        if at_step is not None and at_step < 1:
            raise ValueError(f"MemorySnapshot(at_step={at_step}) must be 1 or more.")
        self.dirpath = dirpath
        self.at_step = at_step
        self._folder: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise ValueError(
                f"Trainer(callbacks=[MemorySnapshot(...)]) records the memory of GPUs, but this run is on"
                f" {device.type!r}; remove the callback."
            )
        self._folder = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "memory")
        record_memory_history(True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.at_step and not is_accumulating(trainer):
            self._write(trainer, f"step{trainer.global_step}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError) and self._folder is not None:
            self._write(trainer, "out-of-memory")
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._folder is not None:
            record_memory_history(False)
        self._folder = None

    def _write(self, trainer: Trainer, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}-rank{trainer.global_rank}.pickle"
        dump_memory_snapshot(path)
        rank_zero_info(f"MemorySnapshot: wrote {path}; open it at https://pytorch.org/memory_viz.")
