"""A run that dies goes on from its last checkpoint as if nothing had happened, to the last bit."""

import itertools
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from helpers.cover import Matrix
from helpers.mesh_runs import whole_of_stages
from helpers.models import GPT2, make_token_batches
from helpers.ranks import RankError, run_ranks
from helpers.user_modules import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fsdp2 import CausalLM, CheckpointConfig, FSDP2Strategy, TextDataModule
from lightning_fsdp2.checkpoint.formats import directory as distributed
from lightning_fsdp2.strategies.parts.resumption import Resumption

STEPS = 6
SAVE_EVERY = 2
CONFIG = {**GPT2, "vocab_size": 257, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
CONTEXT_PARALLEL_CONFIG = {**CONFIG, "attn_pdrop": 0.0}
"""Whose attention drops nothing; the rest draws numbers of each rank's own."""


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
        assert self.trainer.estimated_stepping_batches == self.trainer.max_steps
        return super().configure_optimizers()


def train(
    folder: Path,
    *,
    steps: int = STEPS,
    ckpt_path: str | None = None,
    callbacks: list[pl.Callback] | None = None,
    **strategy: Any,
) -> dict[str, Any]:
    pl.seed_everything(1, workers=True, verbose=False)
    config = CONTEXT_PARALLEL_CONFIG if "cp_size" in strategy else CONFIG
    module = PlansAhead(config=config, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1))
    data = TextDataModule(path=str(folder / "text"), sequence_length=16, batch_size=2, validation_fraction=0.2)
    trainer = make_trainer(
        FSDP2Strategy(**strategy),
        max_steps=steps,
        accumulate_grad_batches=2,
        val_check_interval=3,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        gradient_clip_val=0.5,
        callbacks=[
            *(callbacks or []),
            ModelCheckpoint(folder / "run", every_n_train_steps=SAVE_EVERY, save_top_k=0, save_last=True),
        ],
        enable_checkpointing=True,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    weights = whole_of_stages(module.state_dict(), trainer)
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    return {"weights": weights, "step": trainer.global_step, "epoch": trainer.current_epoch, "lr": lr}


def write_text(folder: Path) -> Path:
    (folder / "text").mkdir()
    for index in range(12):
        (folder / "text" / f"{index}.txt").write_text(f"document {index} says {'again and again ' * 3}{index}")
    return folder


MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "pp2": (2, {"pp_size": 2}),
    "cp2": (2, {"cp_size": 2}),
    "dp2-cp2": (4, {"cp_size": 2}),
}
"""Ranks, and sizes."""

Uninterrupted = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """Train on a mesh to the end, only once each."""

    @cache
    def run(mesh: str) -> tuple[Path, dict[str, Any]]:
        folder = write_text(tmp_path_factory.mktemp(mesh))
        ranks, sizes = MESHES[mesh]
        return folder / "text", run_ranks(lambda: train(folder, **sizes), ranks)[0]

    return run


CELLS = {
    f"{mesh}-{'async' if async_save else 'sync'}-{step}": (mesh, async_save, step)
    for mesh, async_save, step in itertools.product(MESHES, (False, True), (3, 4, 5))
}
MATRIX = Matrix(
    "killed runs",
    {
        name: {"mesh": mesh, "saves": async_save, "lost": step % SAVE_EVERY}
        for name, (mesh, async_save, step) in CELLS.items()
    },
    always=("dp2-sync-5",),  # a later checkpoint
    costs={name: MESHES[mesh][0] for name, (mesh, _, _) in CELLS.items()},
)


@pytest.mark.guarantees("bit-for-bit")
@pytest.mark.parametrize(("mesh", "async_save", "step"), MATRIX.list_parameters(CELLS))
def test_a_run_killed_at_any_step_resumes_to_the_same_weights(
    mesh: str, async_save: bool, step: int, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """Stages, and context parallel ranks, draw random numbers of their own.

    The context parallel ranks of a sequence share one position in the data.
    """
    text, expected = uninterrupted(mesh)
    (tmp_path / "text").symlink_to(text)
    ranks, sizes = MESHES[mesh]
    strategy = {**sizes, "checkpoint": CheckpointConfig(async_save=async_save)}
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: train(tmp_path, callbacks=[KillAt(step)], **strategy), ranks, patience=0.5)
    assert_same_end(tmp_path, expected, ranks, **strategy)


@pytest.mark.release
@pytest.mark.parametrize("step", [6, 7])
def test_a_longer_run_killed_at_any_step_resumes_to_the_same_weights(step: int, tmp_path: Path) -> None:
    """From checkpoints that took the place of others."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_text(tmp_path / name)
    expected = run_ranks(lambda: train(tmp_path / "whole", steps=8), 2)[0]
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: train(tmp_path / "killed", steps=8, callbacks=[KillAt(step)]), 2, patience=0.5)
    assert_same_end(tmp_path / "killed", expected, steps=8)


@pytest.mark.slow
def test_a_run_killed_while_it_saves_resumes_from_the_checkpoint_before(
    uninterrupted: Uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = uninterrupted("dp2")
    (tmp_path / "text").symlink_to(text)
    finish = distributed._finish
    saves = []

    def die_in_second_save(*args: Any) -> None:
        saves.append(args)
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(*args)

    monkeypatch.setattr(distributed, "_finish", die_in_second_save)
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: train(tmp_path), 2, patience=0.5)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")] == ["last.ckpt"]
    assert_same_end(tmp_path, expected)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


def assert_same_end(
    folder: Path, expected: dict[str, Any], ranks: int = 2, *, steps: int = STEPS, **strategy: Any
) -> None:
    for actual in run_ranks(lambda: train(folder, steps=steps, ckpt_path="last", **strategy), ranks):
        assert actual["step"] == expected["step"] == steps
        assert actual["epoch"] == expected["epoch"]
        assert actual["lr"] == expected["lr"]
        different = [
            name for name, weight in expected["weights"].items() if not torch.equal(actual["weights"][name], weight)
        ]
        assert different == []


# ---------------------------------------------------------------------- other meshes


class Look(pl.Callback):
    """Keeps the random numbers that a rank draws next, where training begins."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if not hasattr(self, "numbers"):
            with torch.random.fork_rng(devices=[]):
                self.numbers = torch.rand(4).tolist()


class Read(Look):
    """Keeps the batches that a rank reads too."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        super().on_train_batch_start(trainer, module, batch, index)
        self.batches.append(batch["input_ids"].flatten().tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "sizes", "ranks"),
    [(2, {}, 2), pytest.param(4, {"cp_size": 2}, 2, marks=pytest.mark.release), (2, {"cp_size": 2}, 4)],
)
def test_context_parallel_ranks_go_on_in_the_data_where_half_as_many_ranks_would(
    before: int, sizes: dict[str, int], ranks: int, tmp_path: Path
) -> None:
    folder, path = write_text(tmp_path), tmp_path / "a.ckpt"
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: train(folder, callbacks=[KillAt(5)], **sizes), before, patience=0.5)
    shutil.copytree(folder / "run" / "last.ckpt", path)

    def resume(**strategy: Any) -> tuple[list[list[int]], list[float]]:
        read = Read()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The checkpoint holds the random states")  # of another number of ranks
            train(folder, ckpt_path=str(path), callbacks=[read], **strategy)
        return read.batches, read.numbers

    expected = run_ranks(resume, ranks // 2)
    actual = run_ranks(lambda: resume(cp_size=2), ranks)
    assert all(len(batches) == 4 for batches, _ in expected), "two steps of two micro-batches are left"
    assert [batches for batches, _ in actual] == [expected[rank // 2][0] for rank in range(ranks)]
    assert [numbers for _, numbers in actual[::2]] == [numbers for _, numbers in actual[1::2]]


def train_on(tp_size: int, steps: int, *, ckpt_path: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Ranks begin with random states of their own; every batch is the same."""
    torch.manual_seed(100 + torch.distributed.get_rank())
    look = Look()
    trainer = make_trainer(FSDP2Strategy(tp_size=tp_size), max_steps=steps, callbacks=[look])
    batches: Any = DataLoader(make_token_batches(1, ragged=False) * 8, batch_size=None)  # type: ignore[arg-type]
    module = CausalLM(config={**CONFIG, "n_layer": 1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, batches, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    shards = {name: cast(DTensor, weight).to_local().detach() for name, weight in module.named_parameters()}
    replicated = {name: shard for name, shard in shards.items() if shard.shape == module.get_parameter(name).shape}
    dropped = [str(warning.message) for warning in caught if "random states" in str(warning.message)]
    return {"numbers": look.numbers, "replicated": replicated, "dropped": dropped}


@pytest.mark.parametrize("says_mesh", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["now", "before"])
def test_ranks_of_one_replica_drop_the_same_activations_behind_a_checkpoint_of_another_mesh(
    says_mesh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = Resumption.gather
    if not says_mesh:  # as they were written before meshes were compared

        def gather_without_mesh(*args: Any) -> dict[str, Any]:
            return {key: value for key, value in gather(*args).items() if key != "mesh"}

        monkeypatch.setattr(Resumption, "gather", gather_without_mesh)
    path = tmp_path / "a.ckpt"

    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        train_on(1, 1, save=path)
        return train_on(2, 2, ckpt_path=path), train_on(1, 2, ckpt_path=path)

    (first, first_on_same_mesh), (second, second_on_same_mesh) = run_ranks(run, 2)
    assert first["numbers"] == second["numbers"]
    assert len(first["replicated"]) > 5
    different = [name for name, weight in first["replicated"].items() if not weight.equal(second["replicated"][name])]
    assert different == []
    assert len(first["dropped"]) == 1
    saved_on = (
        "{'dp_replicate': 1, 'dp_shard': 2, 'context_parallel': 1, 'tensor_parallel': 1}" if says_mesh else "unknown"
    )
    assert f"random states of 2 data parallel ranks (mesh {saved_on})" in first["dropped"][0]
    numbers = first_on_same_mesh["numbers"], second_on_same_mesh["numbers"]
    assert numbers[0] != numbers[1], "the states of the ranks come back on the same mesh"
    assert first_on_same_mesh["dropped"] == []
