"""Validation and tests of data that the ranks do not divide evenly: no sample counts twice, and none is left out."""

import math
import os
import threading
from collections import Counter, deque
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from helpers import user_modules
from helpers.models import LLAMA
from helpers.ranks import run_ranks
from helpers.user_modules import UserModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SubsetRandomSampler
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric

from lightning_fsdp2 import DDPStrategy, FSDP2Strategy

make_trainer = partial(user_modules.make_trainer, max_steps=2, use_distributed_sampler=True)


class Samples(Dataset[Tensor]):
    """Sample i is the number i + 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 1.0])


class Evaluates(UserModule):
    """Its forwards are collectives; logs in all ways that Lightning has, in the step and in its hooks."""

    seed = 1

    def build(self) -> None:
        self.layer = nn.Linear(1, 1)
        self.metrics = MetricCollection({"total": SumMetric(), "average": MeanMetric(), "largest": MaxMetric()})
        self.values = CatMetric()
        self.batches = 0

    def evaluate(self, batch: Tensor) -> None:
        values = batch.flatten() + 0 * self.layer(batch).flatten()
        batch.zero_()  # a step may change its batch
        options: dict[str, Any] = {"sync_dist": True, "batch_size": len(values)}
        self.log("mean", values.mean(), on_step=True, on_epoch=True, **options)
        for name in ("sum", "min", "max"):
            self.log(name, getattr(values, name)(), reduce_fx=name, **options)
        self.metrics.update(values)
        self.values(values)
        self.log("metric_sum", self.metrics["total"])
        self.log("squares", values.square().mean(), **options)
        self.log("own", values.mean(), batch_size=len(values))

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        # a collective of all ranks after each batch
        self.log("count", 1.0 * len(batch), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("cat", self.values.compute().square().sum())
        self.values.reset()
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


def expect(samples: list[float]) -> dict[str, float]:
    count, total = len(samples), sum(samples)
    squares = sum(x * x for x in samples)
    return {
        "mean_epoch": total / count,
        "sum": total,
        "min": min(samples),
        "max": max(samples),
        "metric_sum": total,
        "squares": squares / count,
        "total": total,
        "average": total / count,
        "largest": max(samples),
        "cat": squares,
        "count_epoch": count,
    }


def check(metrics: dict[str, float], samples: list[float], left_out: tuple[str, ...] = ()) -> None:
    for name, value in expect(samples).items():
        if name not in left_out:
            assert metrics[name] == pytest.approx(value, abs=1e-5), name
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.guarantees("uneven-evaluation")
@pytest.mark.parametrize(
    ("strategy", "ranks", "count", "batch_size"),
    [
        (FSDP2Strategy, 2, 7, 1),
        (FSDP2Strategy, 2, 7, 2),
        (DDPStrategy, 2, 9, 2),
        pytest.param(FSDP2Strategy, 3, 7, 2, marks=pytest.mark.slow),
        pytest.param(FSDP2Strategy, 3, 2, 1, marks=pytest.mark.slow),
        pytest.param(DDPStrategy, 3, 1, 4, marks=pytest.mark.slow),
        pytest.param(FSDP2Strategy, 4, 13, 3, marks=pytest.mark.slow),
    ],
)
def test_metrics_are_those_of_one_process_over_all_samples(
    strategy: Any, ranks: int, count: int, batch_size: int
) -> None:
    def run() -> list[dict[str, float]]:
        loader = DataLoader(Samples(count), batch_size=batch_size)
        trainer, module = make_trainer(strategy()), Evaluates()
        return [trainer.validate(module, loader, verbose=False)[0], trainer.validate(module, loader, verbose=False)[0]]

    for results in run_ranks(run, ranks):
        for metrics in results:
            check(metrics, [sample + 1.0 for sample in range(count)])


def test_a_fit_validates_and_tests_without_repeating_samples() -> None:
    class Trains(Evaluates):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).square().mean()

    def run() -> list[dict[str, float]]:
        trainer, module = make_trainer(val_check_interval=1), Trains()
        trainer.fit(module, DataLoader(Samples(4)), DataLoader(Samples(5)))
        fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
        module.metrics.reset()
        return [fitted, trainer.test(module, DataLoader(Samples(3)), verbose=False)[0]]

    for fitted, tested in run_ranks(run, 2):
        check(fitted, [1.0, 2, 3, 4, 5])
        check(tested, [1.0, 2, 3], left_out=("cat", "count_epoch", "total", "average", "largest"))


class Pairs(BatchSampler):
    """A user's own batch sampler."""


def make_loaders(kind: str) -> Any:
    if kind == "batch_sampler":
        return DataLoader(Samples(9), batch_sampler=Pairs(range(9), 2, drop_last=False))
    if kind == "sampler":
        return DataLoader(Samples(12), sampler=range(2, 7))
    if kind == "random sampler":
        return DataLoader(Samples(12), sampler=SubsetRandomSampler(range(2, 7)), batch_size=2)
    return DataLoader(Samples(9), batch_size=2, drop_last=True)


@pytest.mark.parametrize(
    ("kind", "samples"),
    [("batch_sampler", range(9)), ("sampler", range(2, 7)), ("random sampler", range(2, 7)), ("drop_last", None)],
)
def test_own_samplers_and_batch_samplers_are_shared_out(kind: str, samples: Any) -> None:
    def run() -> dict[str, float]:
        torch.manual_seed(1)
        return make_trainer().validate(Evaluates(), make_loaders(kind), verbose=False)[0]

    for metrics in run_ranks(run, 2):
        if samples is None:
            assert metrics["count_epoch"] == 8  # as many as in one process
        else:
            check(metrics, [sample + 1.0 for sample in samples])


@pytest.mark.parametrize(("limit", "expected"), [(1, [1.0, 2]), (0.5, [1.0, 2, 3, 4]), (4, [1.0, 2, 3, 4, 5, 6, 7])])
def test_limit_val_batches_counts_the_batches_of_each_rank(limit: float, expected: list[float]) -> None:
    def run() -> dict[str, float]:
        trainer = make_trainer(limit_val_batches=limit)
        return trainer.validate(Evaluates(), DataLoader(Samples(7)), verbose=False)[0]

    for metrics in run_ranks(run, 2):
        check(metrics, expected)


class LogsLoaders(Evaluates):
    def evaluate(self, batch: Tensor) -> None:
        values = batch.flatten() + 0 * self.layer(batch).flatten()
        self.log("mean", values.mean(), sync_dist=True, batch_size=len(values))

    def on_validation_batch_end(self, *args: Any) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass


def test_each_of_several_loaders_counts_its_samples_once() -> None:
    counts = (5, 4, 1)

    def run() -> list[dict[str, float]]:
        loaders = [DataLoader(Samples(count)) for count in counts]
        return make_trainer().validate(LogsLoaders(), loaders, verbose=False)

    for results in run_ranks(run, 2):
        for index, count in enumerate(counts):
            mean = results[index][f"mean/dataloader_idx_{index}"]
            assert mean == pytest.approx((count + 1) / 2), index


def test_batches_of_several_loaders_at_once_end_together() -> None:
    class Adds(LogsLoaders):
        def evaluate(self, batch: Any) -> None:
            super().evaluate(batch[0] + batch[1])

    def run() -> dict[str, float]:
        loaders = CombinedLoader([DataLoader(Samples(5)), DataLoader(Samples(5))], "min_size")
        return make_trainer().validate(Adds(), loaders, verbose=False)[0]

    for metrics in run_ranks(run, 2):
        assert metrics["mean"] == pytest.approx(6)


class Counts(UserModule):
    """Adds up samples at all places where users do, in place and not."""

    seed = 1

    def build(self) -> None:
        self.layer = nn.Linear(1, 1)
        self.inner = nn.Module()
        self.inner.register_buffer("buffer", torch.zeros(1), persistent=False)
        self.inner.number = 0
        self.array, self.tensor = np.zeros(1), torch.zeros(1)
        self.alias = [self.tensor]
        self.nested: dict[str, Any] = {"tensor": torch.zeros(1), "array": np.zeros(1), "lists": {"all": []}}
        self.counter, self.recent, self.seen = Counter[str](), deque[float](maxlen=9), set[float]()
        self.rows: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch = batch["rows"] if isinstance(batch, dict) else batch
        count, row = len(batch) + 0 * int(self.layer(batch).isnan().sum()), batch[0].item()
        self.inner.number += count
        for values in (self.inner.buffer, self.array, self.tensor, self.nested["tensor"], self.nested["array"]):
            values += count
        self.counter["all"] += count
        self.recent.append(row)
        self.rows.append(row)
        self.nested["lists"]["all"].append(row)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.add(batch_idx)

    def count(self) -> list[float]:
        lengths = [len(rows) for rows in (self.recent, self.rows, self.seen, self.nested["lists"]["all"])]
        tensors = (self.inner.buffer, self.tensor, self.alias[0], self.nested["tensor"])
        return [*lengths, self.inner.number, self.counter["all"], self.array.item(), self.nested["array"].item()] + [
            value.item() for value in tensors
        ]


class CountsBatches(pl.Callback):
    def __init__(self) -> None:
        self.count, self.rows = 0, np.zeros(1)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.count += 1
        self.rows += 1


def test_a_filler_leaves_no_trace_in_modules_and_callbacks() -> None:
    def run() -> tuple[list[float], ...]:
        module, callback = Counts(), CountsBatches()
        make_trainer(callbacks=[callback]).validate(module, DataLoader(Samples(7)), verbose=False)
        return module.count(), [callback.count, callback.rows.item()]

    assert run_ranks(run, 2) == [([4] * 12, [4] * 2), ([3] * 12, [3] * 2)]


class WithLock(Dataset[dict[str, Any]]):
    """Its batches cannot be copied."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"rows": torch.ones(1, 1), "lock": threading.Lock()}


def test_a_batch_that_cannot_be_copied_fills_up_too() -> None:
    def run() -> list[float]:
        module = Counts()
        make_trainer().validate(module, DataLoader(WithLock(), batch_size=None), verbose=False)
        return module.count()

    assert run_ranks(run, 2) == [[2] * 12, [1] * 12]


class Reads(UserModule):
    """Draws a number for each sample, so that ranks of unequally many samples draw unequally many."""

    seed = 1

    def build(self) -> None:
        self.layer = nn.Linear(1, 1)
        self.read: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.read += (batch.flatten() + 0 * torch.rand(len(batch))).tolist()

    test_step = predict_step = validation_step


@pytest.mark.parametrize("stage", ["validate", "test", "predict", "fit"])
def test_a_random_order_without_a_seed_is_that_of_all_ranks(stage: str) -> None:
    def run() -> list[float]:
        module = Reads()
        torch.manual_seed(5 + int(os.environ["RANK"]))
        loader = DataLoader(Samples(12), sampler=SubsetRandomSampler(range(7)), batch_size=2)
        for _ in range(2):
            if stage == "fit":
                make_trainer(num_sanity_val_steps=0).fit(module, DataLoader(Samples(4)), loader)
            else:
                getattr(make_trainer(), stage)(module, loader, **({} if stage == "predict" else {"verbose": False}))
        return module.read

    first, second = run_ranks(run, 2)
    for half in range(2):
        read = [*first[4 * half : 4 * half + 4], *second[3 * half : 3 * half + 3]]
        assert sorted(read) == [1, 2, 3, 4, 5, 6, 7]


def test_ranks_train_in_one_order_after_an_uneven_validation() -> None:
    class Trains(Reads):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.trained.append(batch.flatten().tolist())
            return self.layer(batch).square().mean()

    def run() -> list[list[float]]:
        module = Trains()
        module.trained = []
        order = DataLoader(Samples(6), batch_sampler=Shuffles(range(6), 2, drop_last=False))
        trainer = make_trainer(max_epochs=3, max_steps=-1, use_distributed_sampler=False)
        validation = DataLoader(Samples(2 + int(os.environ["RANK"])), batch_size=4)
        trainer.fit(module, order, validation)
        return module.trained

    first, second = run_ranks(run, 2)
    assert first == second


class Shuffles(BatchSampler):
    def __iter__(self) -> Any:
        order = torch.randperm(6).tolist()
        return iter([order[:2], order[2:4], order[4:]])


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randint(1, LLAMA["vocab_size"], (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # the rows have unequally many labels
        labels = self.rows[index].clone()
        labels[: index % 4] = -100
        return {"input_ids": self.rows[index], "labels": labels}


@pytest.mark.parametrize(("ranks", "count"), [(2, 7), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_causal_language_model_counts_each_token_once(ranks: int, count: int) -> None:
    def run() -> float:
        module = user_modules.make_language_model()
        return make_trainer().validate(module, DataLoader(Tokens(count)), verbose=False)[0]["val/loss"]

    assert run_ranks(run, ranks) == pytest.approx([compute_alone(count)] * ranks, abs=1e-5)


def compute_alone(count: int) -> float:
    """The mean over all tokens, by one process that reads all samples."""
    model, total, tokens = user_modules.make_language_model().model, 0.0, 0
    for index in range(count):
        sample = Tokens(count)[index]
        labels = sample["labels"][1:]
        with torch.no_grad():
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
        total += nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        tokens += int((labels != -100).sum())
    return total / tokens


def test_predictions_are_as_before() -> None:
    class Predicts(Evaluates):
        def predict_step(self, batch: Tensor, batch_idx: int) -> list[float]:
            self.layer(batch)
            return batch.flatten().tolist()

    def run() -> list[list[float]]:
        return make_trainer().predict(Predicts(), DataLoader(Samples(7)))

    assert sorted(sample for rank in run_ranks(run, 2) for [sample] in rank) == [1, 2, 3, 4, 5, 6, 7]
