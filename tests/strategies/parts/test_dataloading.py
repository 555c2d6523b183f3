"""Who reads which batch, and that all ranks end together: a rank that stops alone would leave the others waiting."""

import collections
import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers import user_modules
from helpers.ranks import run_ranks
from helpers.user_modules import AtSteps, UserModule, make_mixed_batch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fsdp2 import FSDP2Strategy, create_device_mesh
from lightning_fsdp2.data.loader import ResumableDataLoader, ResumableSampler, collate_sequences
from lightning_fsdp2.strategies.parts.dataloading import keep_in_step

STAGES = ("fit", "validate", "test")


class Samples(Dataset[Tensor]):
    """Sample i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class SampleStream(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.count))[:, None])


class SampleStreamOfGuessedLength(SampleStream):
    def __len__(self) -> int:
        return 5


class PlainIterable:
    """Neither a DataLoader nor sized."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.count))[:, None, None])


class Reader(UserModule):
    """Its forwards are collectives; writes down which samples it saw."""

    make_optimizer = staticmethod(partial(torch.optim.SGD, lr=1e-3))

    def build(self) -> None:
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, list[int]] = collections.defaultdict(list)

    def read(self, stage: str, batch: Tensor) -> Tensor:
        self.seen[stage] += batch.flatten().int().tolist()
        return self.layer(batch).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.read("fit", batch)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.read("validate", batch)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.read("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        self.layer(batch)
        return batch.flatten().int().tolist()


make_trainer = partial(user_modules.make_trainer, max_epochs=1, use_distributed_sampler=True)


# ---------------------------------------------------------------------- data parallel ranks, not global ones


def make_stub(mesh_options: dict[str, int]) -> FSDP2Strategy:
    """A strategy that fits, on a mesh of other sizes than its own."""
    strategy = FSDP2Strategy()
    state = SimpleNamespace(fn=TrainerFn.FITTING, stage=RunningStage.TRAINING)
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(state=state))
    strategy.world.control_group = dist.group.WORLD
    strategy.enter_mesh(create_device_mesh(device_type="cpu", **mesh_options))
    return strategy


class DropsOut(Reader):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.dropout(super().training_step(batch, batch_idx).expand(64), 0.5).square().sum()


def test_dropout_goes_on_alike_after_a_resume_with_a_plain_data_loader(tmp_path: Path) -> None:
    """Iterators of a plain DataLoader draw their seeds from the global generator, more often after a resume."""

    def train(max_epochs: int, ckpt_path: Path | None) -> float:
        pl.seed_everything(1, verbose=False)
        module, trainer = DropsOut(), make_trainer(max_epochs=max_epochs)
        trainer.fit(module, DataLoader(Samples(4), shuffle=True), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{max_epochs}.ckpt")
        return module.layer.weight.full_tensor().item()

    uninterrupted = run_ranks(train, 2, 2, None)[0]
    stopped = run_ranks(train, 2, 1, None)[0]
    resumed = run_ranks(train, 2, 2, tmp_path / "1.ckpt")[0]
    assert resumed == uninterrupted != stopped


class ReadsTokens(Reader):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.read("fit", batch["input_ids"].float())


class Tokens(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> ResumableDataLoader:
        samples = [{"input_ids": torch.tensor([sample])} for sample in range(24)]
        kwargs = self.trainer.distributed_sampler_kwargs
        sampler = ResumableSampler(samples, **kwargs, shuffle=True, seed=1, drop_last=True)
        return ResumableDataLoader(
            samples, batch_size=self.batch_size, sampler=sampler, drop_last=True, collate_fn=collate_sequences
        )


@pytest.mark.guarantees("next-sample")
@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states of 1 data parallel ranks")
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 4), (2, 2), (1, 1), (1, 2)])
def test_a_resume_with_another_batch_size_or_world_trains_on_all_that_was_left(
    world_size: int, batch_size: int, tmp_path: Path
) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    def train(batch_size: int, ckpt_path: Path | None) -> list[int]:
        module = ReadsTokens()
        make_trainer(callbacks=[Saves()] if ckpt_path is None else [], max_epochs=2).fit(
            module, Tokens(batch_size), ckpt_path=ckpt_path
        )
        return module.seen["fit"]

    everything = run_ranks(train, 1, 2, None)[0]
    resumed = run_ranks(train, world_size, batch_size, tmp_path / "x.ckpt")
    together = sorted(sample for seen in resumed for sample in seen)
    assert together == sorted(everything[8:]), "4 batches of 2 were trained on before"


def test_earlier_epochs_count_as_many_batches_as_this_run_would_have_read(tmp_path: Path) -> None:
    """24 samples are 12 batches of 2. After 15 of them, the second epoch has had 3."""

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            counts.append(trainer.fit_loop.epoch_loop.batch_progress.total.ready)

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 15 and not path.exists():
                trainer.save_checkpoint(path)

    path = tmp_path / "x.ckpt"
    counts: list[int] = []

    def train(batch_size: int, ckpt_path: Path | None) -> list[int]:
        make_trainer(callbacks=[Looks()], max_epochs=2).fit(ReadsTokens(), Tokens(batch_size), ckpt_path=ckpt_path)
        return counts

    assert run_ranks(train, 1, 2, None) == [[*range(1, 25)]]
    assert run_ranks(train, 1, 1, path) == [[*range(30 + 1, 48 + 1)]]
    assert run_ranks(train, 1, 3, path) == [[*range(10 + 1, 16 + 1)]]


class RandomSamples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(3)


def test_samplers_and_worker_seeds_go_by_data_parallel_rank() -> None:
    def run() -> tuple[dict[str, int], list[float]]:
        pl.seed_everything(1, workers=True, verbose=False)
        strategy = make_stub({"tp_size": 2})
        loader = strategy.process_dataloader(DataLoader(RandomSamples(), num_workers=1, timeout=30))
        return strategy.distributed_sampler_kwargs, torch.cat(list(loader)).flatten().tolist()

    results = run_ranks(run, 4)
    assert [sampler for sampler, _ in results] == [{"num_replicas": 2, "rank": rank} for rank in (0, 0, 1, 1)]
    numbers = [drawn for _, drawn in results]
    assert numbers[0] == numbers[1]
    assert numbers[2] == numbers[3]
    assert not set(numbers[0]) & set(numbers[2])


def test_the_trainer_shards_the_data_and_seeds_the_workers() -> None:
    def own_init(worker: int) -> None:
        pass

    def run() -> list[int]:
        pl.seed_everything(1, workers=True, verbose=False)
        rank, module = dist.get_rank(), Reader()
        trainer = make_trainer()
        trainer.fit(module, DataLoader(Samples(6)))
        sampler = trainer.train_dataloader.sampler
        assert (sampler.num_replicas, sampler.rank) == (2, rank)
        assert trainer.train_dataloader.worker_init_fn.keywords == {"rank": rank}

        trainer = make_trainer(limit_train_batches=1)
        trainer.fit(Reader(), DataLoader(Samples(6), worker_init_fn=own_init))
        assert trainer.train_dataloader.worker_init_fn is own_init
        return module.seen["fit"]

    first, second = run_ranks(run, 2)
    assert sorted(first + second) == list(range(6))


# ---------------------------------------------------------------------- predict


@pytest.mark.guarantees("predictions")
@pytest.mark.parametrize("world_size", [2, 3])
def test_predict_makes_one_prediction_per_sample(world_size: int) -> None:
    def run() -> list[list[Any]]:
        module = Reader()

        def predict(loaders: Any) -> Any:
            return make_trainer().predict(module, loaders)

        # as many forwards on every rank, also with the module of an earlier stage
        make_trainer(max_steps=1).fit(module, DataLoader(Samples(6)))
        return [
            predict(DataLoader(Samples(5), batch_size=1)),
            predict(DataLoader(Samples(5), batch_size=2)),
            *predict([DataLoader(Samples(5), batch_size=1), DataLoader(Samples(7), batch_size=2)]),
        ]

    results = run_ranks(run, world_size)
    for index, count in enumerate((5, 5, 5, 7)):
        predicted = [sample for result in results for batch in result[index] for sample in batch]
        assert sorted(predicted) == list(range(count)), index


def test_predict_with_a_users_own_sampler_of_another_length_on_each_rank() -> None:
    def run() -> list[Any]:
        loader = DataLoader(Samples(9), sampler=range(4 * dist.get_rank(), 1 + 6 * dist.get_rank()))
        return make_trainer(use_distributed_sampler=False).predict(Reader(), loader)

    assert run_ranks(run, 2) == [[[0]], [[4], [5], [6]]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_predict_on_fewer_samples_than_ranks_is_an_error_on_every_rank(world_size: int) -> None:
    def run() -> None:
        for batch_size in (1, 2):
            with pytest.raises(ValueError, match=r"at least one batch per data parallel rank|fewer ranks"):
                make_trainer().predict(Reader(), DataLoader(Samples(world_size - 1), batch_size=batch_size))

    run_ranks(run, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluation_of_samples_that_the_ranks_do_not_divide_ends(world_size: int) -> None:
    def run() -> list[int]:
        module = Reader()
        for batch_size in (1, 2):
            make_trainer().validate(module, DataLoader(Samples(5), batch_size=batch_size), verbose=False)
            make_trainer().test(module, DataLoader(Samples(1), batch_size=batch_size), verbose=False)
        return module.seen["validate"]

    seen = [sample for samples in run_ranks(run, world_size) for sample in samples]
    assert set(seen) == set(range(5))


# ---------------------------------------------------------------------- ranks with unequally many batches


def make_ragged(kind: str, count: int) -> Any:
    if kind == "own sampler":
        return DataLoader(Samples(count + 2), sampler=range(count))
    if kind == "plain iterable":
        return PlainIterable(count)
    return DataLoader((SampleStream if kind == "stream" else SampleStreamOfGuessedLength)(count))


def run_stage(trainer: pl.Trainer, stage: str, module: Reader, loader: Any) -> None:
    options = {} if stage in ("fit", "predict") else {"verbose": False}
    getattr(trainer, stage)(module, loader, **options)


UNKNOWN_LENGTH = ("stream", "stream of guessed length", "plain iterable")


@pytest.mark.guarantees("ragged-data")
@pytest.mark.parametrize(
    "kind",
    [
        "own sampler",
        "stream of guessed length",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stream", "plain iterable")),
    ],
)
def test_ragged_loaders_end_together_with_a_warning(kind: str) -> None:
    warning = "have 2 to 3 batches; every rank stops after 2" if kind == "own sampler" else "1 of 2 ranks ran out of"

    def run() -> None:
        rank = dist.get_rank()
        for longest_rank in (0, 1):
            module = Reader()
            for stage in STAGES:
                epochs = 2 if stage == "fit" else 1
                loader = make_ragged(kind, 2 + (rank == longest_rank))
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    run_stage(make_trainer(max_epochs=epochs, use_distributed_sampler=False), stage, module, loader)
                assert module.seen[stage] == [0, 1] * epochs, stage
                assert any(warning in str(w.message) for w in caught) == (rank == 0), stage  # one rank speaks for all

    run_ranks(run, 2)


@pytest.mark.parametrize("guesses", [pytest.param((5, 5), marks=pytest.mark.slow), (5, 4), (2, 2)])
def test_the_length_a_stream_claims_is_known_to_the_trainer(guesses: tuple[int, int]) -> None:
    """Progress bars and `val_check_interval` fractions need one; the stream itself ends where it ends."""

    class Claims(SampleStream):
        def __len__(self) -> int:
            return guesses[dist.get_rank()]

    def run() -> tuple[int, list[int], list[str]]:
        module, trainer = Reader(), make_trainer(use_distributed_sampler=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(Claims(3)))
        ragged = [str(w.message) for w in caught if "every rank stops after" in str(w.message)]
        return trainer.num_training_batches, module.seen["fit"], ragged

    for rank, (length, seen, ragged) in enumerate(run_ranks(run, 2)):
        assert length == min(guesses)
        assert seen == [0, 1, 2][: min(guesses)]
        assert bool(ragged) == (rank == 0 and guesses[0] != guesses[1])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "stream" else pytest.mark.slow) for kind in UNKNOWN_LENGTH]
)
def test_equal_streams_are_read_to_their_end_without_a_warning(kind: str) -> None:
    def run() -> None:
        module = Reader()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for stage in STAGES:
                run_stage(make_trainer(use_distributed_sampler=False), stage, module, make_ragged(kind, 3))
                assert module.seen[stage] == [0, 1, 2]
            predictions = make_trainer().predict(module, make_ragged(kind, 3))
        assert predictions == [[0], [1], [2]]
        assert not [w for w in caught if "ran out" in str(w.message)]

    run_ranks(run, 2)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "plain iterable" else pytest.mark.slow) for kind in UNKNOWN_LENGTH]
)
def test_predict_on_unequal_streams_is_an_error_on_every_rank(kind: str) -> None:
    def run() -> None:
        for longest_rank in (0, 1):
            loader = make_ragged(kind, 2 + (dist.get_rank() == longest_rank))
            with pytest.raises(ValueError, match=r"1 of 2 ranks ran out of batches .* predictions would be lost"):
                make_trainer().predict(Reader(), loader)

    run_ranks(run, 2)


def test_a_rank_without_any_batch_is_an_error_on_every_rank() -> None:
    def run() -> None:
        for stage in (*STAGES, "predict"):
            loader = make_ragged("own sampler", 2 * dist.get_rank())
            with pytest.raises(ValueError, match=r"has \[0, 2\] batches on ranks 0 to 1"):
                run_stage(make_trainer(use_distributed_sampler=False), stage, Reader(), loader)

    run_ranks(run, 2)


def test_one_process_keeps_a_sized_loader() -> None:
    loader = DataLoader(Samples(2))

    def run() -> bool:
        return keep_in_step(loader, dist.group.WORLD, may_drop=False) is loader

    assert keep_in_step(loader, None, may_drop=False) is loader
    assert run_ranks(run, 1) == [True]


# ---------------------------------------------------------------------- the saved position


class PositionLoader:
    """A stateful loader of unknown length."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.start = self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        start, self.start = self.start % self.count, 0
        for index in range(start, self.count):
            self.position = index + 1
            yield torch.tensor([[float(index)]])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


class SizedPositionLoader(PositionLoader):
    def __len__(self) -> int:
        return self.count


def make_stateful(kind: str, count: int) -> Any:
    if kind == "own":
        return PositionLoader(count)
    if kind == "own, sized":
        return SizedPositionLoader(count)
    workers = 1 if "worker" in kind else 0
    return StatefulDataLoader(SampleStream(count), batch_size=1, num_workers=workers)


EPOCH = 4


def assert_resumed_run_reads_the_next_batch(kind: str, step: int, folder: Path, *, is_ragged: bool) -> None:
    """An epoch ends with the shortest loader; ``step`` is where the first run saves and the second one goes on."""
    warnings.simplefilter("ignore")  # about ragged loaders
    count = EPOCH + (is_ragged and dist.get_rank() == 1)
    options: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
    path = folder / f"{step}.ckpt"
    first, second = Reader(), Reader()
    make_trainer(**options, callbacks=[AtSteps({step: lambda trainer: trainer.save_checkpoint(path)})]).fit(
        first, make_stateful(kind, count)
    )
    assert first.seen["fit"] == [*range(EPOCH)] * 2, step
    make_trainer(**options).fit(second, make_stateful(kind, count), ckpt_path=path)
    assert second.seen["fit"] == ([*range(EPOCH)] * 2)[step:], step


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("own, sized", 2),
        ("torchdata with a worker", 1),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (("own", 1), ("own", 2), ("torchdata", 1), ("torchdata", 2), ("torchdata with a worker", 2))
        ),
    ],
)
def test_a_resumed_run_reads_the_next_batch(kind: str, world_size: int, tmp_path: Path) -> None:
    def run() -> None:
        steps = (1, EPOCH, EPOCH + 1) if "worker" not in kind else (EPOCH - 1,)
        for step in steps:
            assert_resumed_run_reads_the_next_batch(kind, step, tmp_path, is_ragged=step != EPOCH)

    run_ranks(run, world_size)


@pytest.mark.parametrize("kind", [pytest.param("own", marks=pytest.mark.slow), "own, sized", "torchdata"])
def test_a_run_resumed_at_the_end_of_a_ragged_epoch(kind: str, tmp_path: Path) -> None:
    run_ranks(lambda: assert_resumed_run_reads_the_next_batch(kind, EPOCH, tmp_path, is_ragged=True), 2)


def test_a_run_that_its_number_of_steps_ended_goes_on_from_its_last_step(tmp_path: Path) -> None:
    """Amid an epoch, of which the loader no longer knows the position, and at its end; each epoch has its own order."""

    def run() -> None:
        def fit(steps: int, folder: Path, ckpt_path: Path | None = None) -> tuple[list[int], int]:
            checkpoint = ModelCheckpoint(folder, every_n_train_steps=EPOCH - 1, save_top_k=0, save_last=True)
            options: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "enable_checkpointing": True}
            trainer, module = make_trainer(callbacks=[checkpoint], **options), Reader()
            samples = Samples(EPOCH)
            loader = StatefulDataLoader(samples, batch_size=1, sampler=DistributedSampler(samples, 1, 0))
            trainer.fit(module, loader, ckpt_path=ckpt_path)
            return module.seen["fit"], trainer.current_epoch

        expected, epochs = fit(2 * EPOCH, tmp_path)
        assert sorted(expected[:EPOCH]) == sorted(expected[EPOCH:]) == [*range(EPOCH)]
        assert expected[:EPOCH] != expected[EPOCH:]
        for step in (EPOCH, EPOCH + 1):
            first, _ = fit(step, tmp_path / str(step))
            second, found = fit(2 * EPOCH, tmp_path, tmp_path / str(step) / "last.ckpt")
            assert (first + second, found) == (expected, epochs), step

    run_ranks(run, 1)


def test_a_shortened_loader_that_resumes_ends_by_itself() -> None:
    """Also in a loop that does not count the batches, as the Trainer does."""

    def run() -> None:
        loader, resumed = (
            keep_in_step(SizedPositionLoader(EPOCH + 3 * dist.get_rank()), dist.group.WORLD, may_drop=True)
            for _ in range(2)
        )
        batches = iter(loader)
        assert [next(batches).item() for _ in range(3)] == [0, 1, 2]
        resumed.load_state_dict(loader.state_dict())
        for epoch in (range(3, EPOCH), range(EPOCH)):
            assert [batch.item() for batch in resumed] == list(epoch)

    warnings.simplefilter("ignore")
    run_ranks(run, 2)


@pytest.mark.parametrize("kind", [PositionLoader, SizedPositionLoader])
def test_lightning_finds_the_state_of_a_ragged_loader(kind: type[PositionLoader]) -> None:
    def run() -> None:
        loader = keep_in_step(kind(2 + dist.get_rank()), dist.group.WORLD, may_drop=True)
        for name in ("state_dict", "load_state_dict"):
            # as isinstance() looks for the members of a protocol since Python 3.12
            assert callable(inspect.getattr_static(loader, name))
        assert not hasattr(keep_in_step(PlainIterable(2), dist.group.WORLD, may_drop=True), "state_dict")

    warnings.simplefilter("ignore")
    run_ranks(run, 2)


# ---------------------------------------------------------------------- the same batch within a replica


def test_different_batches_within_a_replica_are_an_error_on_every_rank() -> None:
    def run() -> None:
        different = {"x": torch.tensor(dist.get_rank() == 1)}  # in the first of two replicas
        strategy = make_stub({"tp_size": 2})
        strategy.parallel_devices = [torch.device("cpu")]
        strategy.batches.check_same(make_mixed_batch(), "train", 0)
        strategy.batches.check_same(different, "train", 0)  # only the first one is compared
        with pytest.raises(ValueError, match=r"different first batches from train_dataloader 1.*data_parallel_rank"):
            strategy.batches.check_same(different, "train", 1)
        for name in ("val", "predict"):
            strategy.batches.check_same(make_mixed_batch(), name, 1)
            with pytest.raises(ValueError, match=f"from {name}_dataloader 0"):
                strategy.batches.check_same([make_mixed_batch(), different], name, 0)

    run_ranks(run, 4)


def test_replicas_read_different_batches() -> None:
    def run() -> None:
        strategy = make_stub({"tp_size": 2})
        strategy.batches.check_same({"x": torch.tensor(strategy.data_parallel_rank)}, "train", 0)
        make_stub({}).batches.check_same({"x": torch.tensor(dist.get_rank())}, "train", 0)

    run_ranks(run, 4)
