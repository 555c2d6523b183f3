"""Checkpoints through the Trainer: written beside training, by Lightning's own callbacks, on all ranks or explained."""

import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from helpers import user_modules
from helpers.oracle import whole
from helpers.ranks import RankError, run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import WIDTH, WORLD, AtSteps, Normalized
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import CheckpointConfig, load_checkpoint
from lightning_fsdp2.checkpoint import asynchronous, verify_checkpoint
from lightning_fsdp2.checkpoint.files import drafts as folder
from lightning_fsdp2.strategies import checkpoint_io
from lightning_fsdp2.strategies.checkpoint_io import MeshCheckpointIO

INPUTS = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(1)).repeat(8, 1)
"""Every batch is the same, so that it does not matter where in an epoch a run resumes."""


class Regressor(Normalized):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch.sum(-1, keepdim=True)).square().mean()
        self.log("loss", loss.detach())
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


make_trainer = partial(STRATEGIES["fsdp2"].make_trainer, max_steps=4)


def make_loader() -> DataLoader[Tensor]:
    return DataLoader(INPUTS, batch_size=8)  # type: ignore[arg-type]


def fit(trainer: pl.Trainer, **options: Any) -> Regressor:
    module = Regressor()
    trainer.fit(module, make_loader(), **options)
    return module


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def read_weights(path: Path) -> dict[str, Tensor]:
    module = Regressor()
    load_checkpoint(path, module)
    return module.state_dict()


class Gate:
    """Holds the writing of checkpoints back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        write = checkpoint_io.write_snapshot

        def write_behind_gate(*args: Any) -> None:
            assert self._open.wait(60)
            write(*args)

        monkeypatch.setattr(checkpoint_io, "write_snapshot", write_behind_gate)

    def open(self, *args: Any) -> None:
        self._open.set()


ASYNC = CheckpointConfig(async_save=True)


# ---------------------------------------------------------------------- asynchronous


@pytest.mark.guarantees("async-save")
def test_training_goes_on_while_a_checkpoint_of_its_moment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"

    def run() -> None:
        gate, saved = Gate(monkeypatch), {}

        def save(trainer: pl.Trainer) -> None:
            trainer.save_checkpoint(path)
            saved.update(whole(trainer.lightning_module.state_dict()))

        def look_and_open(trainer: pl.Trainer) -> None:
            assert not path.exists()
            gate.open()

        trainer = make_trainer(checkpoint=ASYNC, callbacks=[AtSteps({1: save, 3: look_and_open})])
        module = fit(trainer)
        after = whole(module.state_dict())
        assert not any(after[name].equal(saved[name]) for name in saved if "running" in name or "weight" in name)
        assert names(tmp_path) == ["a.ckpt"], "the end of the fit waits"
        weights = read_weights(path)
        assert all(weights[name].equal(value) for name, value in saved.items())
        verify_checkpoint(path)

    run_ranks(run, WORLD)


@pytest.mark.guarantees("failed-saves")
def test_a_failed_write_is_raised_in_the_next_step_on_all_ranks_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_io.write_snapshot
    writes: list[Path] = []

    def fail_second(path: Path, *args: Any) -> None:
        writes.append(path)
        if len(writes) == 2 and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        if len(writes) != 2:
            write(path, *args)

    def run() -> int:
        monkeypatch.setattr(checkpoint_io, "write_snapshot", fail_second)
        keep_one = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
        trainer = make_trainer(checkpoint=ASYNC, enable_checkpointing=True, callbacks=[keep_one], max_steps=50)
        with pytest.raises(OSError, match="No space left"):
            fit(trainer)
        return trainer.global_step

    first, second = run_ranks(run, WORLD)
    assert first == second < 50
    assert names(tmp_path) == ["step=1.ckpt"]


def test_copies_that_one_rank_cannot_make_fail_the_save_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        save = AtSteps({1: lambda trainer: trainer.save_checkpoint(path)})
        trainer = make_trainer(checkpoint=ASYNC, max_steps=2000, callbacks=[save])

        def stage(self: Any, *args: Any, **options: Any) -> Any:
            raise MemoryError("no host memory left")

        if os.environ["RANK"] == "1":
            monkeypatch.setattr(asynchronous.StateDictStager, "stage", stage)
        with pytest.raises(MemoryError, match="no host memory left"):
            fit(trainer)
        assert trainer.global_step < 2000  # the copies are made in the background of some steps

    path = tmp_path / "a.ckpt"
    run_ranks(run, WORLD)
    assert names(tmp_path) == []


@pytest.mark.guarantees("nothing-is-removed-early", "complete-last")
@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_last_names_a_complete_checkpoint_at_every_moment(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def run() -> list[str]:
        for name in ("remove_checkpoint", "link_checkpoint"):
            act = getattr(checkpoint_io, name)

            def look_first(*args: Any, act: Any = act) -> None:
                if (tmp_path / "last.ckpt").is_symlink():
                    seen.append(os.readlink(tmp_path / "last.ckpt"))
                    verify_checkpoint(tmp_path / "last.ckpt")
                act(*args)
                verify_checkpoint(tmp_path / "last.ckpt")

            monkeypatch.setattr(checkpoint_io, name, look_first)
        callback = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", save_last="link"
        )
        config = CheckpointConfig(async_save=is_async)
        fit(make_trainer(checkpoint=config, enable_checkpointing=True, callbacks=[callback]))
        return seen

    links = run_ranks(run, WORLD)[0]
    assert links == ["step=1.ckpt", "step=2.ckpt", "step=2.ckpt", "step=3.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"


# ---------------------------------------------------------------------- Lightning's own machinery


@pytest.mark.guarantees("model-checkpoint")
@pytest.mark.filterwarnings(r"ignore:ModelCheckpoint\(save_last=True\) writes every checkpoint twice")
@pytest.mark.parametrize(
    ("is_async", "save_last"),
    [
        (True, "link"),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(False, "link", marks=pytest.mark.release),
        pytest.param(True, True, marks=pytest.mark.release),
    ],
)
def test_model_checkpoint_keeps_the_best_and_the_last(is_async: bool, save_last: Any, tmp_path: Path) -> None:
    config = CheckpointConfig(async_save=is_async)

    def make(**options: Any) -> tuple[ModelCheckpoint, pl.Trainer]:
        callback = ModelCheckpoint(
            tmp_path, "{step}", monitor="loss", save_top_k=2, every_n_train_steps=1, save_last=save_last
        )
        return callback, make_trainer(checkpoint=config, enable_checkpointing=True, callbacks=[callback], **options)

    def run() -> None:
        callback, trainer = make(max_steps=3)
        module = fit(trainer)
        best = {Path(path).name for path in callback.best_k_models}
        assert len(best) == 2
        assert set(names(tmp_path)) >= best | {"last.ckpt"}
        assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
        for path in tmp_path.iterdir():
            verify_checkpoint(path)
        trainer.test(module, make_loader(), ckpt_path="best", verbose=False)
        _, longer = make(max_steps=4)
        resumed = fit(longer, ckpt_path="last")
        expected = whole(fit(make_trainer(max_steps=4)).state_dict())
        assert all(value.equal(expected[name]) for name, value in whole(resumed.state_dict()).items())

    run_ranks(run, WORLD)


class SavedAt(pl.Callback):
    """Remembers behind which optimizer steps, and how many micro-batches more, checkpoints were saved."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        total = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self.places.append((trainer.global_step, total - trainer.global_step * trainer.accumulate_grad_batches))


class Validated(Regressor):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.net(batch).mean(), sync_dist=True)


def save_during_accumulation(
    folder: Path, ckpt_path: Path | None = None, max_steps: int = 7, **options: Any
) -> list[tuple[int, int]]:
    saved_at = SavedAt()
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, monitor="step", mode="max", **options)
    trainer = make_trainer(
        max_steps=max_steps,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
        callbacks=[saved_at, saver],
        check_val_every_n_epoch=None,
        val_check_interval=12,  # micro-batches, of which an epoch has 8
    )
    trainer.fit(Validated(), make_loader(), make_loader(), ckpt_path=ckpt_path)
    return saved_at.places


def test_model_checkpoint_does_not_save_amid_accumulation(tmp_path: Path) -> None:
    def run() -> None:
        save = partial(save_during_accumulation, every_n_train_steps=2)
        # the save behind step 4, the end of an epoch, is put off by Lightning until the validation behind step 6
        assert save(tmp_path / "whole") == [(2, 0), (6, 0)]
        # step 2 has been saved by the run before
        assert save(tmp_path / "resumed", tmp_path / "whole" / "step=2.ckpt") == [(6, 0)]

    run_ranks(run, WORLD)


@pytest.mark.slow
def test_saves_by_time_are_not_amid_accumulation(tmp_path: Path) -> None:
    def run() -> None:
        places = save_during_accumulation(tmp_path, max_steps=6, train_time_interval=timedelta(0))
        assert places == [(step, 0) for step in (1, 2, 3, 5, 6)]

    run_ranks(run, WORLD)


def test_a_checkpoint_amid_accumulation_says_what_it_lacks(tmp_path: Path) -> None:
    class Saver(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_idx in (1, 2):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    trainer.save_checkpoint(tmp_path / "amid.ckpt")
                said.append([str(warning.message) for warning in caught])

    said: list[list[str]] = []

    def run() -> list[list[str]]:
        fit(make_trainer(accumulate_grad_batches=2, max_steps=2, callbacks=[Saver()]))
        return said

    behind, amid = run_ranks(run, WORLD)[0]
    assert behind == []
    assert len(amid) == 1
    assert amid[0].startswith("A checkpoint is saved during gradient accumulation (accumulate_grad_batches=2)")


@pytest.mark.guarantees("model-checkpoint")
def test_saves_by_time_and_on_an_exception(tmp_path: Path) -> None:
    def run() -> None:
        by_time = ModelCheckpoint(tmp_path / "time", "{step}", train_time_interval=timedelta(0), save_top_k=-1)
        on_error = ModelCheckpoint(tmp_path / "error", "{step}", every_n_epochs=100, save_on_exception=True)

        def fail(trainer: pl.Trainer) -> None:
            raise ArithmeticError("on all ranks")

        callbacks = [AtSteps({3: fail}), by_time, on_error]
        with pytest.raises(ArithmeticError, match="on all ranks"):
            fit(make_trainer(checkpoint=ASYNC, enable_checkpointing=True, callbacks=callbacks))

    run_ranks(run, WORLD)
    assert names(tmp_path / "time") == ["step=1.ckpt", "step=2.ckpt"]
    assert names(tmp_path / "error") == ["step=3.ckpt"]
    verify_checkpoint(tmp_path / "error" / "step=3.ckpt")


def test_a_checkpoint_saved_after_test_and_one_of_weights_only(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer(checkpoint=ASYNC)
        module = fit(trainer)
        trainer.test(module, make_loader(), verbose=False)
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        other, tester = Regressor(), make_trainer()
        tester.test(other, make_loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
        trainer.test(module, make_loader(), ckpt_path=tmp_path / "after.ckpt", verbose=False)
        expected = whole(module.state_dict())
        assert all(value.equal(expected[name]) for name, value in whole(other.state_dict()).items())
        with pytest.raises(KeyError, match="contains only the model"):
            fit(make_trainer(max_steps=6), ckpt_path=tmp_path / "weights.ckpt")

    run_ranks(run, WORLD)


@pytest.mark.guarantees("lightnings-files")
@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sync", "async"])
def test_a_single_file_resumes_under_fsdp2_and_under_one_process(is_async: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    config = CheckpointConfig(format="full", async_save=is_async)

    def run() -> dict[str, Tensor]:
        trainer = make_trainer(checkpoint=config, max_steps=2)
        fit(trainer)
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(path)  # and once more in its place
        state, sharded = trainer.strategy.lightning_module_state_dict(), trainer.lightning_module.state_dict()
        assert state.keys() == (sharded.keys() if trainer.is_global_zero else set())  # as under Lightning's strategies
        expected = whole(sharded)
        assert all(type(value) is Tensor and value.equal(expected[name]) for name, value in state.items())
        resumed = whole(fit(make_trainer(checkpoint=config), ckpt_path=path).state_dict())
        expected = whole(fit(make_trainer()).state_dict())
        assert all(value.equal(expected[name]) for name, value in resumed.items())
        return resumed

    def run_alone() -> None:
        trainer = user_modules.make_trainer("auto", max_steps=3)
        module = fit(trainer, ckpt_path=path)
        assert trainer.global_step == 3
        assert trainer.optimizers[0].state[next(module.parameters())]["step"] == 3
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3

    run_ranks(run, WORLD)
    assert names(tmp_path) == ["a.ckpt"]
    assert path.is_file()
    run_ranks(run_alone, 1)


@pytest.mark.guarantees("dead-drafts")
def test_a_fit_removes_what_dead_saves_have_left(tmp_path: Path) -> None:
    def start_and_die() -> None:
        folder.Draft(tmp_path / "a.ckpt").path.mkdir()
        os._exit(1)

    with pytest.raises(RankError, match="died"):
        run_ranks(start_and_die, 1)
    assert len(names(tmp_path)) == 2
    callback = ModelCheckpoint(tmp_path, every_n_epochs=100)
    run_ranks(lambda: fit(make_trainer(enable_checkpointing=True, callbacks=[callback], max_steps=1)) and None, WORLD)
    assert names(tmp_path) == []


def test_a_plugin_that_writes_by_itself_is_refused_and_one_of_ours_is_used(tmp_path: Path) -> None:
    saved: list[str] = []

    class Recording(MeshCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **options: Any) -> None:
            saved.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, *args, **options)

    def run() -> None:
        with pytest.raises(ValueError, match=r"AsyncCheckpointIO.*derive the plugin from MeshCheckpointIO"):
            make_trainer(plugins=[AsyncCheckpointIO()])
        trainer = make_trainer(plugins=[Recording()], max_steps=1)
        fit(trainer)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        assert saved == ["a.ckpt"]
        with pytest.raises(TypeError, match="storage_options"):
            trainer.save_checkpoint(tmp_path / "b.ckpt", storage_options={})

    run_ranks(run, WORLD)
    assert names(tmp_path) == ["a.ckpt"]


def test_links_of_the_user_keep_what_they_point_to_and_names_that_are_written_again_stay(tmp_path: Path) -> None:
    milestone = tmp_path / "milestone.ckpt"

    class LinksFirstCheckpoint(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.is_global_zero and trainer.global_step == 1:
                milestone.symlink_to("step=1.ckpt")

    def run() -> None:
        callback = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", save_last="link"
        )
        callbacks = [callback, LinksFirstCheckpoint()]
        trainer = make_trainer(enable_checkpointing=True, callbacks=callbacks, max_steps=3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = fit(trainer)
        assert any("is not removed" in str(warning.message) for warning in caught) == trainer.is_global_zero
        io, last = trainer.strategy.checkpoint_io, tmp_path / "last.ckpt"
        first, third = tmp_path / "step=1.ckpt", tmp_path / "step=3.ckpt"
        # a removal that waits for the link to move, of a name that is then written again, by the run or by the user
        trainer.strategy.remove_checkpoint(third)
        trainer.save_checkpoint(third)
        io.link(first, last)
        assert third.exists()
        io.link(third, last)
        trainer.strategy.remove_checkpoint(third)
        io.link(first, last)
        if trainer.is_global_zero:
            shutil.copytree(first, third)
        io.link(first, last)
        trainer.test(module, make_loader(), verbose=False)

    run_ranks(run, WORLD)
    assert names(tmp_path) == ["last.ckpt", "milestone.ckpt", "step=1.ckpt", "step=3.ckpt"]
    assert os.readlink(milestone) == os.readlink(tmp_path / "last.ckpt") == "step=1.ckpt"
    verify_checkpoint(tmp_path / "step=3.ckpt")


@pytest.mark.slow
def test_a_later_run_without_links_keeps_what_the_last_one_points_to(tmp_path: Path) -> None:
    good = tmp_path / "last_good.ckpt"

    def make(steps: int, **options: Any) -> pl.Trainer:
        callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, monitor="step", mode="max", **options)
        return make_trainer(enable_checkpointing=True, callbacks=[callback], max_steps=steps)

    def run() -> None:
        fit(make(2, save_last="link"))
        fit(make(4), ckpt_path="last")
        dist.barrier()
        assert names(tmp_path) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
        dist.barrier()
        if dist.get_rank() == 0:
            good.symlink_to("step=2.ckpt")
        with pytest.warns(UserWarning, match="last_good.ckpt points to it") if dist.get_rank() == 0 else nullcontext():
            fit(make(5, save_last="link"), ckpt_path="last")

    run_ranks(run, WORLD)
    verify_checkpoint(tmp_path / "last.ckpt")
    assert os.readlink(tmp_path / "last.ckpt") == "step=5.ckpt"
    assert os.readlink(good) == "step=2.ckpt"
    verify_checkpoint(good)


@pytest.mark.slow
def test_links_of_another_name_are_moved_along_after_a_restart(tmp_path: Path) -> None:
    class Checkpoint(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "newest"

    def run() -> None:
        for steps in (1, 2, 3):
            options: dict[str, Any] = {"every_n_train_steps": 1, "monitor": "step", "mode": "max", "save_last": "link"}
            callback = Checkpoint(tmp_path, "{step}", enable_version_counter=False, **options)
            trainer = make_trainer(enable_checkpointing=True, callbacks=[callback], max_steps=steps)
            fit(trainer, ckpt_path="last" if steps > 1 else None)

    run_ranks(run, WORLD)
    assert names(tmp_path) == ["newest.ckpt", "step=3.ckpt"]


def test_a_name_that_is_being_written_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        gate = Gate(monkeypatch)

        class OpensAtSecondSave(MeshCheckpointIO):
            saves = 0

            def save_checkpoint(self, *args: Any, **options: Any) -> None:
                self.saves += 1
                if self.saves == 2:  # its name has been chosen
                    gate.open()
                super().save_checkpoint(*args, **options)

        callback = ModelCheckpoint(tmp_path, "best", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [callback], "max_steps": 2}
        fit(make_trainer(checkpoint=ASYNC, plugins=[OpensAtSecondSave()], **options))

    run_ranks(run, WORLD)
    assert names(tmp_path) == ["best-v1.ckpt", "best.ckpt"]


# ---------------------------------------------------------------------- all ranks, or an explanation


@pytest.mark.guarantees("save-on-one-rank")
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_save_on_one_rank_is_explained(rank: int, tmp_path: Path) -> None:
    def run() -> None:
        def save(trainer: pl.Trainer) -> None:
            if trainer.global_rank == rank:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

        trainer = make_trainer(callbacks=[AtSteps({1: save})])
        trainer.strategy.world.timeout = timedelta(seconds=2)
        fit(trainer)

    explained = (
        rf"wants to save a checkpoint, but not every rank reached this point.*rank {1 - rank} did not.*on all ranks"
    )
    with pytest.raises(RankError, match=explained) as caught:
        run_ranks(run, WORLD, patience=0.5)
    assert caught.value.rank == rank
    assert names(tmp_path) == []


def test_a_hook_that_fails_on_one_rank_is_explained_on_the_others(tmp_path: Path) -> None:
    class Fails(Regressor):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.global_rank == 1:
                raise ArithmeticError("in the hook")

    def run() -> None:
        def save(trainer: pl.Trainer) -> None:
            with suppress(ArithmeticError):
                trainer.save_checkpoint(tmp_path / "a.ckpt")

        trainer = make_trainer(callbacks=[AtSteps({1: save})])
        trainer.strategy.world.timeout = timedelta(seconds=2)
        trainer.fit(Fails(), make_loader())

    with pytest.raises(RankError, match=r"wants to write a checkpoint.*rank 1 did not.*on_save_checkpoint") as caught:
        run_ranks(run, WORLD, patience=0.5)
    assert caught.value.rank == 0
    assert names(tmp_path) == []


def test_a_save_meets_a_call_of_the_model(tmp_path: Path) -> None:
    def run() -> None:
        def save_or_call(trainer: pl.Trainer) -> None:
            if trainer.is_global_zero:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
            else:
                trainer.lightning_module.net(INPUTS[:2])

        with pytest.raises(RuntimeError, match="but another rank wants to do something else"):
            fit(make_trainer(callbacks=[AtSteps({1: save_or_call})]))

    run_ranks(run, WORLD)


def test_fast_dev_run_leaves_the_checkpoints_of_other_runs_alone(tmp_path: Path) -> None:
    def run() -> None:
        for number, options in enumerate(({}, {"fast_dev_run": 2})):
            saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_last=True, enable_version_counter=False)
            trainer = make_trainer(callbacks=[saver], **{"enable_checkpointing": True, "max_steps": 4, **options})
            fit(trainer)
            assert trainer.global_step == (4, 2)[number]
        assert load_checkpoint(tmp_path / "last.ckpt", Regressor()) is None
        assert torch.load(tmp_path / "last.ckpt" / "meta.pt", weights_only=False)["global_step"] == 4

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- positions of data loaders

SAMPLES = 24


class RankLoader:
    """Samples that the ranks take in turn, and a position in this rank's, which is the same on every rank."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return SAMPLES // dist.get_world_size()

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.position % len(self), len(self)):
            self.position = index + 1
            yield torch.tensor([index * dist.get_world_size() + dist.get_rank()])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class GlobalLoader(RankLoader):
    """Its position is one in all samples."""

    has_global_position = True

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position * dist.get_world_size()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"] // dist.get_world_size()

    def get_optional_restored_batches(self) -> int:
        return self.position


class Reader(Regressor):
    def on_fit_start(self) -> None:
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.tolist()
        return super().training_step(INPUTS[:8], batch_idx)


@pytest.mark.guarantees("dropped-states")
@pytest.mark.parametrize("loader", [RankLoader, pytest.param(GlobalLoader, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("before", "after", "samples"),
    [(2, 1, 8), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, 2, 8), (2, 2, 8), (2, 1, SAMPLES)))],
)
def test_only_a_position_in_the_whole_data_set_comes_back_on_another_number_of_ranks(
    loader: type[RankLoader], before: int, after: int, samples: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"

    def start() -> None:
        callbacks = [AtSteps({samples // before: lambda trainer: trainer.save_checkpoint(path)})]
        make_trainer(devices=before, callbacks=callbacks, max_steps=samples // before + 1).fit(Reader(), loader())

    def resume() -> tuple[list[int], list[str]]:
        trainer = make_trainer(devices=after, max_steps=-1, max_epochs=1 if samples < SAMPLES else 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module := Reader(), loader(), ckpt_path=path)
        return module.seen, [str(warning.message) for warning in caught]

    run_ranks(start, before)
    runs = run_ranks(resume, after)
    is_dropped = loader is RankLoader and after != before
    assert sorted(sample for seen, _ in runs for sample in seen) == [
        *range(0 if is_dropped else samples % SAMPLES, SAMPLES)
    ]
    warned = [message for message in runs[0][1] if f"data loader positions of {before} data parallel ranks" in message]
    assert len(warned) == is_dropped


class ValidatedReader(Reader):
    """Knows after how many batches of this fit each validation came."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.validations: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validations.append(len(self.seen))


def test_validations_come_as_if_the_run_had_always_had_this_number_of_ranks(tmp_path: Path) -> None:
    """Eight samples are four batches on each of two ranks, and eight on one; a validation follows every sixth batch."""
    path = tmp_path / "a.ckpt"
    options: dict[str, Any] = {"val_check_interval": 6, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}

    def start() -> None:
        callbacks = [AtSteps({4: lambda trainer: trainer.save_checkpoint(path)})]
        trainer = make_trainer(devices=2, callbacks=callbacks, max_steps=5, **options)
        trainer.fit(Reader(), GlobalLoader(), make_loader())

    def resume() -> list[int]:
        trainer = make_trainer(devices=1, max_steps=SAMPLES - 4, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The checkpoint holds the random states of 2 data parallel ranks")
            trainer.fit(module := ValidatedReader(), GlobalLoader(), make_loader(), ckpt_path=path)
        return module.validations

    run_ranks(start, 2)
    assert run_ranks(resume, 1) == [[12 - 8, 18 - 8, 24 - 8]]


# ---------------------------------------------------------------------- what is saved, and where


class SavesItsHead(Regressor):
    """A state dict of its own: a part of the weights, under other names."""

    strict_loading = False  # type: ignore[assignment]

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {"only." + name: value for name, value in super().state_dict().items() if name.startswith("net.2.")}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        own = {name.removeprefix("only."): value for name, value in state_dict.items()}
        return super().load_state_dict(own, *args, **options)


def test_a_module_may_save_what_it_wants(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer()
        trainer.fit(module := SavesItsHead(), make_loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
        other = SavesItsHead()
        make_trainer().test(other, make_loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
        expected, actual = (whole(dict(m.named_parameters())) for m in (module, other))
        assert {name for name, value in actual.items() if value.equal(expected[name])} == {
            "net.2.weight",
            "net.2.bias",
        }

    run_ranks(run, WORLD)


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_another_precision(precision: Any, tmp_path: Path) -> None:
    def run() -> None:
        def make() -> Regressor:
            module = Regressor()
            module.net[1] = nn.Tanh()  # torch's batch norm has no way with two dtypes
            return module

        trainer = make_trainer(max_steps=2)
        trainer.fit(module := make(), make_loader())
        saved = whole(module.state_dict())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        loaded: dict[str, Tensor] = {}
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

        class Look(pl.Callback):
            def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
                assert {parameter.dtype for parameter in module.parameters()} == {dtype}
                loaded.update(whole(module.state_dict()))

        again = make_trainer(precision=precision, callbacks=[Look()], max_steps=3)
        again.fit(make(), make_loader(), ckpt_path=tmp_path / "a.ckpt")
        assert loaded
        assert all(value.equal(saved[name].to(dtype).float()) for name, value in loaded.items())

    run_ranks(run, WORLD)


class SavesKeys(Regressor):
    """Hooks may use any key."""

    keys = {"summary": {"a": 1}, "extra_states": [2], "optimizer_note": "three", "metadata": {4: "four"}}  # noqa: RUF012

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.keys)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {key: checkpoint.get(key) for key in self.keys}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 10))
        return [optimizer], [schedule]


@pytest.mark.guarantees("everything-is-restored")
@pytest.mark.parametrize("format_", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_hooks_and_schedules_get_back_what_they_saved(format_: Any, tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer(checkpoint=CheckpointConfig(format=format_), max_steps=2)
        trainer.fit(SavesKeys(), make_loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        trainer = make_trainer(max_steps=3)
        trainer.fit(module := SavesKeys(), make_loader(), ckpt_path=tmp_path / "a.ckpt")
        assert module.loaded == module.keys

    run_ranks(run, WORLD)


class SharedStore(LocalFileSystem):
    """An object store that all ranks see."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("shared:/"))


@pytest.mark.guarantees("stores")
def test_a_store_of_fsspec_holds_the_checkpoints_of_all_ranks(tmp_path: Path) -> None:
    fsspec.register_implementation("shared", SharedStore, clobber=True)

    def run() -> None:
        callback = ModelCheckpoint(
            f"shared:/{tmp_path}", "{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
        )
        trainer = make_trainer(checkpoint=ASYNC, enable_checkpointing=True, callbacks=[callback])
        expected = whole(fit(trainer).state_dict())
        resumed = fit(
            make_trainer(checkpoint=CheckpointConfig(verify=True), max_steps=4), ckpt_path=callback.best_model_path
        )
        assert all(value.equal(expected[name]) for name, value in whole(resumed.state_dict()).items())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # universal-pathlib has no class of its own for this store
        run_ranks(run, WORLD)
    assert names(tmp_path) == ["step=3.ckpt", "step=4.ckpt"]
