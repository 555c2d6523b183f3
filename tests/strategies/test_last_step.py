"""A fit that comes to its end leaves `last.ckpt` at its last step, from which a run goes on as if it had not ended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import WORLD, Regressor, make_batches, make_optimizer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, Timer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fsdp2 import CheckpointConfig

BATCHES = 4
"""Number of batches of an epoch on each rank."""

EVERY = 3


class Model(Regressor):
    """Validates to ever higher losses, schedules by epochs, and knows what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch["number"].item())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.global_step), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def make_loader(count: int = BATCHES, kind: type[DataLoader[Any]] = StatefulDataLoader) -> DataLoader[Any]:
    """Return a loader of the rank's batches, in another order in each epoch."""
    batches = [{**batch, "number": torch.tensor(i)} for i, batch in enumerate(make_batches(count * WORLD))]
    return kind(batches, batch_size=None, sampler=DistributedSampler(batches, WORLD, dist.get_rank()))


def fit(
    kind: Kind,
    folder: Path | None,
    *,
    checkpoint: CheckpointConfig | None = None,
    ckpt_path: Path | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    save: dict[str, Any] | None = None,
    loader: type[DataLoader[Any]] = StatefulDataLoader,
    **options: Any,
) -> tuple[pl.Trainer, Model]:
    saves = []
    if folder is not None:
        options = {"enable_checkpointing": True, **options}
        save = {"save_top_k": 0, "save_last": True, **(save or {})}
        saves = [ModelCheckpoint(folder, every_n_train_steps=EVERY, **save)]
    trainer = kind.make_trainer(
        checkpoint=checkpoint, **{"max_steps": -1, "max_epochs": -1, **options}, callbacks=[*callbacks, *saves]
    )
    module = Model()
    trainer.fit(module, make_loader(kind=loader), make_loader(1), ckpt_path=ckpt_path)
    return trainer, module


def read_step(path: Path) -> int:
    return torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)["global_step"]


FSDP2 = STRATEGIES["fsdp2"]


def stop_at_5(trainer: pl.Trainer, *_: Any) -> None:
    trainer.should_stop = trainer.global_step == 5


ENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "before the first interval": (2, {"max_steps": 2}),
    "with accumulation": (4, {"max_epochs": 2, "accumulate_grad_batches": 3}),
    "amid an epoch": (7, {"max_steps": 7}),
    "at the end of an epoch": (8, {"max_steps": 8}),
    "after epochs": (8, {"max_epochs": 2}),
    "at an interval": (6, {"max_steps": 6}),
    "early": (8, {"callbacks": (EarlyStopping("loss", patience=1),)}),
    "on request": (5, {"callbacks": (LambdaCallback(on_train_batch_end=stop_at_5),)}),
    "link": (7, {"max_steps": 7, "save": {"save_last": "link", "save_top_k": 2, "monitor": "step", "mode": "max"}}),
    "async": (7, {"max_steps": 7, "checkpoint": CheckpointConfig(async_save=True)}),
    "one file": (7, {"max_steps": 7, "checkpoint": CheckpointConfig(format="full")}),
}


@pytest.mark.guarantees("last-step")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "names", [list(ENDS)[:2], pytest.param(list(ENDS)[2:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_the_last_checkpoint_is_that_of_the_last_step(names: list[str], tmp_path: Path) -> None:
    def run() -> None:
        for name in names:
            step, options = ENDS[name]
            trainer, _ = fit(FSDP2, tmp_path / name, **options)
            assert trainer.global_step == step, name
            path = tmp_path / name / "last.ckpt"
            assert read_step(path) == step, name
            assert trainer.checkpoint_callback.last_model_path == str(path)

    run_ranks(run, WORLD)


def get_logged_step(trainer: pl.Trainer) -> int:
    """Return the step at which loggers write their next row."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


GOES_ON: dict[str, tuple[dict[str, int], dict[str, int], type[DataLoader[Any]]]] = {
    "after epochs": ({"max_epochs": 1}, {"max_epochs": 2}, StatefulDataLoader),
    "amid an epoch": ({"max_steps": 7}, {"max_steps": 10}, StatefulDataLoader),
    "amid an epoch, for epochs": ({"max_steps": 7}, {"max_epochs": 3}, StatefulDataLoader),
    "after an epoch": ({"max_steps": BATCHES}, {"max_steps": 10}, DataLoader),
    "after an epoch, without validation": (
        {"max_steps": BATCHES, "limit_val_batches": 0},
        {"max_steps": 10, "limit_val_batches": 0},
        DataLoader,
    ),
}
"""How a first run ends, how one goes on that was not ended, and the loader of both."""

TWO_ENDS = ["amid an epoch, for epochs", "after an epoch"]
OTHER_ENDS = [name for name in GOES_ON if name not in TWO_ENDS]


@pytest.mark.guarantees("goes-on-from-the-last-step")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        pytest.param("fsdp2", list(GOES_ON), id="fsdp2"),
        *(pytest.param(strategy, TWO_ENDS, id=strategy) for strategy in ("ddp", "megatron_fsdp")),
        *(
            pytest.param(strategy, OTHER_ENDS, id=f"{strategy}-others", marks=pytest.mark.release)
            for strategy in ("ddp", "megatron_fsdp")
        ),
    ],
)
def test_a_run_goes_on_from_there_as_if_it_had_not_ended(strategy: str, names: list[str], tmp_path: Path) -> None:
    kind = STRATEGIES[strategy]

    def run() -> None:
        for name in names:
            first, whole_run, loader = GOES_ON[name]
            expected_trainer, expected = fit(kind, None, loader=loader, **whole_run)
            trainer, before = fit(kind, tmp_path / name, loader=loader, **first)
            trainer.save_checkpoint(tmp_path / name / "after_fit.ckpt")
            for file in ("last.ckpt", "after_fit.ckpt"):
                trainer, after = fit(kind, None, loader=loader, ckpt_path=tmp_path / name / file, **whole_run)
                assert before.seen + after.seen == expected.seen, (name, file)
                assert trainer.current_epoch == expected_trainer.current_epoch, (name, file)
                assert get_logged_step(trainer) == get_logged_step(expected_trainer), (name, file)
                torch.testing.assert_close(
                    whole(dict(after.named_parameters())), whole(dict(expected.named_parameters()))
                )

    kind.run(run, WORLD)


RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "validated in its last step": (2, {"val_check_interval": 2}),
    "amid an epoch, without validation": (2, {"limit_val_batches": 0}),
    "validated in its last step, accumulated": (1, {"val_check_interval": 2, "accumulate_grad_batches": 2}),
    "validated at the end of an epoch": (BATCHES, {"val_check_interval": 1.0}),
    "validated amid the second epoch": (6, {"val_check_interval": 6, "check_val_every_n_epoch": None}),
}
"""Number of steps after which a run ends, and options with which it goes on."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "names", [list(RESUMED)[:1], pytest.param(list(RESUMED)[1:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_loggers_get_the_steps_of_a_run_that_was_not_interrupted(names: list[str], tmp_path: Path) -> None:
    def train(folder: Path | None, **options: Any) -> list[int]:
        seen: list[int] = []
        log = LambdaCallback(on_train_batch_start=lambda trainer, *_: seen.append(get_logged_step(trainer)))
        fit(FSDP2, folder, callbacks=(log,), **options)
        return seen

    def run() -> None:
        for name in names:
            steps, options = RESUMED[name]
            expected = train(None, max_steps=9, **options)
            before = train(tmp_path / name, max_steps=steps, **options)
            after = train(None, max_steps=9, ckpt_path=tmp_path / name / "last.ckpt", **options)
            assert before + after == expected, name

    run_ranks(run, WORLD)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("loader", [StatefulDataLoader, DataLoader])
def test_a_run_goes_on_from_the_hooks_of_the_last_batch_of_an_epoch(
    loader: type[DataLoader[Any]], tmp_path: Path
) -> None:
    path = tmp_path / "saved.ckpt"

    def save(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == BATCHES:
            trainer.save_checkpoint(path)

    def run() -> None:
        unvalidated = {"limit_val_batches": 0}
        for whole_run in ({"max_steps": 10}, {"max_epochs": 3}, {"max_steps": 10, **unvalidated}):
            callbacks = (LambdaCallback(on_train_batch_end=save),)
            expected_trainer, expected = fit(FSDP2, None, loader=loader, callbacks=callbacks, **whole_run)
            trainer, after = fit(FSDP2, None, loader=loader, ckpt_path=path, **whole_run)
            assert after.seen == expected.seen[BATCHES:], whole_run
            assert trainer.current_epoch == expected_trainer.current_epoch, whole_run
            assert get_logged_step(trainer) == get_logged_step(expected_trainer), whole_run
            torch.testing.assert_close(whole(dict(after.named_parameters())), whole(dict(expected.named_parameters())))

    run_ranks(run, WORLD)


def count_saves(run: Callable[[], Any]) -> list[int]:
    """Return the step of each checkpoint that is written."""
    steps: list[int] = []
    save = FSDP2.strategy.save_checkpoint

    def count(self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        steps.append(checkpoint["global_step"])
        save(self, checkpoint, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDP2.strategy, "save_checkpoint", count)
        run()
    return steps


def fail(trainer: pl.Trainer, *_: Any) -> None:
    if trainer.global_step == 5:
        raise RuntimeError("a failure")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_saved_twice(tmp_path: Path) -> None:
    def run() -> None:
        assert count_saves(lambda: fit(FSDP2, tmp_path / "a", max_steps=3)) == [3]
        assert count_saves(lambda: fit(FSDP2, tmp_path / "b", max_steps=4)) == [3, 4]
        last = tmp_path / "b" / "last.ckpt"
        assert count_saves(lambda: fit(FSDP2, tmp_path / "b", max_steps=4, ckpt_path=last)) == []

    run_ranks(run, WORLD)


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_saved_where_the_fit_did_not_end_or_was_told_otherwise(tmp_path: Path) -> None:
    def run() -> None:
        assert count_saves(lambda: fit(FSDP2, tmp_path / "a", max_steps=4, save={"save_last": None})) == []
        assert count_saves(lambda: fit(FSDP2, tmp_path / "b", fast_dev_run=True)) == []
        otherwise = CheckpointConfig(save_at_end=False)
        assert count_saves(lambda: fit(FSDP2, tmp_path / "c", max_steps=4, checkpoint=otherwise)) == [3]

        def fail_in_fit() -> None:
            with pytest.raises(RuntimeError, match="a failure"):
                fit(FSDP2, tmp_path / "d", max_steps=7, callbacks=(LambdaCallback(on_train_batch_end=fail),))

        assert count_saves(fail_in_fit) == [3]

    run_ranks(run, WORLD)


@pytest.mark.filterwarnings("ignore")
def test_time_that_is_over_is_an_end_too(tmp_path: Path) -> None:
    def run() -> None:
        timer = Timer(duration={"hours": 1})

        def be_late(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                timer.time_elapsed = lambda *_: 3601.0  # type: ignore[method-assign]

        trainer, _ = fit(FSDP2, tmp_path, callbacks=(LambdaCallback(on_train_batch_end=be_late), timer))
        assert trainer.global_step == read_step(tmp_path / "last.ckpt") == 2

    run_ranks(run, 1)
