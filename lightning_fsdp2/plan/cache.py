"""Cache of simulation results, kept in a folder for later searches."""

import hashlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.serialization import safe_globals

from lightning_fsdp2.compat.torch import tree_map_only
from lightning_fsdp2.plan.knobs import Knobs
from lightning_fsdp2.plan.pipeline import ActionOperations, RankSummary
from lightning_fsdp2.plan.rank import Run
from lightning_fsdp2.plan.simulation.blocks import Summary
from lightning_fsdp2.plan.simulation.recorder import Attention, Collective, Group, Operation
from lightning_fsdp2.plan.simulation.reserved import Reserved
from lightning_fsdp2.plan.simulation.step import is_packed

_RECORDS: list[Any] = [Summary, RankSummary, ActionOperations, Operation, Collective, Group, Attention, Reserved]
"""Classes of which a cached result consists. A file that names anything else is not read."""

_DIGEST_BYTES = 16

log = logging.getLogger(__name__)


class Cache:
    """Folder of simulation results, with one file for each layout of each run.

    Args:
        folder: Path of the folder, which is created if it does not exist.
        run: String that identifies the run.

    Raises:
        ValueError: When ``folder`` cannot be written to.
    """

    def __init__(self, folder: str | Path, run: str) -> None:
        self._folder = Path(folder).expanduser()
        self._run = run
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._is_writable = os.access(self._folder, os.W_OK)
        except OSError:
            self._is_writable = False
        if not self._is_writable:
            raise ValueError(
                f"cache_dir={str(folder)!r} cannot be written to; name another folder, or None (null) for no cache."
            )

    def get(self, knobs: Knobs) -> Summary | list[RankSummary] | str | None:
        """Return the cached summary of a layout, or why the layout was refused; None if nothing is cached.

        Others may be able to write to the folder, so code in a file is never run.
        """
        path = self._get_path(knobs)
        if not path.is_file():
            return None
        digest, data = (content := path.read_bytes())[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if xxhash.xxh3_128(data).digest() != digest:  # treat a damaged file as missing, so that it is written again
            return None
        try:
            with safe_globals(_RECORDS):
                return torch.load(io.BytesIO(data), weights_only=True)
        except Exception:  # another program wrote the file, so any exception may be raised
            return None

    def put(self, knobs: Knobs, result: Summary | list[RankSummary] | str) -> None:
        """Store the result of a layout in a file. Other processes see the file only once it is complete.

        If the file cannot be written, for example because the disk is full, warn once and go on without a cache.
        """
        if not self._is_writable:
            return
        torch.save(result, buffer := io.BytesIO())
        data = buffer.getvalue()
        path = self._get_path(knobs)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_bytes(xxhash.xxh3_128(data).digest() + data)
            temporary.replace(path)
        except OSError as error:
            self._is_writable = False
            temporary.unlink(missing_ok=True)
            log.warning(
                "cache_dir=%r cannot be written to any more (%s); the search goes on.", str(self._folder), error
            )

    def _get_path(self, knobs: Knobs) -> Path:
        return self._folder / f"{hashlib.sha256(f'{self._run} {knobs}'.encode()).hexdigest()}.pt"


def get_run_fingerprint(run: Run) -> str:
    """Return a string that identifies a run. It changes whenever the model, the batch, an option or the code changes.

    The options are those of the Trainer and the strategy. The code is every Python file that Python has loaded by the
    time the model is built, including the user's own files and those of torch. Call this function in a separate
    process, since it builds the model in ``run.module`` and thereby changes that module.
    """
    trainer, batch = run.trainer, run.batch
    shapes = tree_map_only(Tensor, lambda tensor: (tensor.shape[1:], tensor.dtype), batch)
    parts: list[Any] = [
        run.describe_model(),
        shapes,
        is_packed(batch),
        (run.world_size, run.nodes),
        (trainer.precision, trainer.gradient_clip_val, trainer.gradient_clip_algorithm),
        trainer.strategy.config,
        sorted(_iterate_code()),
    ]
    return repr(parts)


def _iterate_code() -> Iterator[tuple[str, int, int]]:
    """Yield the name of each loaded Python module, with the modification time and the size of its file."""
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__file__", None)
        if path is not None and os.path.exists(path):
            status = os.stat(path)
            yield name, status.st_mtime_ns, status.st_size
