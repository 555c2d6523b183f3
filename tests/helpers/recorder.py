"""What a run logs and says."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger

from helpers.strategies import Kind
from helpers.user_modules import Batch, make_loader


class Recorder(DummyLogger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)


@contextmanager
def catch_messages() -> Iterator[list[str]]:
    """What is said on rank 0."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: messages.append(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def record(
    kind: Kind, module: pl.LightningModule, batches: Sequence[Batch], callbacks: list[pl.Callback], **options: Any
) -> dict[int, dict[str, float]]:
    recorder = Recorder()
    trainer = kind.make_trainer(logger=recorder, callbacks=callbacks, **options)
    trainer.fit(module, make_loader(batches))
    return recorder.rows
