"""Callback that collects garbage at the same step on all ranks."""

import gc
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class GarbageCollection(Callback):
    """Callback that collects garbage at the same step on all ranks, and at no other time during training.

    Python's garbage collector starts whenever enough objects have been created. This happens at different steps on
    different ranks, and each time, all other ranks wait in the next collective for the rank that is collecting. The
    idea comes from torchtitan (https://github.com/pytorch/torchtitan, ``tools/utils.py``).

    Args:
        every_n_batches: Number of training batches between collections.
        generation: Oldest generation to collect, 0 to 2. Generation 2 includes all objects and takes a long time.

    Raises:
        ValueError: When an argument is out of range.
    """

    def __init__(self, every_n_batches: int = 50, generation: int = 1) -> None:
        if every_n_batches < 1:
            raise ValueError(f"GarbageCollection(every_n_batches={every_n_batches}) must be 1 or more.")
        if generation not in (0, 1, 2):
            raise ValueError(f"GarbageCollection(generation={generation}) must be 0, 1 or 2.")
        self.every_n_batches = every_n_batches
        self.generation = generation
        self._batches = 0
        self._was_enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()  # garbage from the setup

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches % self.every_n_batches == 0:
            gc.collect(self.generation)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._was_enabled:
            gc.enable()
        self._was_enabled = False
