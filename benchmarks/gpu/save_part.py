"""Part that measures how much saving a checkpoint slows down training."""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl

from benchmarks.gpu.arms import make_optimizer
from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import LLAMA_1_5B, TINY
from benchmarks.memory import run_forked
from benchmarks.trainings import make_loader, make_trainer, process_group, synchronize
from lightning_fsdp2 import CausalLM, CheckpointConfig, FSDP2Strategy

WARMUP_STEPS, USUAL_STEPS, SAVES = 3, 5, 2
MOST_STEPS = 2000
"""Largest number of steps of a run, which ends as soon as its last save is on disk."""

COLUMNS = ("save", "usual ms per step", "blocked s", "ms per step while it writes", "steps", "durable after s")


@part("save", toy=60, real=240)
def compare_saves(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Measure how long a save blocks training and how much it slows down steps, with and without `async_save`.

    A Llama of 1.5B writes its 18 GB twice. The second save reuses the host memory that the first save has allocated. If
    steps are much slower while a save is written, the writer should use less of the bus or of the CPU.
    """
    fields, shape = (TINY, (1, 16)) if args.scale == TOY else (LLAMA_1_5B, (2, 4096))
    rows: list[list[Any]] = []
    for is_async in (False, True):
        with tempfile.TemporaryDirectory(dir=args.output) as folder:
            (measured,) = run_forked(partial(train, is_async, fields, shape, Path(folder)), 1)
        rows += [[f"{'async' if is_async else 'sync'}, {number}", *cells] for number, cells in enumerate(measured, 1)]
        yield [Table("Saves", COLUMNS, rows)]


class Saver(pl.Callback):
    """Callback that saves, and times the steps before a save and while it is written."""

    def __init__(self, folder: Path) -> None:
        self.measured: list[list[Any]] = []
        """Cells of the table, with a row for each save."""

        self._folder = folder
        self._marks: list[float] = []
        self._saved: float | None = None
        self._blocked = self._usual = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """End a step, save when it is time, and check whether the last save is complete."""
        synchronize()
        self._marks.append(time.perf_counter())
        if self._saved is None and len(self._marks) > WARMUP_STEPS + USUAL_STEPS:
            self._usual = self._get_median()
            self._save(trainer)
        elif self._saved is not None and self._path.exists():
            self._end_save(trainer)

    @property
    def _path(self) -> Path:
        return self._folder / f"{len(self.measured)}.ckpt"

    def _save(self, trainer: pl.Trainer) -> None:
        self._saved = time.perf_counter()
        trainer.save_checkpoint(self._path)
        self._blocked = time.perf_counter() - self._saved
        self._marks = [time.perf_counter()]

    def _end_save(self, trainer: pl.Trainer) -> None:
        seconds, steps = self._marks[-1] - self._saved, len(self._marks) - 1  # type: ignore[operator]
        cells = [self._usual * 1e3, self._blocked, self._get_median(skipped=0) * 1e3, steps, seconds]
        shutil.rmtree(self._path)
        self.measured.append(cells)
        self._saved, self._marks = None, []
        trainer.should_stop = len(self.measured) == SAVES

    def _get_median(self, skipped: int = WARMUP_STEPS) -> float:
        marks = self._marks[skipped:]
        return median(end - start for start, end in pairwise(marks))


def train(is_async: bool, fields: dict[str, Any], shape: tuple[int, int], folder: Path, worker: int) -> list[list[Any]]:
    """Train and save, and return the measurements of each save."""
    saver = Saver(folder)
    with process_group():
        module = CausalLM(config=fields, optimizer=make_optimizer)
        strategy = FSDP2Strategy(checkpoint=CheckpointConfig(async_save=is_async))
        trainer = make_trainer(
            strategy, MOST_STEPS, [saver], accelerator=get_device_type(), precision="bf16-mixed", gradient_clip_val=1.0
        )
        trainer.fit(module, make_loader(MOST_STEPS, *shape, fields["vocab_size"], distinct=4))
    return saver.measured
