"""Callback that records the last collectives of every rank, to find out why a run hung."""

import json
import os
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fsdp2.compat.torch import read_flight_record

_DESTINATION = "TORCH_FR_DUMP_TEMP_FILE"


class FlightRecorder(Callback):
    """Callback that writes the last collectives of every rank to files if a run fails in a collective.

    By default, the files are written next to the run's other files. Even without this callback, torch keeps the last
    2,000 collectives of each rank in memory. To keep a different number, set ``TORCH_FR_BUFFER_SIZE`` in the launcher's
    environment, because torch reads this variable when it creates the first process group.

    NCCL's watchdog writes NCCL's collectives to ``nccl_rank_<r>``. Without this callback, the watchdog would write this
    file to the home directory on each node. ``torchfrtrace <dirpath> --prefix nccl_rank_`` shows which rank was missing
    in which collective (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html).

    Gloo's collectives, which work on host tensors, are written to ``gloo_rank_<r>.json`` when a ``RuntimeError`` ends
    the fit. The last entries show what the rank was doing, and in which lines of code.

    Args:
        dirpath: Directory for the files of all nodes. None uses the directory of the path in the environment variable
            ``TORCH_FR_DUMP_TEMP_FILE``. If this variable is not set, None uses ``flight_records`` in the directory of
            the logger or, without one, the Trainer's ``default_root_dir``.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self._folder: Path | None = None
        self._replaced: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # all ranks must read `log_dir`, because Lightning broadcasts it from rank 0
        root = trainer.log_dir or trainer.default_root_dir
        if self._folder is None:
            self._replaced = os.environ.get(_DESTINATION)
        if self.dirpath is None and self._replaced is not None:
            self._folder = Path(self._replaced).parent
        else:
            self._folder = Path(self.dirpath or Path(root) / "flight_records").resolve()
            # torch reads this environment variable only when it first writes a file, so it is not too late to set it
            os.environ[_DESTINATION] = str(self._folder / "nccl_rank_")
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RuntimeError) and self._folder is not None and dist.is_initialized():
            path = self._folder / f"gloo_rank_{trainer.global_rank}.json"
            path.write_text(json.dumps(read_flight_record()))
            rank_zero_info(f"FlightRecorder: {self._folder} has the last collectives of each rank.")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # After an exception, torch's watchdog needs the environment variable to write its file. Lightning does not call
        # `teardown` in this case, so the variable stays set.
        self._folder = None
        if self._replaced is None:
            os.environ.pop(_DESTINATION, None)
        else:
            os.environ[_DESTINATION] = self._replaced
