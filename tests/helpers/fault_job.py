"""A job to kill: torchrun's own agent and two ranks, all forked, that train and save all the time."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from helpers.pipelines import CONFIGS
from helpers.user_modules import UserModule, make_trainer
from lightning_fsdp2 import CausalLM, CheckpointConfig, FSDP2Strategy
from lightning_fsdp2.data.loader import ResumableDataLoader, ResumableSampler

WORLD_SIZE = 2

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """How long a job trains, and how it saves."""

    max_steps: int
    async_save: bool = False
    save_last: bool | Literal["link"] = True
    save_every: int = 1
    pp_size: int = 1


class Job:
    """One launch of the job in ``folder``; ``number`` tells it from the launches before."""

    def __init__(self, folder: Path, number: int, settings: Settings) -> None:
        self.folder = folder / f"launch-{number}"
        self.folder.mkdir()
        arguments = (self.folder, get_checkpoints(folder), settings)
        self.launcher = multiprocessing.get_context("fork").Process(target=_launch, args=arguments)
        self.launcher.start()

    @property
    def ranks(self) -> list[int]:
        """The process ids of the ranks that have started."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("pid-*"))]

    @property
    def output(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")[-6000:]

    def read_log(self, rank: int) -> tuple[int, dict[int, str]]:
        """The step that the rank resumed from, and the losses of the steps it did, to the last bit."""
        first, *others = [line.split() for line in self._get_log(rank).read_text().splitlines()]
        return int(first[0]), {int(step): loss for step, loss in others}

    def has_begun(self, rank: int) -> bool:
        """Return whether the rank has lived until its training began."""
        return self._get_log(rank).exists() and self._get_log(rank).stat().st_size > 0

    def _get_log(self, rank: int) -> Path:
        return self.folder / f"log-{rank}"


def get_checkpoints(folder: Path) -> Path:
    return folder / "checkpoints"


def kill(pids: Iterable[int]) -> None:
    """Kill processes at once, and return when all of them have ended."""
    descriptors = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    for descriptor in descriptors:
        wait([descriptor])
        os.close(descriptor)


class _Model(UserModule):
    """Draws random numbers and shuffles, so that a run that goes on elsewhere in either computes other losses."""

    def build(self) -> None:
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 1))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = batch["input_ids"]
        return (self.layers(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def train_dataloader(self) -> ResumableDataLoader:
        rows = torch.rand(80, 8, generator=torch.Generator().manual_seed(1))
        samples = [{"input_ids": row} for row in rows]
        sampler = ResumableSampler(samples, num_replicas=WORLD_SIZE, rank=self.global_rank)
        return ResumableDataLoader(samples, batch_size=4, sampler=sampler)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Pipeline(CausalLM):
    """The same with a model that has layers for two pipeline stages, and dropout in them."""

    def __init__(self) -> None:
        dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
        super().__init__(config={**CONFIGS["gpt2"], **dropout}, optimizer=partial(torch.optim.AdamW, lr=1e-2))

    def train_dataloader(self) -> ResumableDataLoader:
        rows = torch.randint(3, 101, (80, 12), generator=torch.Generator().manual_seed(1))
        samples = [{"input_ids": row} for row in rows]
        sampler = ResumableSampler(samples, num_replicas=1, rank=0)
        return ResumableDataLoader(samples, batch_size=4, sampler=sampler)


class _Log(pl.Callback):
    """Tells the world what has been computed, so that no kill takes it back."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a")  # noqa: SIM115 - lives as long as the process

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.write(trainer.global_step, "resumed")

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.write(trainer.global_step, outputs["loss"].item().hex())

    def write(self, step: int, text: str) -> None:
        self.file.write(f"{step} {text}\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def _launch(folder: Path, *args: Any) -> None:
    log = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=WORLD_SIZE,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(str(folder / "agent")),
    )
    elastic_launch(config, _train)(folder, *args)


def _train(folder: Path, checkpoints: Path, settings: Settings) -> None:
    _detach()
    rank = os.environ["RANK"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    pl.seed_everything(1, workers=True, verbose=False)
    saver = ModelCheckpoint(
        checkpoints,
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last=settings.save_last,
        every_n_train_steps=settings.save_every,
    )
    trainer = make_trainer(
        FSDP2Strategy(pp_size=settings.pp_size, checkpoint=CheckpointConfig(async_save=settings.async_save)),
        max_steps=settings.max_steps,
        callbacks=[_Log(folder / f"log-{rank}"), saver],
        enable_checkpointing=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"ModelCheckpoint\(save_last=True\) writes every checkpoint twice")
        trainer.fit(_Model() if settings.pp_size == 1 else _Pipeline(), ckpt_path="last")


def _detach() -> None:
    """Outlive the launcher, as a script does that torchrun starts: torch's agent has forked ranks die with it."""
    os.setsid()
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0) != 0:
        sys.exit("prctl failed")
