"""The rows of Lightning's stock callbacks and of the Tuner, in alphabetical order."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.compatibility import callback_option, fit, fit_alone, fit_both, tuner_option
from helpers.strategies import Kind
from helpers.trainer_options import (
    ALL_EPOCHS,
    Counts,
    check_stops_by_the_clock_of_rank_0,
    read_csv,
)
from helpers.user_modules import (
    WIDTH,
    WORLD,
    Batch,
    Regressor,
    assert_same_weights,
    make_batches,
    make_loader,
    train_alone,
)
from lightning_fsdp2.strategies.parts import callbacks

WHOLE_WEIGHTS = {"fsdp2": "needs whole weights", "megatron_fsdp": "needs whole weights"}

FREEZING = {"megatron_fsdp": "the set of trained parameters is fixed when the model is sharded"}

ONE_PROCESS = "Lightning has it for one process only"


class HasBackbone(Regressor):
    """Trains what is not frozen when training begins."""

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@callback_option("BackboneFinetuning", "frozen for an epoch, then with a separate learning rate", refused=FREEZING)
def check_backbone_finetuning(kind: Kind, folder: Path) -> None:
    callback = lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)]  # noqa: E731
    fit_both(kind, 2, make_module=HasBackbone, make_callbacks=callback, max_epochs=3, **ALL_EPOCHS)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[2], optimizer, lr=0.01)


@callback_option("BaseFinetuning", "a subclass that unfreezes a layer later", refused=FREEZING, named="Unfreezes")
def check_base_finetuning(kind: Kind, folder: Path) -> None:
    options = {"make_module": HasBackbone, "make_callbacks": lambda: [Unfreezes()], "max_epochs": 2, **ALL_EPOCHS}
    fit_both(kind, 2, **options)


class Writes(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: dict[int, Tensor] = {}
        self.epoch: dict[int, Tensor] = {}

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.batches.update(zip(indices, prediction, strict=True))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        for prediction, indices in zip(predictions, batch_indices[0], strict=True):
            self.epoch.update(zip(indices, prediction, strict=True))


@callback_option("BasePredictionWriter", "each sample once, also if the ranks do not divide the data")
def check_base_prediction_writer(kind: Kind, folder: Path) -> None:
    data = [{key: value[0] for key, value in batch.items()} for batch in make_batches(5)]
    writer = Writes()
    trainer = kind.make_trainer(callbacks=[writer], use_distributed_sampler=True)
    trainer.predict(Regressor(), DataLoader(data, batch_size=2), return_predictions=False)
    with torch.no_grad():
        expected = {i: Regressor()(row["inputs"]) for i, row in enumerate(data)}
    for written in (writer.batches, writer.epoch):
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, written)
        assert sorted(i for part in everyone for i in part) == list(range(5))
        torch.testing.assert_close({**everyone[0], **everyone[1]}, expected)


class ChoosesBatchSize(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        data = [{key: value[0] for key, value in batch.items()} for batch in make_batches(16)]
        return DataLoader(data, batch_size=self.batch_size)


@callback_option("BatchSizeFinder", "on fit", refused=ONE_PROCESS, named="Batch size finder")
def check_batch_size_finder(kind: Kind, folder: Path) -> None:
    kind.make_trainer(callbacks=[BatchSizeFinder(max_trials=2)]).fit(ChoosesBatchSize())


@callback_option("Callback", "the hooks of one process: see `callbacks` above")
def check_callback(kind: Kind, folder: Path) -> None:
    fit_both(kind, make_callbacks=lambda: [Callback()])


class SavesAtTheEnd(Checkpoint):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/end.ckpt")


def check_checkpoint_has(kind: Kind, path: Any, expected: nn.Module) -> None:
    module = Regressor()
    kind.make_trainer().validate(module, make_loader(make_batches(WORLD)), ckpt_path=path, verbose=False)
    assert_same_weights(module, expected)


@callback_option("Checkpoint", "a subclass that saves when training ends")
def check_checkpoint(kind: Kind, folder: Path) -> None:
    batches, expected = make_batches(2 * WORLD), Regressor()
    options = {"callbacks": [SavesAtTheEnd()], "enable_checkpointing": True, "default_root_dir": folder}
    fit(kind, batches, **options)
    train_alone(expected, batches)
    check_checkpoint_has(kind, folder / "end.ckpt", expected)


@callback_option("DeviceStatsMonitor", "of the first rank's device")
def check_device_stats_monitor(kind: Kind, folder: Path) -> None:
    logger = CSVLogger(folder)
    fit(kind, make_batches(2 * WORLD), logger=logger, log_every_n_steps=1, callbacks=[DeviceStatsMonitor()])
    names = {name for row in read_csv(logger) for name in row}
    assert {"DeviceStatsMonitor.on_train_batch_end/cpu_percent", "step"} <= names


class LogsOwnLoss(Regressor):
    """Each rank has another loss, which gets worse on the last one only, from the third epoch on."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        rank, epoch = self.global_rank, self.current_epoch
        self.log("own", float(epoch if rank == WORLD - 1 and epoch >= 2 else -epoch))


@callback_option("EarlyStopping", "stops all ranks in the same epoch, also if only one rank has the reason")
def check_early_stopping(kind: Kind, folder: Path) -> None:
    stopping = EarlyStopping("own", patience=1)
    options = {"validation": make_batches(WORLD), "callbacks": [stopping], "max_epochs": 9, **ALL_EPOCHS}
    trainer = fit(kind, make_batches(WORLD), LogsOwnLoss(), **options)
    assert (trainer.current_epoch, stopping.stopped_epoch) == (3, 2)
    callbacks = lambda: [EarlyStopping("train_loss", patience=1, check_on_train_epoch_end=True)]  # noqa: E731
    fit_both(kind, 2, make_module=Counts, make_callbacks=callbacks, max_epochs=20, **ALL_EPOCHS)


def make_ema() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.5)]


def check_averages(kind: Kind, make_callbacks: Any) -> None:
    """The averages are those of one process, and others than the last weights."""
    averaged = fit_both(kind, 3, make_callbacks=make_callbacks, max_epochs=3, validation=1, **ALL_EPOCHS)
    plain = fit_alone(make_batches(3 * WORLD), max_epochs=3, **ALL_EPOCHS)
    torch.testing.assert_close(averaged.mesh.callback_metrics["loss"], averaged.alone.callback_metrics["loss"])
    weight = averaged.alone.lightning_module.head.weight
    assert not torch.allclose(weight, plain.lightning_module.head.weight)


@callback_option("EMAWeightAveraging", "the averages of one process, in validation too", refused=WHOLE_WEIGHTS)
def check_ema_weight_averaging(kind: Kind, folder: Path) -> None:
    check_averages(kind, make_ema)


@callback_option("GradientAccumulationScheduler", "2 from the second epoch on")
def check_gradient_accumulation_scheduler(kind: Kind, folder: Path) -> None:
    callbacks = lambda: [GradientAccumulationScheduler({1: 2})]  # noqa: E731
    assert fit_both(kind, 4, make_callbacks=callbacks, max_epochs=2, **ALL_EPOCHS).mesh.global_step == 6


@callback_option("LambdaCallback", "a function in a hook")
def check_lambda_callback(kind: Kind, folder: Path) -> None:
    steps: list[int] = []
    callback = LambdaCallback(on_train_batch_end=lambda trainer, *args: steps.append(trainer.global_step))
    fit(kind, make_batches(2 * WORLD), callbacks=[callback])
    assert steps == [1, 2]


class HasLearningRate(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


FINDER = {"num_training": 18, "min_lr": 1e-4, "early_stop_threshold": None}


def check_found(trainer: pl.Trainer, found: Any, module: HasLearningRate, batches: list[Batch]) -> None:
    """All ranks train on with the first one's suggestion, from the initial weights and optimizer states."""
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, (module.lr, found.suggestion()))
    assert set(everyone) == {(module.lr, module.lr)}
    assert module.lr != 1e-3
    expected = Regressor()
    train_alone(expected, batches, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=module.lr))
    assert_same_weights(module, expected)


@callback_option(
    "LearningRateFinder", "the first rank's suggestion on all, then training from the initial weights", slow=True
)
def check_learning_rate_finder(kind: Kind, folder: Path) -> None:
    batches, module = make_batches(20 * WORLD), HasLearningRate()
    options = {key.replace("num_training", "num_training_steps"): value for key, value in FINDER.items()}
    finder = LearningRateFinder(**options)
    trainer = fit(kind, batches, module, callbacks=[finder], default_root_dir=folder)
    check_found(trainer, finder.optimal_lr, module, batches)
    dist.barrier()
    assert not list(folder.iterdir()), "the checkpoint of the initial weights is left"


class Schedules(Regressor):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@callback_option("LearningRateMonitor", "a schedule's learning rates")
def check_learning_rate_monitor(kind: Kind, folder: Path) -> None:
    logger, monitor = CSVLogger(folder), LearningRateMonitor(log_momentum=True)
    options = {"logger": logger, "callbacks": [monitor], "log_every_n_steps": 1, "max_steps": 3}
    fit(kind, make_batches(3 * WORLD), Schedules(), **options)
    rows = read_csv(logger)
    assert [float(row["lr-SGD"]) for row in rows] == pytest.approx([0.1, 0.05, 0.025])
    assert [float(row["lr-SGD-momentum"]) for row in rows] == [0.9] * 3


class ScoresEpochs(Regressor):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("score", abs(self.current_epoch - 1.0) + self.global_rank, sync_dist=True)


@callback_option("ModelCheckpoint", "the best by a metric of all ranks, and a link to the last")
def check_model_checkpoint(kind: Kind, folder: Path) -> None:
    batches, expected = make_batches(WORLD), Regressor()
    best = ModelCheckpoint(folder, "{epoch}", monitor="score", save_top_k=1, save_last="link")
    options = {"callbacks": [best], "enable_checkpointing": True, "max_epochs": 4, **ALL_EPOCHS}
    trainer = fit(kind, batches, ScoresEpochs(), batches, **options)
    assert best.best_model_path == str(folder / "epoch=1.ckpt")
    assert best.best_model_score == 0.5
    train_alone(expected, batches * 2, steps=2)
    check_checkpoint_has(kind, best.best_model_path, expected)
    train_alone(last := Regressor(), batches * 4, steps=4)
    assert_same_weights(trainer.lightning_module, last)


@callback_option("ModelPruning", "by magnitude, after each epoch", refused=WHOLE_WEIGHTS)
def check_model_pruning(kind: Kind, folder: Path) -> None:
    def make_callbacks() -> list[Callback]:
        return [ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.5, use_global_unstructured=True)]

    mesh = fit_both(kind, 2, make_callbacks=make_callbacks, max_epochs=2, **ALL_EPOCHS).mesh
    weights = torch.cat([block.weight.flatten() for block in mesh.lightning_module.blocks])
    assert (weights == 0).sum() > weights.numel() // 3


def check_summary(kind: Kind, summary: type[ModelSummary]) -> None:
    """Whole parameters, whatever a rank holds; FLOPs and sizes of an example."""
    records: list[Any] = []

    class Records(summary):
        @staticmethod
        def summarize(*args: Any, **kwargs: Any) -> None:
            records.append((args, kwargs))

    class HasExample(Regressor):
        example_input_array = torch.zeros(2, WIDTH)

    for module_class in (Regressor, HasExample):
        fit_both(kind, make_module=module_class, make_callbacks=lambda: [Records(max_depth=2)])
        (data, *others), kwargs = records.pop()  # of one process
        if dist.get_rank() > 0:
            assert not records
            continue
        (mesh_data, *mesh_others), mesh_kwargs = records.pop()
        assert (mesh_others, mesh_kwargs) == (others, kwargs)
        assert {k: v for k, v in mesh_data if k != "Type"} == {k: v for k, v in data if k != "Type"}


@callback_option(
    "ModelSummary",
    "sizes of whole parameters, whatever a rank holds, and of an example; under `pp_size`, of rank 0's stages",
)
def check_model_summary(kind: Kind, folder: Path) -> None:
    check_summary(kind, ModelSummary)


class Fails(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            raise KeyError("on all ranks")


@callback_option("OnExceptionCheckpoint", "an error on all ranks")
def check_on_exception_checkpoint(kind: Kind, folder: Path) -> None:
    batches, expected = make_batches(3 * WORLD), Regressor()
    with pytest.raises(KeyError, match="on all ranks"):
        fit(kind, batches, callbacks=[OnExceptionCheckpoint(folder), Fails()], max_steps=3, enable_checkpointing=True)
    train_alone(expected, batches)
    check_checkpoint_has(kind, folder / "on_exception.ckpt", expected)


class OwnBar(ProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, Any]] = []

    def disable(self) -> None: ...

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.seen.append((trainer.global_step, self.total_train_batches))


@callback_option("ProgressBar", "a custom progress bar")
def check_progress_bar(kind: Kind, folder: Path) -> None:
    bar = OwnBar()
    fit(kind, make_batches(2 * WORLD), callbacks=[bar], enable_progress_bar=True, max_epochs=1, **ALL_EPOCHS)
    assert bar.seen == [(1, 2), (2, 2)]


@callback_option("RichModelSummary", "as `ModelSummary`", slow=True)
def check_rich_model_summary(kind: Kind, folder: Path) -> None:
    check_summary(kind, RichModelSummary)


@callback_option("RichProgressBar", "on the first rank")
def check_rich_progress_bar(kind: Kind, folder: Path) -> None:
    bar = RichProgressBar()
    fit(kind, make_batches(2 * WORLD), callbacks=[bar], enable_progress_bar=True)
    assert bar.train_progress_bar.completed == 2 if dist.get_rank() == 0 else bar.is_disabled


class Spikes(Regressor):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        is_spike = batch_idx == 2 and self.global_rank == WORLD - 1
        return super().training_step(batch, batch_idx) * (1000 if is_spike else 1)


@callback_option("SpikeDetection", "a spike on one rank ends the run on all ranks")
def check_spike_detection(kind: Kind, folder: Path) -> None:
    detection = SpikeDetection(rtol=50.0, exclude_batches_path=folder / "skip.json")
    with pytest.raises(TrainingSpikeException, match="batch 2"):
        fit(kind, make_batches(4 * WORLD), Spikes(), callbacks=[detection], max_steps=4)
    dist.barrier()
    assert json.loads((folder / "skip.json").read_text()) == [1, 2]


@callback_option("StochasticWeightAveraging", "the averages of one process", refused=WHOLE_WEIGHTS)
def check_stochastic_weight_averaging(kind: Kind, folder: Path) -> None:
    def make_callbacks() -> list[Callback]:
        return [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)]

    fit_both(kind, 2, make_callbacks=make_callbacks, max_epochs=3, **ALL_EPOCHS)


PEAKS = {torch.float32: 1e9, torch.bfloat16: 8e9}


class HasFlops(Regressor):
    flops_per_batch = 1000


@callback_option("ThroughputMonitor", "samples of all ranks; utilisation relative to the peak in the compute dtype")
def check_throughput_monitor(kind: Kind, folder: Path) -> None:
    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        logger = CSVLogger(folder, precision)
        monitor = ThroughputMonitor(lambda batch: len(batch["inputs"]), window_size=2)
        options = {"logger": logger, "callbacks": [monitor], "log_every_n_steps": 1, "max_steps": 3}
        with ExitStack() as stack:
            for module in ("lightning.pytorch.callbacks.throughput_monitor", callbacks.__name__):
                stack.enter_context(patch(f"{module}.get_available_flops", lambda device, dtype: PEAKS[dtype]))
            fit(kind, make_batches(3 * WORLD), HasFlops(), precision=precision, **options)
        row = read_csv(logger)[-1]
        assert (float(row["train/batches"]), float(row["train/samples"])) == (3, 6)
        rate = float(row["train/device/samples_per_sec"])
        assert float(row["train/samples_per_sec"]) == pytest.approx(rate * WORLD)
        flops = float(row["train/device/flops_per_sec"])
        assert float(row["train/device/mfu"]) == pytest.approx(flops / PEAKS[dtype])


@callback_option("Timer", "stops all ranks in the same step, by the first rank's clock")
def check_timer(kind: Kind, folder: Path) -> None:
    check_stops_by_the_clock_of_rank_0(kind, callbacks=[Timer({"seconds": 2})])


@callback_option("TQDMProgressBar", "on the first rank")
def check_tqdm_progress_bar(kind: Kind, folder: Path) -> None:
    bar = TQDMProgressBar()
    fit(kind, make_batches(2 * WORLD), callbacks=[bar], enable_progress_bar=True)
    assert bar.train_progress_bar.n == 2 if dist.get_rank() == 0 else bar.is_disabled


@callback_option("WeightAveraging", "the averages of one process, in validation too", refused=WHOLE_WEIGHTS)
def check_weight_averaging(kind: Kind, folder: Path) -> None:
    check_averages(kind, lambda: [WeightAveraging()])


@tuner_option("lr_find", "the first rank's suggestion on all, and the initial weights again")
def check_lr_find(kind: Kind, folder: Path) -> None:
    batches, module = make_batches(20 * WORLD), HasLearningRate()
    trainer = kind.make_trainer(default_root_dir=folder)
    found = Tuner(trainer).lr_find(module, make_loader(batches), **FINDER)
    assert_same_weights(module, Regressor())
    trainer.fit(module, make_loader(batches))
    check_found(trainer, found, module, batches)


@tuner_option("scale_batch_size", "on fit", refused=ONE_PROCESS, named="Tuning the batch size")
def check_scale_batch_size(kind: Kind, folder: Path) -> None:
    Tuner(kind.make_trainer()).scale_batch_size(ChoosesBatchSize(), max_trials=2)
