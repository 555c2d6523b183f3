"""A run that dies goes on from its last checkpoint as if nothing had happened, to the last bit."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import GPT2
from helpers.oracle import QUIET, whole
from helpers.ranks import RankError, run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fsdp2 import CausalLM, FSDP2Strategy, TextDataModule
from lightning_fsdp2.checkpoint import distributed

STEPS = 8
SAVE_EVERY = 2
CONFIG = {**GPT2, "vocab_size": 257, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


class KillAt(pl.Callback):
    """Dies as a machine does: at once, without a word, on all ranks."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        # before ModelCheckpoint, which the Trainer runs last
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class PlansAhead(CausalLM):
    """Asks for the number of steps while it configures its optimizer, which makes the data loaders early."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == STEPS
        return super().configure_optimizers()


def train(folder: Path, *, ckpt_path: str | None = None, callbacks: list[pl.Callback] | None = None) -> dict[str, Any]:
    pl.seed_everything(1, workers=True, verbose=False)
    module = PlansAhead(config=CONFIG, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1))
    data = TextDataModule(path=str(folder / "text"), sequence_length=16, batch_size=2, validation_fraction=0.2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=FSDP2Strategy(),
        max_steps=STEPS,
        accumulate_grad_batches=2,
        val_check_interval=3,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        gradient_clip_val=0.5,
        callbacks=[
            *(callbacks or []),
            ModelCheckpoint(folder / "run", every_n_train_steps=SAVE_EVERY, save_top_k=0, save_last=True),
        ],
        **{**QUIET, "enable_checkpointing": True},
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    weights = whole(module.state_dict())
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    return {"weights": weights, "step": trainer.global_step, "epoch": trainer.current_epoch, "lr": lr}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "text").mkdir()
    for index in range(12):
        (folder / "text" / f"{index}.txt").write_text(f"document {index} says {'again and again ' * 3}{index}")
    return folder, run_ranks(lambda: train(folder), 2)[0]


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if step == 5 else pytest.mark.slow) for step in range(3, STEPS)]
)
def test_a_run_killed_at_any_step_resumes_to_the_same_weights(
    step: int, uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source, expected = uninterrupted
    (tmp_path / "text").symlink_to(source / "text")
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: train(tmp_path, callbacks=[KillAt(step)]), 2)
    assert_same_end(tmp_path, expected)


def test_a_run_killed_while_it_saves_resumes_from_the_checkpoint_before(
    uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = uninterrupted
    (tmp_path / "text").symlink_to(source / "text")
    finish = distributed._finish
    saves = []

    def die_in_third_save(*args: Any) -> None:
        saves.append(args)
        if len(saves) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(*args)

    monkeypatch.setattr(distributed, "_finish", die_in_third_save)
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: train(tmp_path), 2)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")] == ["last.ckpt"]
    assert_same_end(tmp_path, expected)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


def assert_same_end(folder: Path, expected: dict[str, Any]) -> None:
    for actual in run_ranks(lambda: train(folder, ckpt_path="last"), 2):
        assert actual["step"] == expected["step"] == STEPS
        assert actual["epoch"] == expected["epoch"]
        assert actual["lr"] == expected["lr"]
        different = [
            name for name, weight in expected["weights"].items() if not torch.equal(actual["weights"][name], weight)
        ]
        assert different == []
