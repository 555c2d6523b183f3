"""The rows of the Trainer's own arguments, in its order."""

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelSummary, RichModelSummary, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor
from torch.utils.data import DataLoader

from helpers.compatibility import OPTIONS, Option, fit, fit_both, trainer_option
from helpers.oracle import whole
from helpers.strategies import Kind
from helpers.user_modules import (
    WORLD,
    Batch,
    Regressor,
    assert_same_weights,
    make_batches,
    make_loader,
    make_trainer,
    train_alone,
)

ALL_EPOCHS: dict[str, Any] = {"max_steps": -1}


class Counts(Regressor):
    """Counts the batches of each stage, and logs the loss of training."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.validated_at: list[int] = []

    def count(self, stage: str) -> None:
        self.counts[stage] = self.counts.get(stage, 0) + 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.count("train")
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.count("sanity" if self.trainer.sanity_checking else "validate")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.count("test")
        super().test_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validated_at.append(self.global_step)


def get_mean_loss(batches: list[Batch]) -> Any:
    return pytest.approx(sum(Regressor().loss(batch).item() for batch in batches) / len(batches), rel=1e-5)


def read_csv(logger: CSVLogger) -> list[dict[str, str]]:
    """What rank 0 has written, on every rank."""
    import csv

    dist.barrier()
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------- where it runs

OPTIONS.append(Option("Trainer", "accelerator", '`"gpu"`; all below ran with `"cpu"`', None))


@trainer_option("strategy", 'an object; FSDP2 also by its name, `"fsdp2"`')
def check_strategy(kind: Kind, folder: Path) -> None:
    batches = make_batches(2 * WORLD)
    names = [kind.strategy.strategy_name] if kind.strategy.strategy_name == "fsdp2" else []
    for strategy in (kind.strategy(), *names):
        trainer, expected = make_trainer(strategy), Regressor()
        assert type(trainer.strategy) is kind.strategy
        trainer.fit(Regressor(), make_loader(batches))
        train_alone(expected, batches)
        assert_same_weights(trainer.lightning_module, expected)


@trainer_option("devices", "2 processes; a number other than that of the processes is refused")
def check_devices(kind: Kind, folder: Path) -> None:
    trainer = fit_both(kind).mesh
    assert trainer.num_devices == trainer.world_size == trainer.strategy.data_parallel_size == WORLD
    with pytest.raises(ValueError, match="devices=3"):
        kind.make_trainer(devices=3).fit(Regressor(), make_loader(make_batches(WORLD)))


@trainer_option("num_nodes", "2 nodes of one process")
def check_num_nodes(kind: Kind, folder: Path) -> None:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE="2")
    batches, expected = make_batches(2 * WORLD), Regressor()
    trainer = fit(kind, batches, devices=1, num_nodes=2)
    train_alone(expected, batches)
    assert_same_weights(trainer.lightning_module, expected)
    assert (trainer.world_size, trainer.num_nodes, trainer.node_rank) == (2, 2, dist.get_rank())


@trainer_option("precision", "`32-true`, `bf16-mixed`, `bf16-true`; others are refused")
def check_precision(kind: Kind, folder: Path) -> None:
    batches, expected = make_batches(2 * WORLD), Regressor()
    train_alone(expected, batches)
    for precision, dtype in {
        "32-true": torch.float32,
        "bf16-mixed": torch.bfloat16,
        "bf16-true": torch.bfloat16,
    }.items():
        module, seen = Regressor(), []
        module.blocks[0].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
        fit(kind, batches, module, precision=precision)
        assert set(seen) == {dtype}
        actual = {name: value.float() for name, value in whole(dict(module.named_parameters())).items()}
        tolerance = 1e-5 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(actual, dict(expected.named_parameters()), atol=tolerance, rtol=tolerance)
    for precision in ("16-true", "64-true"):
        with pytest.raises(ValueError, match=f"precision=.{precision}. is not supported"):
            kind.make_trainer(precision=precision)


@trainer_option("logger", "metrics of all ranks, written once")
def check_logger(kind: Kind, folder: Path) -> None:
    batches, logger = make_batches(2 * WORLD), CSVLogger(folder)
    fit(kind, batches, Counts(), logger=logger, log_every_n_steps=1)
    rows = read_csv(logger)
    assert [row["step"] for row in rows] == ["0", "1"]
    assert float(rows[0]["train_loss"]) == get_mean_loss(batches[:WORLD])


class RecordsHooks(Callback):
    """Keeps the names of its hooks in the order in which they are called."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("setup", "teardown") or name.startswith("on_"):
            self.hooks.append(name)
        return super().__getattribute__(name)


@trainer_option("callbacks", "the hooks of one process, in its order; see below for Lightning's own")
def check_callbacks(kind: Kind, folder: Path) -> None:
    mesh, alone = fit_both(kind, make_callbacks=lambda: [RecordsHooks()], validation=1, accumulate_grad_batches=2)
    (hooks,), (expected,) = ([c.hooks for c in t.callbacks if isinstance(c, RecordsHooks)] for t in (mesh, alone))
    assert "on_before_optimizer_step" in expected
    assert hooks == expected


# ---------------------------------------------------------------------- how long


@trainer_option("fast_dev_run", "2: two batches, no checkpoints, no logs")
def check_fast_dev_run(kind: Kind, folder: Path) -> None:
    options = {"fast_dev_run": 2, "enable_checkpointing": True, "logger": True, "default_root_dir": folder}
    mesh = fit_both(kind, make_module=Counts, validation=3, **options).mesh
    assert mesh.lightning_module.counts == {"train": 2, "validate": 2}
    dist.barrier()
    assert not list(folder.iterdir())


@trainer_option("max_epochs", "2")
def check_max_epochs(kind: Kind, folder: Path) -> None:
    assert fit_both(kind, 2, max_epochs=2, **ALL_EPOCHS).mesh.global_step == 4


class Stops(Callback):
    """Asks for the end on one rank and in the first step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = True


@trainer_option("min_epochs", "2, although a callback would stop at once")
def check_min_epochs(kind: Kind, folder: Path) -> None:
    options = {"min_epochs": 2, "max_epochs": 3, "make_callbacks": lambda: [Stops()], **ALL_EPOCHS}
    assert fit_both(kind, 2, **options).mesh.current_epoch == 2


@trainer_option("max_steps", "3, in the second epoch")
def check_max_steps(kind: Kind, folder: Path) -> None:
    assert fit_both(kind, 2, max_steps=3).mesh.global_step == 3


@trainer_option("min_steps", "3, although a callback would stop at once")
def check_min_steps(kind: Kind, folder: Path) -> None:
    options = {"min_steps": 3, "min_epochs": 0, "make_callbacks": lambda: [Stops()], "max_epochs": 4, **ALL_EPOCHS}
    assert fit_both(kind, 4, **options).mesh.global_step == 3


def check_stops_by_the_clock_of_rank_0(kind: Kind, **options: Any) -> None:
    """The clock shows the seconds of its rank: as many as steps on the first, none on the other."""
    clocks: list[pl.Trainer] = []

    class KnowsTrainer(Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            clocks.append(trainer)

    def time_elapsed(timer: Timer, stage: str = "train") -> float:
        return float(clocks[-1].global_step) if clocks and dist.get_rank() == 0 else 0.0

    callbacks = [KnowsTrainer(), *options.pop("callbacks", [])]
    with patch.object(Timer, "time_elapsed", time_elapsed):
        trainer = fit(kind, make_batches(4 * WORLD), callbacks=callbacks, max_epochs=1, **ALL_EPOCHS, **options)
    assert trainer.global_step == 2


@trainer_option("max_time", "stops all ranks in the same step, by the first rank's clock")
def check_max_time(kind: Kind, folder: Path) -> None:
    check_stops_by_the_clock_of_rank_0(kind, max_time={"seconds": 2})


@trainer_option("limit_train_batches", "a number and a fraction")
def check_limit_train_batches(kind: Kind, folder: Path) -> None:
    for limit in (2, 0.5):
        mesh = fit_both(kind, 4, limit_train_batches=limit, max_epochs=2, **ALL_EPOCHS).mesh
        assert mesh.global_step == 4


def check_limit(kind: Kind, argument: str, stage: str) -> None:
    batches = make_batches(4 * WORLD)
    for limit in (2, 0.5):
        trainer, module = kind.make_trainer(**{argument: limit}), Counts()
        (metrics,) = getattr(trainer, stage)(module, make_loader(batches), verbose=False)
        assert module.counts[stage] == 2
        assert metrics["loss"] == get_mean_loss(batches[: 2 * WORLD])


@trainer_option("limit_val_batches", "a number and a fraction")
def check_limit_val_batches(kind: Kind, folder: Path) -> None:
    check_limit(kind, "limit_val_batches", "validate")


@trainer_option("limit_test_batches", "a number and a fraction")
def check_limit_test_batches(kind: Kind, folder: Path) -> None:
    check_limit(kind, "limit_test_batches", "test")


@trainer_option("limit_predict_batches", "a number and a fraction")
def check_limit_predict_batches(kind: Kind, folder: Path) -> None:
    batches = make_batches(4 * WORLD)
    expected = [Regressor().predict_step(batch, 0) for batch in batches[dist.get_rank() : 2 * WORLD : WORLD]]
    for limit in (2, 0.5):
        trainer = kind.make_trainer(limit_predict_batches=limit)
        torch.testing.assert_close(trainer.predict(Regressor(), make_loader(batches)), expected)


@trainer_option("overfit_batches", "the first batch in every epoch, unshuffled, each rank its own")
def check_overfit_batches(kind: Kind, folder: Path) -> None:
    batches, expected, module = make_batches(4 * WORLD), Regressor(), Regressor()
    samples = {key: torch.stack([batch[key] for batch in batches]) for key in batches[0]}
    data = [{key: samples[key][i] for key in samples} for i in range(len(batches))]
    loader = DataLoader(data, batch_size=1, shuffle=True, collate_fn=lambda rows: rows[0])
    options = {"overfit_batches": 1, "use_distributed_sampler": True, "max_epochs": 3, **ALL_EPOCHS}
    kind.make_trainer(**options).fit(module, loader)
    train_alone(expected, batches[:WORLD] * 3, steps=3)
    assert_same_weights(module, expected)


# ---------------------------------------------------------------------- validation and logs


@trainer_option("val_check_interval", "a number and a fraction of batches; a time, by any rank's clock")
def check_val_check_interval(kind: Kind, folder: Path) -> None:
    every = {"num_sanity_val_steps": 0, "max_epochs": 2, "validation": 1, "make_module": Counts, **ALL_EPOCHS}
    assert fit_both(kind, 4, val_check_interval=2, **every).mesh.lightning_module.validated_at == [2, 4, 6, 8]
    assert fit_both(kind, 4, val_check_interval=0.25, **every).mesh.lightning_module.validated_at == list(range(1, 9))
    across = fit_both(kind, 4, val_check_interval=3, check_val_every_n_epoch=None, **every).mesh
    assert across.lightning_module.validated_at == [3, 6]
    check_validates_by_any_clock(kind)


def check_validates_by_any_clock(kind: Kind) -> None:
    """The last rank's clock shows a second more in each step, the others' stand still."""
    module = Counts()
    seconds = patch("lightning.pytorch.loops.training_epoch_loop.time.monotonic", lambda: now())
    start = time.monotonic()

    def now() -> float:
        return start + (module.counts.get("train", 0) if dist.get_rank() == WORLD - 1 else 0)

    options = {"num_sanity_val_steps": 0, "validation": make_batches(WORLD), "max_steps": 6}
    with seconds:
        fit(kind, make_batches(6 * WORLD), module, val_check_interval={"seconds": 2}, **options)
    assert module.validated_at == [2, 4, 6]


@trainer_option("check_val_every_n_epoch", "2")
def check_check_val_every_n_epoch(kind: Kind, folder: Path) -> None:
    options = {"num_sanity_val_steps": 0, "max_epochs": 4, "validation": 1, "make_module": Counts, **ALL_EPOCHS}
    mesh = fit_both(kind, 1, check_val_every_n_epoch=2, **options).mesh
    assert mesh.lightning_module.validated_at == [2, 4]


@trainer_option("num_sanity_val_steps", "1 and all")
def check_num_sanity_val_steps(kind: Kind, folder: Path) -> None:
    for steps, count in ((1, 1), (-1, 3)):
        mesh = fit_both(kind, make_module=Counts, validation=3, num_sanity_val_steps=steps).mesh
        assert mesh.lightning_module.counts["sanity"] == count


@trainer_option("log_every_n_steps", "2")
def check_log_every_n_steps(kind: Kind, folder: Path) -> None:
    logger = CSVLogger(folder)
    fit(kind, make_batches(4 * WORLD), Counts(), logger=logger, log_every_n_steps=2, max_steps=4)
    assert [row["step"] for row in read_csv(logger)] == ["1", "3"]


@trainer_option("enable_checkpointing", "True writes a checkpoint that can be loaded, False none")
def check_enable_checkpointing(kind: Kind, folder: Path) -> None:
    for enabled in (True, False):
        root = folder / str(enabled)
        options = {"enable_checkpointing": enabled, "default_root_dir": root}
        trainer = fit(kind, make_batches(2 * WORLD), max_epochs=1, **ALL_EPOCHS, **options)
        dist.barrier()
        assert len(list(root.rglob("*.ckpt"))) == int(enabled)
    trainer = fit(kind, make_batches(2 * WORLD), enable_checkpointing=True, default_root_dir=folder)
    module = Regressor()
    path = trainer.checkpoint_callback.best_model_path
    kind.make_trainer().validate(module, make_loader(make_batches(WORLD)), ckpt_path=path, verbose=False)
    assert_same_weights(module, _cpu(trainer.lightning_module))


def _cpu(module: pl.LightningModule) -> Regressor:
    copy = Regressor()
    copy.load_state_dict(whole(dict(module.named_parameters())))
    return copy


@trainer_option("enable_progress_bar", "on the first rank")
def check_enable_progress_bar(kind: Kind, folder: Path) -> None:
    bar = fit(kind, make_batches(2 * WORLD), enable_progress_bar=True).progress_bar_callback
    assert bar.is_enabled == (dist.get_rank() == 0)
    assert kind.make_trainer(enable_progress_bar=False).progress_bar_callback is None


@trainer_option("enable_model_summary", "on the first rank; see `ModelSummary`")
def check_enable_model_summary(kind: Kind, folder: Path) -> None:
    with patch.object(ModelSummary, "summarize") as plain, patch.object(RichModelSummary, "summarize") as rich:
        fit(kind, make_batches(2 * WORLD), enable_model_summary=True)
    totals = [call.args[1] for call in (*plain.call_args_list, *rich.call_args_list)]
    assert totals == (
        [sum(parameter.numel() for parameter in Regressor().parameters())] if dist.get_rank() == 0 else []
    )


# ---------------------------------------------------------------------- steps


@trainer_option("accumulate_grad_batches", "3, with a last step of two", slow=True)
def check_accumulate_grad_batches(kind: Kind, folder: Path) -> None:
    assert fit_both(kind, 5, accumulate_grad_batches=3, max_epochs=1, **ALL_EPOCHS).mesh.global_step == 2


@trainer_option("gradient_clip_val", "by the norm of the whole gradient", slow=True)
def check_gradient_clip_val(kind: Kind, folder: Path) -> None:
    clipped = fit_both(kind, gradient_clip_val=0.05).mesh
    other = fit_both(kind).alone
    assert not torch.allclose(_cpu(clipped.lightning_module).head.weight, other.lightning_module.head.weight)


@trainer_option("gradient_clip_algorithm", "`norm` and `value`", slow=True)
def check_gradient_clip_algorithm(kind: Kind, folder: Path) -> None:
    for algorithm in ("norm", "value"):
        fit_both(kind, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)


class LooksAtSettings(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, bool] = {}

    def look(self) -> None:
        self.settings = {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "grad": torch.is_grad_enabled(),
        }

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.look()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.look()
        super().validation_step(batch, batch_idx)


@trainer_option("deterministic", 'True and `"warn"`')
def check_deterministic(kind: Kind, folder: Path) -> None:
    for value in (True, "warn"):
        mesh = fit_both(kind, make_module=LooksAtSettings, deterministic=value).mesh
        assert mesh.lightning_module.settings["deterministic"]


@trainer_option("benchmark", "True: turns on cuDNN's benchmark mode")
def check_benchmark(kind: Kind, folder: Path) -> None:
    assert fit_both(kind, make_module=LooksAtSettings, benchmark=True).mesh.lightning_module.settings["benchmark"]


@trainer_option(
    "inference_mode", "evaluates under `no_grad` with either value, so that the module can be trained afterwards"
)
def check_inference_mode(kind: Kind, folder: Path) -> None:
    batches = make_batches(2 * WORLD)
    for value in (True, False):
        module, expected = LooksAtSettings(), Regressor()
        kind.make_trainer(inference_mode=value).validate(module, make_loader(batches), verbose=False)
        assert not module.settings["grad"]
        fit(kind, batches, module)
        train_alone(expected, batches)
        assert_same_weights(module, expected)


class KeepsSamples(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[int, list[float]] = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.samples.setdefault(self.current_epoch, []).extend(batch["inputs"][:, 0].tolist())
        return super().training_step(batch, batch_idx)


@trainer_option("use_distributed_sampler", "each sample on one rank, another order in each epoch")
def check_use_distributed_sampler(kind: Kind, folder: Path) -> None:
    data = [{key: value[0] for key, value in batch.items()} for batch in make_batches(4 * WORLD)]
    module = KeepsSamples()
    loader = DataLoader(data, batch_size=2, shuffle=True)
    kind.make_trainer(use_distributed_sampler=True, max_epochs=2, **ALL_EPOCHS).fit(module, loader)
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, module.samples)
    orders = [[sample for samples in everyone for sample in samples[epoch]] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(order) == sorted(row["inputs"][0].item() for row in data)


@trainer_option("profiler", "a report of each rank")
def check_profiler(kind: Kind, folder: Path) -> None:
    profiler = SimpleProfiler(folder, "profile")
    fit(kind, make_batches(2 * WORLD), profiler=profiler)
    assert len(profiler.recorded_durations[f"[Strategy]{kind.strategy.__name__}.training_step"]) == 2
    assert len(profiler.recorded_durations[f"[Strategy]{kind.strategy.__name__}.backward"]) == 2
    assert (folder / f"fit-profile-{dist.get_rank()}.txt").stat().st_size > 0


class HasNanInBackward(Regressor):
    def loss(self, batch: Batch) -> Tensor:
        return (self(batch["inputs"]) * 0).sqrt().mean()


@trainer_option("detect_anomaly", "a NaN in backward is an error that names the function")
def check_detect_anomaly(kind: Kind, folder: Path) -> None:
    with pytest.raises(RuntimeError, match="'MulBackward0' returned nan"):
        fit(kind, make_batches(WORLD), HasNanInBackward(), detect_anomaly=True)
    fit_both(kind, detect_anomaly=True)


@trainer_option("barebones", "True")
def check_barebones(kind: Kind, folder: Path) -> None:
    fit_both(kind, validation=1, barebones=True)


@trainer_option(
    "plugins", "environments, and what is derived from `MeshCheckpointIO`; other precisions and checkpoints are refused"
)
def check_plugins(kind: Kind, folder: Path) -> None:
    from lightning_fsdp2.strategies.checkpoint_io import MeshCheckpointIO

    class Own(MeshCheckpointIO):
        saved = 0

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            self.saved += 1
            super().save_checkpoint(*args, **kwargs)

    io, batches, expected = Own(), make_batches(2 * WORLD), Regressor()
    trainer = fit(kind, batches, plugins=[TorchElasticEnvironment(), io])
    trainer.save_checkpoint(folder / "x.ckpt")
    train_alone(expected, batches)
    assert_same_weights(trainer.lightning_module, expected)
    assert io.saved == 1
    for plugin in (TorchCheckpointIO(), type("Ours", (HalfPrecision,), {})()):
        with pytest.raises(ValueError, match=rf"plugins=\[{type(plugin).__name__}\(\)\]"):
            kind.make_trainer(plugins=[plugin])


@trainer_option("sync_batchnorm", "on a CPU; not tried on GPUs", refused="torch has none for CPUs")
def check_sync_batchnorm(kind: Kind, folder: Path) -> None:
    fit(kind, make_batches(WORLD), sync_batchnorm=True)


class MakesLoaders(Regressor):
    """Trains on other batches in each epoch."""

    def __init__(self, epochs: list[list[Batch]]) -> None:
        super().__init__()
        self.epochs = iter(epochs)

    def train_dataloader(self) -> Any:
        return make_loader(next(self.epochs))


@trainer_option("reload_dataloaders_every_n_epochs", "1")
def check_reload_dataloaders_every_n_epochs(kind: Kind, folder: Path) -> None:
    batches, expected = make_batches(6 * WORLD), Regressor()
    module = MakesLoaders([batches[start : start + 2 * WORLD] for start in range(0, 6 * WORLD, 2 * WORLD)])
    kind.make_trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3, **ALL_EPOCHS).fit(module)
    train_alone(expected, batches, steps=6)
    assert_same_weights(module, expected)


@trainer_option("default_root_dir", "where checkpoints and logs go")
def check_default_root_dir(kind: Kind, folder: Path) -> None:
    options = {"logger": True, "enable_checkpointing": True, "default_root_dir": folder}
    trainer = fit(kind, make_batches(2 * WORLD), Counts(), **options)
    assert Path(trainer.checkpoint_callback.best_model_path).is_relative_to(folder)
    assert Path(trainer.logger.log_dir).is_relative_to(folder)
    assert Path(trainer.checkpoint_callback.best_model_path).exists()


class HasParameters(Regressor):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()


@trainer_option("enable_autolog_hparams", "True and False")
def check_enable_autolog_hparams(kind: Kind, folder: Path) -> None:
    for enabled in (True, False):
        logger = CSVLogger(folder, str(enabled))
        module = HasParameters(width=3)
        fit(kind, make_batches(2 * WORLD), module, logger=logger, enable_autolog_hparams=enabled)
        logger.save()
        dist.barrier()
        file = Path(logger.log_dir) / "hparams.yaml"
        assert ("width: 3" in file.read_text() if file.exists() else False) == enabled


OPTIONS.append(Option("Trainer", "model_registry", "uploads to lightning.ai", None))
