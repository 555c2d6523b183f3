"""Record of what every rank was communicating when a run hung."""

import json
import os
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fsdp2.compat.torch import read_flight_record

_DESTINATION = "TORCH_FR_DUMP_TEMP_FILE"


class FlightRecorder(Callback):
    """Callback that keeps the last collectives of every rank if a run fails in a collective.

    They are written next to the run's other files. torch always records them, 2,000 per rank. For another number, set
    ``TORCH_FR_BUFFER_SIZE`` in the launcher's environment: torch reads it when the first process group is created.

    NCCL's watchdog writes NCCL's collectives to ``nccl_rank_<r>``, which without this callback is in the home directory
    of each node. ``torchfrtrace <dirpath> --prefix nccl_rank_`` shows which rank was missing where
    (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). Gloo's collectives, of host tensors,
    are written as ``gloo_rank_<r>.json`` when a ``RuntimeError`` ends the fit. The last entries show what the rank was
    doing, with the lines of code.

    Args:
        dirpath: Directory for the files of all nodes. None for the directory of the path in the environment variable
            ``TORCH_FR_DUMP_TEMP_FILE`` or, if that is not set, for ``flight_records`` in the directory of the logger or
            the Trainer's ``default_root_dir``.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self._folder: Path | None = None
        self._replaced: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # on all ranks, since `log_dir` asks rank 0; the environment may differ between nodes
        root = trainer.log_dir or trainer.default_root_dir
        if self._folder is None:
            self._replaced = os.environ.get(_DESTINATION)
        if self.dirpath is None and self._replaced is not None:
            self._folder = Path(self._replaced).parent
        else:
            self._folder = Path(self.dirpath or Path(root) / "flight_records").resolve()
            os.environ[_DESTINATION] = str(self._folder / "nccl_rank_")  # torch reads it when it first writes
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RuntimeError) and self._folder is not None and dist.is_initialized():
            path = self._folder / f"gloo_rank_{trainer.global_rank}.json"
            path.write_text(json.dumps(read_flight_record()))
            rank_zero_info(f"FlightRecorder: {self._folder} has the last collectives of each rank.")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # not called after an exception, when the watchdog may be about to write
        self._folder = None
        if self._replaced is None:
            os.environ.pop(_DESTINATION, None)
        else:
            os.environ[_DESTINATION] = self._replaced
