"""A training that several hosts do under torchrun, and what it leaves to see which samples it read, and its losses."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml

from helpers.models import LLAMA

STEPS = 30
SAVES_EVERY = 4
GLOBAL_BATCH_SIZE = 8


@dataclass(frozen=True)
class Step:
    """What one rank saw of an optimizer step."""

    step: int
    world_size: int
    rank: int
    rows: tuple[str, ...]
    loss: float
    time: float


class Recorder(pl.Callback):
    """Adds a line to a file of the rank for each step: its samples in their order, and the loss of all ranks."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.rows: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows += [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch["input_ids"]]

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        line = {"step": trainer.global_step, "world_size": trainer.world_size, "rank": trainer.global_rank}
        loss = trainer.strategy.token_mean.loss.item()  # type: ignore[attr-defined]
        with open(self.folder / f"{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps({**line, "rows": self.rows, "loss": loss, "time": time.time()}) + "\n")
        self.rows = []


def write_config(folder: Path, **options: Any) -> Path:
    """The YAML of the job: a small Llama on 2 ranks per host, replicated across hosts."""
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "num_nodes": 2,
            "strategy": {
                "class_path": "lightning_fsdp2.FSDP2Strategy",
                "init_args": {
                    "dp_replicate_size": "auto",
                    "timeout": "0:01:30",
                    "rendezvous_timeout": "0:01:00",
                    "steady_timeout": "0:00:15",
                    "config": {"defer_fsdp_grad_sync": False},
                    **options,
                },
            },
            "default_root_dir": str(folder),
            "max_steps": STEPS,
            "max_epochs": -1,
            "gradient_clip_val": 1.0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [
                {"class_path": "helpers.node_job.Recorder", "init_args": {"folder": str(folder)}},
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {
                        "dirpath": str(folder / "checkpoints"),
                        "filename": "{step}",
                        "every_n_train_steps": SAVES_EVERY,
                        "monitor": "step",
                        "mode": "max",
                        "save_top_k": 2,
                        "save_last": "link",
                        "enable_version_counter": False,
                    },
                },
            ],
        },
        "model": {
            "class_path": "lightning_fsdp2.CausalLM",
            "init_args": {
                "config": {**LLAMA, "vocab_size": 257, "bos_token_id": None, "eos_token_id": 256},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
            },
        },
        "data": {
            "class_path": "lightning_fsdp2.TextDataModule",
            "init_args": {
                "path": str(folder / "text"),
                "sequence_length": 32,
                "batch_size": 1,
                "global_batch_size": GLOBAL_BATCH_SIZE,
            },
        },
    }
    text = folder / "text" / "a.txt"
    text.parent.mkdir(parents=True)
    text.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(200)))
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def read_steps(folder: Path) -> list[Step]:
    """What all ranks of all attempts saw, in the order of time."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    # a rank that is killed may have begun a line
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return sorted((Step(**{**step, "rows": tuple(step["rows"])}) for step in found), key=lambda step: step.time)
