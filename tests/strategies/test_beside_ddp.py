"""What a user sees of a run is what Lightning's own ``"ddp"`` shows: values, order, files and errors."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.cover import Matrix
from helpers.oracle import whole
from helpers.strategies import STRATEGIES
from helpers.user_modules import WORLD, Batch, ByHand, Regressor, make_batches, make_optimizer, make_trainer
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from lightning_fsdp2 import CheckpointConfig


@dataclass
class Run:
    """What a scenario runs with, and what it has seen on this rank."""

    make: Callable[..., pl.Trainer]
    folder: Path
    seen: list[Any] = field(default_factory=list)

    def trainer(self, **options: Any) -> pl.Trainer:
        defaults = {"max_steps": -1, "max_epochs": 1, "use_distributed_sampler": True, "default_root_dir": self.folder}
        return self.make(**{**defaults, **options})

    def see(self, *values: Any) -> None:
        self.seen.append(values)

    def see_progress(self, trainer: pl.Trainer) -> None:
        self.see("steps, epochs", trainer.global_step, trainer.current_epoch, trainer.state.status.value)
        self.see("metrics", dict(trainer.callback_metrics), dict(trainer.logged_metrics))

    def see_weights(self, module: nn.Module) -> None:
        self.see("weights", whole(dict(module.named_parameters())))

    def see_files(self) -> None:
        dist.barrier()
        checkpoints = [(str(path.relative_to(self.folder)), path.is_symlink()) for path in self.folder.rglob("*.ckpt")]
        self.see("checkpoints", sorted(checkpoints))

    @contextmanager
    def sees_error(self) -> Iterator[None]:
        """Whether there is an error is seen, and of which kind."""
        try:
            yield
        except BaseException as error:
            self.see("error", type(error).__name__)
        else:
            self.see("no error")


Scenario = Callable[[Run], None]
SCENARIOS: dict[str, Scenario] = {}
FAST: list[str] = []


def scenario(*, slow: bool = True) -> Callable[[Scenario], Scenario]:
    """Run the decorated function under both strategies."""

    def add(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = function
        FAST.extend([] if slow else [function.__name__])
        return function

    return add


def check(cell: dict[str, Any], folder: Path) -> None:
    """Compare what a scenario sees under a strategy with what it sees under Lightning's."""
    strategy = cell["strategy"]
    options = {"checkpoint": CheckpointConfig(save_at_end=False)}  # a last checkpoint which Lightning does not write
    makers = {
        "lightning": lambda **flags: make_trainer(LightningDDPStrategy(), **flags),
        "own": partial(STRATEGIES[strategy].make_trainer, **options),
    }

    def run() -> None:
        runs = {name: Run(make, folder / name) for name, make in makers.items()}
        for one in runs.values():
            one.folder.mkdir(exist_ok=True)
            torch.manual_seed(0)
            SCENARIOS[cell["scenario"]](one)
        assert_same(runs["own"].seen, runs["lightning"].seen)

    STRATEGIES[strategy].run(run, cell["ranks"])


def assert_same(seen: Any, expected: Any) -> None:
    """Compare nested values, numbers within the tolerances of torch."""
    assert len(expected) > 0
    for own, other in zip(seen, expected, strict=True):
        (leaves, structure), (expected_leaves, expected_structure) = tree_flatten(own), tree_flatten(other)
        assert structure == expected_structure, f"{own} instead of {other}"
        for leaf, reference in zip(leaves, expected_leaves, strict=True):
            if isinstance(reference, Tensor | float):
                torch.testing.assert_close(leaf, reference, equal_nan=True, rtol=1e-4, atol=1e-5)
            else:
                assert leaf == reference, f"{own} instead of {other}"


def make_samples(count: int) -> list[Batch]:
    batches = make_batches((count + 1) // 2)
    samples = [{key: value[row] for key, value in batch.items()} for batch in batches for row in range(2)]
    return [{**sample, "id": torch.tensor(number)} for number, sample in enumerate(samples[:count])]


def make_loader(samples: int = 16, **options: Any) -> DataLoader[Batch]:
    """The sampler that Lightning puts in gives each rank its samples."""
    return DataLoader(make_samples(samples), batch_size=2, **options)


class Logs(Regressor):
    """Logs in all stages, and predicts with the numbers of the samples."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch["id"], self(batch["inputs"])


# ---------------------------------------------------------------------- stages


@scenario(slow=False)
def stages_return_and_show(run: Run) -> None:
    module, trainer = Logs(), run.trainer()
    run.see(trainer.fit(module, make_loader(), make_loader(8)))
    run.see_progress(trainer)
    run.see(trainer.num_training_batches, trainer.estimated_stepping_batches, trainer.is_last_batch)
    run.see(trainer.validate(module, make_loader(8), verbose=False))
    run.see(trainer.test(module, [make_loader(8), make_loader(12)], verbose=False))
    run.see(trainer.predict(module, [make_loader(8), make_loader(7)]))
    run.see(trainer.predict(module, make_loader(8), return_predictions=False))
    run.see_weights(module)


@scenario()
def predictions_are_written(run: Run) -> None:
    class Writes(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, predictions: Any, ids: Any, *where: Any) -> None:
            run.see("batch", predictions, ids, where[1:])

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, ids: Any) -> None:
            run.see("epoch", predictions, ids)

    for interval in ("batch", "epoch", "batch_and_epoch"):
        trainer = run.trainer(callbacks=[Writes(interval)])
        run.see(trainer.predict(Logs(), [make_loader(7), make_loader(4)], return_predictions=interval == "epoch"))


def record_hooks(owner: type, seen: Callable[[str, str], None]) -> Any:
    """Make an ``owner`` that records the hooks that are called on it."""
    hooks = [name for name in dir(owner) if name.startswith("on_")]
    hooks += ["setup", "teardown", "configure_model", "configure_optimizers", "configure_gradient_clipping"]
    hooks += ["backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "transfer_batch_to_device"]

    def recording(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen(owner.__name__, name)
            return getattr(super(recorder, self), name)(*args, **kwargs)

        return hook

    methods = {name: recording(name) for name in hooks if callable(getattr(owner, name, None))}
    recorder = type(owner.__name__, (owner,), methods)
    return recorder()


@scenario()
def hooks_come_in_order(run: Run) -> None:
    module, callback = record_hooks(Logs, run.see), record_hooks(pl.Callback, run.see)
    options = {"callbacks": [callback], "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_epochs": 2}
    trainer = run.trainer(**options, num_sanity_val_steps=1)
    trainer.fit(module, make_loader(), make_loader(8))
    for stage in (trainer.validate, trainer.test, trainer.predict):
        stage(module, make_loader(8))
    trainer.save_checkpoint(run.folder / "x.ckpt")
    resumed = run.trainer(callbacks=[record_hooks(pl.Callback, run.see)], max_epochs=3)
    resumed.fit(record_hooks(Logs, run.see), make_loader(), ckpt_path=run.folder / "x.ckpt")


@scenario()
def trainer_says_where_it_is(run: Run) -> None:
    class Asks(pl.Callback):
        def ask(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            state = trainer.state
            run.see(str(state.fn), str(state.stage), str(state.status), trainer.global_step, trainer.current_epoch)

        setup = on_sanity_check_start = on_train_batch_start = on_validation_batch_start = ask  # type: ignore[assignment]
        on_test_batch_start = on_predict_batch_start = on_train_epoch_end = on_train_end = teardown = ask  # type: ignore[assignment]

    module, trainer = Logs(), run.trainer(callbacks=[Asks()])
    trainer.fit(module, make_loader(8), make_loader(4))
    for stage in (trainer.validate, trainer.test, trainer.predict):
        stage(module, make_loader(4))


@scenario(slow=False)
def arguments_that_lightning_refuses(run: Run) -> None:
    """The error of the second call is not that of cleaning up after it."""
    trainer = run.trainer()
    trainer.test(Logs(), make_loader(4), verbose=False)
    with run.sees_error():
        trainer.fit(Logs(), make_loader(4), datamodule=pl.LightningDataModule())
    for path in ("best", run.folder / "none.ckpt"):
        with run.sees_error():
            trainer.test(Logs(), make_loader(4), ckpt_path=path)


@scenario()
def errors_and_interrupts(run: Run) -> None:
    class Fails(Logs):
        def on_exception(self, exception: BaseException) -> None:
            run.see("module", type(exception).__name__)

    class Raises(pl.Callback):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise self.error

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            run.see("callback", type(exception).__name__)

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            run.see(stage)

    for error in (KeyError("here"), KeyboardInterrupt()):
        trainer = run.trainer(callbacks=[Raises(error)])
        with run.sees_error():
            trainer.fit(Fails(), make_loader())
        run.see(trainer.interrupted, trainer.global_step, trainer.state.status.value)


@scenario()
def stops_where_it_is_told(run: Run) -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.should_stop or batch_idx == 1

    class SkipsTheEpoch(Logs):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    for module, options in (
        (Logs(), {"callbacks": [Stops()]}),
        (Logs(), {"callbacks": [Stops()], "min_epochs": 2}),
        (SkipsTheEpoch(), {}),
    ):
        trainer = run.trainer(max_epochs=3, **options)
        trainer.fit(module, make_loader(), make_loader(8))
        run.see_progress(trainer)
        run.see_weights(module)


# ---------------------------------------------------------------------- data


class Counts(pl.LightningDataModule):
    """Says when it is asked for what."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def prepare_data(self) -> None:
        self.run.see("prepare_data")

    def setup(self, stage: str) -> None:
        self.run.see("setup", stage)

    def teardown(self, stage: str) -> None:
        self.run.see("teardown", stage)

    def state_dict(self) -> dict[str, Any]:
        return {"a number": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run.see("state", state)

    def train_dataloader(self) -> DataLoader[Batch]:
        self.run.see("train")
        return make_loader()

    def val_dataloader(self) -> DataLoader[Batch]:
        self.run.see("val")
        return make_loader(8)

    test_dataloader = predict_dataloader = val_dataloader


@scenario()
def datamodules(run: Run) -> None:
    module, data, trainer = Logs(), Counts(run), run.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, data)
    run.see(trainer.validate(module, data), trainer.test(module, data), trainer.predict(module, data))
    trainer.save_checkpoint(run.folder / "x.ckpt")
    run.see(run.trainer().validate(Logs(), Counts(run), ckpt_path=run.folder / "x.ckpt"))
    run.trainer(max_epochs=3).fit(module, Counts(run), ckpt_path=run.folder / "x.ckpt")
    run.see_weights(module)


class Combines(Logs):
    def loss(self, batch: Any) -> Tensor:
        parts = [batch] if "inputs" in batch else [part for part in batch.values() if part is not None]
        return sum((Regressor.loss(self, part) for part in parts), start=torch.zeros(()))


@scenario()
def combined_loaders(run: Run) -> None:
    for mode in ("min_size", "max_size", "max_size_cycle", "sequential"):
        make = lambda count=7, mode=mode: CombinedLoader({"a": make_loader(12), "b": make_loader(count)}, mode)  # noqa: E731
        module, trainer = Combines(), run.trainer()
        with run.sees_error():
            trainer.fit(module, make())
            run.see(trainer.num_training_batches)
        run.see(mode, trainer.validate(module, make(8)))  # of 7 samples, Lightning would evaluate one twice
        with run.sees_error():  # all but "sequential"
            run.see(trainer.predict(module, make()))
        run.see_weights(module)


class Streams(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        yield from make_samples(16)[dist.get_rank() :: dist.get_world_size()]


@scenario()
def streams(run: Run) -> None:
    make = lambda: DataLoader(Streams(), batch_size=2)  # noqa: E731
    module, trainer = Logs(), run.trainer(max_epochs=2, val_check_interval=3)
    trainer.fit(module, make(), make())
    run.see_progress(trainer)
    run.see(trainer.validate(module, make()), trainer.predict(module, make()))
    for options in ({"val_check_interval": 0.5}, {"limit_train_batches": 0.5}):
        with run.sees_error():
            run.trainer(**options).fit(Logs(), make(), make())


@scenario()
def nothing_to_do(run: Run) -> None:
    for option in ("limit_train_batches", "limit_val_batches", "max_epochs", "max_steps"):
        trainer = run.trainer(**{option: 0})
        trainer.fit(Logs(), make_loader(), make_loader(8))
        run.see(option)
        run.see_progress(trainer)
    trainer = run.trainer(limit_test_batches=0, limit_predict_batches=0)
    run.see(trainer.test(Logs(), make_loader()), trainer.predict(Logs(), make_loader()))
    empty: DataLoader[Any] = DataLoader([])
    run.see(trainer.validate(Logs(), empty), trainer.predict(Logs(), []))
    run.see_progress(trainer)


# ---------------------------------------------------------------------- steps


class ByClosure(ByHand):
    """The backward is in the closure, after the look at the gradients of the step before."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        self.log("loss of the step", optimizer.step(closure=closure))


@scenario(slow=False)
def manual_steps_by_closure(run: Run) -> None:
    module, trainer = ByClosure(), run.trainer()
    trainer.fit(module, make_loader())
    run.see_progress(trainer)
    run.see_weights(module)


class Alternates(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            schedule.step()
        self.log("rate", optimizer.param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [make_optimizer(part.parameters()) for part in (self.blocks, self.head)]
        return optimizers, [StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


@scenario()
def several_optimizers_by_hand(run: Run) -> None:
    module, trainer = Alternates(), run.trainer()
    trainer.fit(module, make_loader())
    run.see_progress(trainer)
    run.see_weights(module)


class Overrides(Logs):
    """Every hook of the step, each with what it sees."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def backward(self, loss: Tensor) -> None:
        self.run.see("backward", loss.detach())
        loss.backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = {name: parameter.grad for name, parameter in self.named_parameters()}
        self.run.see(type(optimizer).__name__, whole(gradients))

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.run.see("clip", gradient_clip_val, gradient_clip_algorithm)
        self.clip_gradients(optimizer, gradient_clip_val, "norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        self.run.see("step", epoch, batch_idx)
        if self.trainer.global_step != 1:
            optimizer.step(closure=closure)
        else:
            closure()  # and no step
        optimizer.param_groups[0]["lr"] = 0.01 * (self.trainer.global_step + 1)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.run.see("zero_grad", epoch, batch_idx)
        optimizer.zero_grad(set_to_none=False)


@scenario()
def overridden_steps(run: Run) -> None:
    module, trainer = Overrides(run), run.trainer(accumulate_grad_batches=2, gradient_clip_val=0.1, max_epochs=2)
    trainer.fit(module, make_loader())
    run.see_progress(trainer)
    run.see_weights(module)


class Returns(Logs):
    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.value = value

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.value(self.loss(batch))


@scenario()
def what_steps_return(run: Run) -> None:
    class Sees(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.see("outputs", outputs)

    for value in (lambda loss: {"loss": loss, "more": 1}, lambda loss: {"more": 1}, lambda loss: 1.0):
        with run.sees_error():
            run.trainer(callbacks=[Sees()], accumulate_grad_batches=2).fit(Returns(value), make_loader(12))


class Scheduled(Logs):
    def __init__(self, configure: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self, make_optimizer(self.parameters()))


def plateau(**options: Any) -> Callable[[Any, Any], Any]:
    return lambda module, optimizer: {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=9.0), **options},
    }


@scenario()
def learning_rate_schedules(run: Run) -> None:
    class Sees(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            run.see([group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])

    def one_cycle(module: pl.LightningModule, optimizer: Any) -> Any:
        schedule = OneCycleLR(optimizer, 0.5, total_steps=int(module.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "cycle"}]

    def every_second_step(module: pl.LightningModule, optimizer: Any) -> Any:
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 2}]

    forms = [one_cycle, every_second_step, plateau(monitor="val"), plateau(monitor="train_step", interval="step")]
    for form in [*forms, plateau(monitor="none"), plateau(monitor="none", strict=False), plateau()]:
        with run.sees_error():
            trainer = run.trainer(max_epochs=3, callbacks=[Sees()], accumulate_grad_batches=2)
            trainer.fit(Scheduled(form), make_loader(12), make_loader(4))


# ---------------------------------------------------------------------- logs


class LogsAll(Logs):
    """Every argument of ``self.log``."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        value = float(self.global_rank + batch_idx)
        self.log("both", value, on_step=True, on_epoch=True, prog_bar=True)
        for reduction in ("mean", "sum", "min", "max"):
            own = torch.tensor(value)
            self.log(reduction, own, reduce_fx=reduction, on_step=False, on_epoch=True, sync_dist=True)
        self.log("weighted", value, batch_size=batch_idx + 1, on_step=False, on_epoch=True)
        self.log("bar", value, prog_bar=True, logger=False)
        self.log_dict({"one": 1, "two": torch.tensor([2.5])}, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.global_rank), sync_dist=True)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", float(batch_idx + dataloader_idx + self.global_rank), sync_dist=True)
        self.log(f"own/{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)
        self.log("steps", float(batch_idx), on_step=True, on_epoch=True, batch_size=2)


@scenario(slow=False)
def everything_is_logged(run: Run) -> None:
    logger = CSVLogger(run.folder, version=0)
    trainer = run.trainer(logger=logger, log_every_n_steps=2, max_epochs=2)
    trainer.fit(LogsAll(), make_loader(), [make_loader(8), make_loader(8)])
    run.see_progress(trainer)
    run.see(dict(trainer.progress_bar_metrics))
    dist.barrier()
    run.see((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())


class Measures(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.errors = MetricCollection([MeanAbsoluteError(), MeanSquaredError()], prefix="val_")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.error(self(batch["inputs"]), batch["targets"])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.errors(self(batch["inputs"]), batch["targets"])
        self.log_dict(self.errors, on_step=False, on_epoch=True)


@scenario()
def metrics_are_logged(run: Run) -> None:
    trainer = run.trainer(max_epochs=2)
    trainer.fit(Measures(), make_loader(), make_loader(8))
    run.see_progress(trainer)


# ---------------------------------------------------------------------- checkpoints


@scenario()
def evaluation_of_checkpoints(run: Run) -> None:
    best = ModelCheckpoint(run.folder, "{epoch}", monitor="val", mode="max", save_top_k=2, save_last=True)
    trainer = run.trainer(max_epochs=3, callbacks=[best], enable_checkpointing=True)
    trainer.fit(Logs(), make_loader(), make_loader(8))
    run.see_files()
    for path in ("best", "last", best.kth_best_model_path, None):
        run.see(trainer.validate(dataloaders=make_loader(8), ckpt_path=path, verbose=False))
        run.see(trainer.predict(dataloaders=make_loader(8), ckpt_path=path))
        run.see(os.path.basename(trainer.ckpt_path or "none"))


class Remembers(pl.Callback):
    state_key = "my key"

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return {"a number": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run.see("state", state)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.run.see("saves", sorted(checkpoint))
        checkpoint["extra"] = {"numbers": torch.arange(3), "epoch": trainer.current_epoch}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.run.see("loads", checkpoint["extra"])


@scenario()
def what_checkpoints_hold(run: Run) -> None:
    trainer = run.trainer(callbacks=[Remembers(run)], accumulate_grad_batches=2)
    trainer.fit(Logs(), make_loader())
    for name, weights_only in (("all", False), ("weights", True)):
        trainer.save_checkpoint(run.folder / f"{name}.ckpt", weights_only=weights_only)
        module, resumed = Logs(), run.trainer(callbacks=[Remembers(run)], max_epochs=2)
        with run.sees_error():
            resumed.fit(module, make_loader(), ckpt_path=run.folder / f"{name}.ckpt")
            run.see_progress(resumed)
            run.see_weights(module)


class GoesUpAndDown(Logs):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", (3.0, 1.0, 2.0, 0.5)[self.current_epoch % 4], sync_dist=True)
        self.log("val/error", 0.25)


SAVED: list[dict[str, Any]] = [
    {"save_top_k": -1, "filename": "{epoch:02d}-{val:.2f}"},
    {"save_top_k": 0, "save_last": True},
    {"save_top_k": 2, "monitor": "val"},
    {"save_top_k": 1, "monitor": "val", "save_last": "link"},
    {"save_top_k": -1, "every_n_epochs": 2},
    {"save_top_k": -1, "every_n_train_steps": 3},
    {"save_top_k": -1, "monitor": "val", "save_on_train_epoch_end": True},
    {"save_top_k": -1, "filename": "{epoch}_{val/error:.1f}", "auto_insert_metric_name": False},
    {"save_top_k": -1, "filename": "same"},
    {"save_top_k": -1, "filename": "same", "enable_version_counter": False},
    {"monitor": "none"},
    {"save_weights_only": True},
]


@scenario()
def checkpoints_are_kept(run: Run) -> None:
    for number, options in enumerate(SAVED):
        callback = ModelCheckpoint(run.folder / str(number), **options)
        trainer = run.trainer(callbacks=[callback], enable_checkpointing=True, max_epochs=4, num_sanity_val_steps=0)
        with run.sees_error():
            trainer.fit(GoesUpAndDown(), make_loader(8), make_loader(4))
        paths = [callback.best_model_path, callback.last_model_path, callback.kth_best_model_path]
        run.see(number, [os.path.basename(path) for path in paths], callback.best_model_score, callback.kth_value)
    run.see_files()


# ---------------------------------------------------------------------- callbacks, tuner


@scenario()
def early_stopping(run: Run) -> None:
    for options in (
        {"patience": 1},
        {"mode": "max", "patience": 1},
        {"stopping_threshold": 1.5},
        {"divergence_threshold": 2.5},
        {"min_delta": 2.0, "patience": 2},
    ):
        stopping = EarlyStopping("val", **options)
        trainer = run.trainer(callbacks=[stopping], max_epochs=4, num_sanity_val_steps=0)
        trainer.fit(GoesUpAndDown(), make_loader(4), make_loader(4))
        run.see(trainer.current_epoch, stopping.state_dict(), stopping.stopping_reason_message)
    for strict in (True, False):
        with run.sees_error():
            run.trainer(callbacks=[EarlyStopping("none", strict=strict)]).fit(Logs(), make_loader(4), make_loader(4))


class HasRate(Logs):
    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@scenario()
def learning_rate_finder(run: Run) -> None:
    for options in ({}, {"mode": "linear", "min_lr": 0.01, "max_lr": 0.3}, {"update_attr": False}):
        module, trainer = HasRate(), run.trainer(max_epochs=2)
        finder = Tuner(trainer).lr_find(module, make_loader(64), num_training=8, **options)
        run.see(finder.suggestion(skip_begin=1, skip_end=1), finder.results, module.lr)
        run.see_weights(module)
        run.see_files()


# ---------------------------------------------------------------------- the test of all

CELLS = {
    f"{name}-{strategy}-{ranks}": {"scenario": name, "strategy": strategy, "ranks": ranks}
    for name, strategy, ranks in itertools.product(SCENARIOS, ("fsdp2", "ddp"), (WORLD, 1))
}
MATRIX = Matrix(
    "beside Lightning's DDP",
    CELLS,
    fast=[f"{name}-{strategy}-{WORLD}" for name in FAST for strategy in ("fsdp2", "ddp")],
    always=[f"{name}-fsdp2-{WORLD}" for name in SCENARIOS],
)


@pytest.mark.guarantees("beside-lightning")
@pytest.mark.parametrize("cell", MATRIX.list_parameters({name: (cell,) for name, cell in CELLS.items()}))
def test_beside_lightnings_ddp(cell: dict[str, Any], tmp_path: Path) -> None:
    check(cell, tmp_path)
