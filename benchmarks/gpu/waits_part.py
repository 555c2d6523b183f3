"""Part that finds where the host waits for the GPU in a training step."""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import AdamW

from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import LLAMA_1_5B, TINY
from benchmarks.trainings import make_loader, make_trainer, process_group
from benchmarks.turns import HOST_READS, OperationCounter
from lightning_fsdp2 import CausalLM, FSDP2Strategy

WARMUP_STEPS, STEPS, LOGGED = 3, 8, 4
"""Numbers of steps before the watched steps, of watched steps, and of steps from one log of metrics to the next."""


class Watcher(pl.Callback):
    """Callback that records waits: on CUDA the lines that torch warns about, on a CPU the number of values read."""

    def __init__(self) -> None:
        self.waits: list[list[str]] = []
        """Waits of each watched step."""

        self._warnings: Any = None
        self._counter = OperationCounter()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        """End the record of the previous step, and begin a new one."""
        self._end()
        if index < WARMUP_STEPS or index == WARMUP_STEPS + STEPS:
            return
        self._catcher = warnings.catch_warnings(record=True)
        self._warnings = self._catcher.__enter__()
        warnings.simplefilter("always")
        self._counter = OperationCounter()
        self._counter.__enter__()
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def _end(self) -> None:
        if self._warnings is None:
            return
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
            lines = [f"{one.filename}:{one.lineno}" for one in self._warnings if "synchroniz" in str(one.message)]
        else:
            lines = [HOST_READS] * self._counter.counts[HOST_READS]
        self._counter.__exit__(None, None, None)
        self._catcher.__exit__(None, None, None)
        self.waits.append(lines)
        self._warnings = None


@part("waits", toy=60, real=90)
def count_waits(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check that the host never waits for the GPU in a step, since the GPU is then idle until the host catches up.

    A step of `CausalLM` under `FSDP2Strategy` should wait only where metrics are logged. Every other wait in the table
    should be removed from the file that it names. On a CPU, all reads of values are counted, which proves nothing.
    """
    fields, batch_size, length = (TINY, 1, 16) if args.scale == TOY else (LLAMA_1_5B, 1, 4096)
    watcher = train(fields, batch_size, length)
    rows = [
        [
            index,
            "logs" if (index + WARMUP_STEPS + 1) % LOGGED == 0 else None,
            len(lines),
            "<br>".join(sorted(set(lines))),
        ]
        for index, lines in enumerate(watcher.waits)
    ]
    yield [Table("Waits of the host", ("step", "metrics", "waits", "in"), rows)]
    waiting = [row for row in rows if row[2] and not row[1]]
    if waiting and torch.cuda.is_available():
        raise ValueError(f"The host waits in steps that log nothing: {waiting}.")


def train(fields: dict[str, Any], batch_size: int, length: int) -> Watcher:
    """Train with a logger that writes nothing, and return the callback with the waits."""
    watcher, steps = Watcher(), WARMUP_STEPS + STEPS + 1
    with process_group():
        module = CausalLM(config=fields, optimizer=lambda parameters: AdamW(parameters, lr=1e-4, fused=True))
        trainer = make_trainer(
            FSDP2Strategy(),
            steps,
            [watcher],
            accelerator=get_device_type(),
            precision="bf16-mixed",
            gradient_clip_val=1.0,
            logger=DummyLogger(),
            log_every_n_steps=LOGGED,
        )
        trainer.fit(module, make_loader(steps, batch_size, length, fields["vocab_size"]))
    return watcher
