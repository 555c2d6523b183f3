"""In training, each data parallel rank draws its own random numbers; whatever ranks must agree on stays shared."""

import copy
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import user_modules
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import WIDTH, UserModule
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fsdp2 import CheckpointConfig, DDPStrategy, FSDP2Strategy, MegatronFSDPStrategy
from lightning_fsdp2.ranks.own_random import OwnRandomNumbers, shared_random_numbers
from lightning_fsdp2.ranks.random_state import get_random_state, set_random_state
from lightning_fsdp2.strategies.parts.dataloading import draw_order_from_shared_numbers

CPU = torch.device("cpu")

TP_PLAN = {"tp_plan": {"layer.2": "rowwise_split_input"}}

make_trainer = partial(user_modules.make_trainer, max_steps=3)


class Samples(Dataset[Tensor]):
    """Sample i is a row of the number i, and augmented."""

    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full([WIDTH], float(index)), torch.rand(2)


class DropsOut(UserModule):
    """Writes down the random state before each step, and what the step draws."""

    seed = 1
    make_optimizer = staticmethod(partial(torch.optim.SGD, lr=1e-3))

    def build(self) -> None:
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
        self.states: list[dict[str, Any]] = []
        self.drawn: list[Any] = []
        self.read: list[Any] = []
        self.validated: list[Any] = []
        self.gradients: list[dict[str, Tensor]] = []

    def loss(self, batch: Any) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.states.append(get_random_state(CPU))
        self.read.append((batch[0][:, 0].tolist(), batch[1].tolist()))
        loss = self.loss(batch)
        self.drawn.append((torch.rand(2).tolist(), random.random(), np.random.rand()))
        return loss

    def on_after_backward(self) -> None:
        self.gradients.append(whole({name: p.grad for name, p in self.named_parameters()}))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((torch.rand(2).tolist(), random.random(), np.random.rand()))


def make_strategy(name: str, **options: Any) -> Any:
    return {"fsdp2": FSDP2Strategy, "ddp": DDPStrategy, "megatron_fsdp": MegatronFSDPStrategy}[name](**options)


def train(
    strategy: str = "fsdp2",
    *,
    seed: int | None = 1,
    loader: Any = None,
    ckpt_path: Any = None,
    save_path: Any = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> DropsOut:
    module = DropsOut()
    if seed is not None:
        pl.seed_everything(seed, verbose=False)
    trained = make_trainer(
        make_strategy(strategy, **options), use_distributed_sampler=loader is None, **(trainer or {})
    )
    trained.fit(module, loader or DataLoader(Samples(), batch_size=2), ckpt_path=ckpt_path)
    if save_path is not None:
        trained.save_checkpoint(save_path)
    return module


# ---------------------------------------------------------------------- what is drawn


@pytest.mark.guarantees("own-random-numbers", "replica-random-numbers")
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        ("fsdp2", 2, {}),
        ("ddp", 2, {}),
        pytest.param("megatron_fsdp", 2, {"config": {"zero_dp_strategy": 2}}, marks=pytest.mark.slow),
        pytest.param("fsdp2", 4, {"tp_size": 2, "config": TP_PLAN}, marks=pytest.mark.slow),
        pytest.param("fsdp2", 4, {"dp_replicate_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_that_of_one_process_that_uses_the_masks_of_each_data_rank_in_turn(
    strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    def run() -> tuple[Any, ...]:
        module = train(strategy, trainer={"max_steps": 1}, **options)
        return module.states, module.read, module.drawn, module.gradients

    results = STRATEGIES[strategy].run(run, ranks)
    replica = options.get("tp_size", 1)
    for rank, (_, read, drawn, _) in enumerate(results):
        assert (read, drawn) == results[rank - rank % replica][1:3], "ranks of a replica draw the same"
    leaders = results[::replica]
    for kind in range(3):
        assert len({str(drawn[0][kind]) for _, _, drawn, _ in leaders}) == len(leaders), "data ranks draw their own"

    alone = DropsOut()
    for states, read, _, _ in leaders:
        set_random_state(states[0], CPU)
        batch = [torch.tensor(part) for part in read[0]]
        batch[0] = batch[0][:, None].expand(-1, WIDTH)
        (alone.loss(batch) / len(leaders)).backward()
    for *_, gradients in results:
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(gradients[0][name], parameter.grad)


def test_a_seed_repeats_a_run_and_data_ranks_differ_without_one_too() -> None:
    def run(seed: int | None) -> list[Any]:
        return train(seed=seed).drawn

    first, again, unseeded = (run_ranks(run, 2, seed) for seed in (1, 1, None))
    assert first == again
    for drawn in (first, unseeded):
        for step in range(3):
            assert not any(one == other for one, other in zip(drawn[0][step], drawn[1][step], strict=True))


def test_shared_numbers_are_the_same_on_all_ranks() -> None:
    def run() -> list[Any]:
        return train(random_numbers="shared").drawn

    first, second = run_ranks(run, 2)
    assert first == second


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "megatron_fsdp"])
def test_an_unknown_word_is_an_error(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"random_numbers='own'\) must be 'per_data_rank' or 'shared'"):
        make_strategy(strategy, random_numbers="own")


def test_validation_and_what_follows_the_fit_draw_shared_numbers() -> None:
    def run() -> tuple[Any, ...]:
        torch.manual_seed(1)  # `seed_everything` would make each fit begin with the same numbers
        module, loader = DropsOut(), DataLoader(Samples(), batch_size=2)
        trainer = make_trainer(use_distributed_sampler=True, val_check_interval=1)
        trainer.fit(module, loader, DataLoader(Samples(4)))
        inside, after = module.validated, (torch.rand(2).tolist(), random.random(), np.random.rand())
        drawn, module.drawn, module.validated = module.drawn, [], []
        trainer.validate(module, DataLoader(Samples(4)), verbose=False)
        make_trainer(use_distributed_sampler=True).fit(module, loader)
        return inside, after, module.validated, drawn, module.drawn

    first, second = run_ranks(run, 2)
    assert first[:3] == second[:3]
    for results in (first, second):
        assert len(results[0]) == 3 * 2 + 2  # with the sanity check
        assert len({str(one) for one in (*results[3], *results[4])}) == 6, "another fit draws other numbers"


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", "generator"])
def test_augmentation_differs_between_data_ranks(kind: str, workers: int) -> None:
    def run() -> list[Any]:
        generator = torch.Generator().manual_seed(5) if kind == "generator" else None
        loader = DataLoader(Samples(), batch_size=2, num_workers=workers, generator=generator)
        return [augmented for _, augmented in train(loader=loader).read]

    first, second = run_ranks(run, 2)
    assert not any(one == other for one, other in zip(first, second, strict=True))


class OwnSampler:
    """Shuffles as a user would, without a thought of ranks."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter(self.draw())


def shuffle_by_python() -> list[int]:
    order = list(range(12))
    random.shuffle(order)
    return order


SAMPLERS = {
    "torch": lambda: OwnSampler(lambda: torch.randperm(12).tolist()),
    "numpy": lambda: OwnSampler(lambda: np.random.permutation(12).tolist()),
    "python": lambda: OwnSampler(shuffle_by_python),
    "RandomSampler": lambda: RandomSampler(range(12)),
}


class EveryNth:
    """Gives each rank its batches of an order that all ranks draw."""

    def __init__(self, sampler: Any) -> None:
        self.batches = BatchSampler(sampler, 2, drop_last=False)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return (batch for number, batch in enumerate(self.batches) if number % 2 == dist.get_rank())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_ranks_that_share_out_an_order_draw_the_same_order_in_each_epoch(sampler: str) -> None:
    def run() -> list[list[float]]:
        loader = DataLoader(Samples(), batch_sampler=EveryNth(SAMPLERS[sampler]()))
        return [rows for rows, _ in train(loader=loader, trainer={"max_epochs": 3, "max_steps": -1}).read]

    results = run_ranks(run, 2)
    batches = [[batch for read in results for batch in read[3 * epoch : 3 * epoch + 3]] for epoch in range(3)]
    epochs = [[sample for batch in epoch for sample in batch] for epoch in batches]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({str(epoch) for epoch in epochs}) == 3


def test_a_sampler_that_the_trainer_shares_out_has_one_order_in_each_epoch() -> None:
    def run() -> list[list[float]]:
        loader = DataLoader(Samples(), sampler=SubsetRandomSampler(range(12)), batch_size=2)
        options = {"max_epochs": 3, "max_steps": -1, "use_distributed_sampler": True}
        pl.seed_everything(1, verbose=False)
        module = DropsOut()
        make_trainer(**options).fit(module, loader)
        return [rows for rows, _ in module.read]

    results = run_ranks(run, 2)
    for epoch in range(3):
        read = [sample for rank in results for batch in rank[3 * epoch : 3 * epoch + 3] for sample in batch]
        assert sorted(read) == list(range(12))


class Buckets(BatchSampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([[self.epoch], [random.randrange(12)]])


class SlottedBuckets:
    __slots__ = ("epoch",)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([[self.epoch], [self.epoch]])


def make_buckets(kind: Any) -> Any:
    return kind(range(12), 1, drop_last=False) if kind is Buckets else kind()


@pytest.mark.parametrize("kind", [Buckets, SlottedBuckets])
def test_the_sampler_of_a_loader_can_be_changed(kind: Any) -> None:
    own = make_buckets(kind)
    loader = DataLoader(Samples(), batch_sampler=own)
    draw_order_from_shared_numbers(loader)
    sampler: Any = loader.batch_sampler
    assert isinstance(sampler, kind)
    assert type(sampler) is not kind, "it draws shared numbers"
    sampler.epoch = 5
    assert own.epoch == 5
    assert next(iter(sampler)) == [5]
    assert next(iter(copy.copy(sampler))) == [5]


@pytest.mark.parametrize("sampler", [[3, 1], (3, 1), range(2), np.arange(2), torch.arange(2)], ids=repr)
def test_a_sampler_that_is_a_list_stays_as_it_is(sampler: Any) -> None:
    loader = DataLoader(Samples(), sampler=sampler, batch_size=None)
    draw_order_from_shared_numbers(loader)
    assert [int(sample[0][0]) for sample in loader] == [int(index) for index in sampler]


def test_a_generator_as_a_sampler_is_refused() -> None:
    loader = DataLoader(Samples(), batch_sampler=([index] for index in range(2)))
    with pytest.raises(TypeError, match="sampler of type generator cannot be made to draw them"):
        draw_order_from_shared_numbers(loader)


@pytest.mark.parametrize(
    ("options", "swaps"),
    [
        ({"shuffle": True, "batch_size": 2}, 2),
        ({"sampler": SubsetRandomSampler(range(12))}, 2),
        ({"sampler": WeightedRandomSampler(torch.ones(12), 12), "batch_size": None}, 2),
        ({"batch_sampler": BatchSampler(RandomSampler(range(12)), 2, drop_last=False)}, 2),
        ({"sampler": SAMPLERS["numpy"]()}, 26),  # its class says nothing of when it draws
    ],
    ids=["shuffle", "subset", "weighted", "batches", "own"],
)
def test_torchs_samplers_swap_the_random_states_once_per_epoch(options: dict[str, Any], swaps: int) -> None:
    loader: Any = DataLoader(Samples(), **options)
    draw_order_from_shared_numbers(loader)
    numbers = OwnRandomNumbers()
    numbers.begin(0, CPU)
    with patch.object(numbers, "_swap", wraps=numbers._swap) as swap:
        drawn = list(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    numbers.end()
    assert len(drawn) == len(loader)
    assert swap.call_count == swaps


def test_a_loader_that_is_built_again_in_each_epoch_is_built_from_shared_numbers() -> None:
    class Rebuilds(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.utils.data.Subset(Samples(), torch.randperm(12)[:4].tolist()), batch_size=2)

    def run() -> list[float]:
        module = DropsOut()
        pl.seed_everything(1, verbose=False)
        options: Any = {"max_epochs": 3, "max_steps": -1, "reload_dataloaders_every_n_epochs": 1}
        make_trainer(**options).fit(module, datamodule=Rebuilds())
        return [rows for rows, _ in module.read]

    first, second = run_ranks(run, 2)
    assert first == second


def test_a_hook_may_draw_shared_numbers() -> None:
    class DrawsShared(DropsOut):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            with shared_random_numbers(), shared_random_numbers():
                self.validated.append(torch.rand(2).tolist())

    def run() -> tuple[Any, ...]:
        module = DrawsShared()
        make_trainer(use_distributed_sampler=True).fit(module, DataLoader(Samples(), batch_size=2))
        return module.validated, module.drawn

    (shared, own), (other_shared, other_own) = run_ranks(run, 2)
    assert shared == other_shared
    assert len({str(numbers) for numbers in shared}) == 3
    assert own != other_own


@pytest.mark.slow
def test_recomputed_layers_drop_the_same_elements() -> None:
    class Recomputes(DropsOut):
        def loss(self, batch: Any) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.layer, batch[0], use_reentrant=False).square().mean()

    def run() -> list[Any]:
        results = []
        for kind in (DropsOut, Recomputes):
            pl.seed_everything(1, verbose=False)
            module = kind()
            make_trainer(use_distributed_sampler=True).fit(module, DataLoader(Samples(), batch_size=2))
            results.append(module.gradients)
        return results

    for plain, recomputed in run_ranks(run, 2):
        for one, other in zip(plain, recomputed, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


class SkipsLayers(DropsOut):
    def build(self) -> None:
        super().build()
        self.layer.layerdrop = 0.5


def test_layers_that_data_ranks_would_skip_apart_are_refused() -> None:
    def run() -> None:
        loader = DataLoader(Samples(), batch_size=2)
        with pytest.raises(
            ValueError, match=r"layer skips layers at random \(layerdrop=0.5\).*random_numbers='shared'"
        ):
            make_trainer(FSDP2Strategy()).fit(SkipsLayers(), loader)
        for strategy in (FSDP2Strategy(random_numbers="shared"), DDPStrategy()):
            make_trainer(strategy).fit(SkipsLayers(), loader)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- resuming


def run_and_resume(path: Path, checkpoint: CheckpointConfig | None, **options: Any) -> tuple[list[Any], list[Any]]:
    def run(steps: int, ckpt_path: Path | None, save_path: Path | None) -> Any:
        loader = DataLoader(Samples(), batch_sampler=EveryNth(RandomSampler(range(12))))
        limits = {"max_epochs": steps, "max_steps": -1}
        module = train(
            loader=loader, ckpt_path=ckpt_path, save_path=save_path, trainer=limits, checkpoint=checkpoint, **options
        )
        return module.read, module.drawn, whole(dict(module.named_parameters()))

    whole_run = run_ranks(run, 2, 2, None, None)
    run_ranks(run, 2, 1, None, path)
    resumed = run_ranks(run, 2, 2, path, None)
    return whole_run, resumed


@pytest.mark.guarantees("own-random-numbers-resume")
@pytest.mark.parametrize(
    ("checkpoint", "random_numbers"),
    [
        (None, "per_data_rank"),
        (None, "shared"),
        pytest.param({"format": "full"}, "per_data_rank", marks=pytest.mark.slow),
        pytest.param({"async_save": True}, "per_data_rank", marks=pytest.mark.slow),
    ],
)
def test_a_resume_on_as_many_data_ranks_is_exact(checkpoint: Any, random_numbers: str, tmp_path: Path) -> None:
    options = {"random_numbers": random_numbers}
    whole_run, resumed = run_and_resume(tmp_path / "x.ckpt", checkpoint and CheckpointConfig(**checkpoint), **options)
    for (read, drawn, weights), (read_again, drawn_again, weights_again) in zip(whole_run, resumed, strict=True):
        assert (read_again, drawn_again) == (read[3:], drawn[3:])
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


@pytest.mark.parametrize(
    ("ranks", "options", "warns"),
    [
        (1, {}, True),
        (2, {"random_numbers": "shared"}, True),
        pytest.param(4, {"tp_size": 2, "config": TP_PLAN}, False, marks=pytest.mark.slow),
    ],
)
def test_masks_that_cannot_be_kept_are_told_once(
    ranks: int, options: dict[str, Any], warns: bool, tmp_path: Path
) -> None:
    def run(ckpt_path: Path | None, save_path: Path | None, options: dict[str, Any]) -> tuple[list[str], list[Any]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps = {"max_steps": 2 if ckpt_path is None else 3}
            module = train(ckpt_path=ckpt_path, save_path=save_path, trainer=steps, **options)
        told = [str(one.message) for one in caught if "random numbers (dropout)" in str(one.message)]
        return told, module.drawn

    path = tmp_path / "x.ckpt"
    run_ranks(run, 2, None, path, {})
    told = [
        warning for warnings_of_rank, _ in run_ranks(run, ranks, path, None, options) for warning in warnings_of_rank
    ]
    assert len(told) == int(warns)
    if warns:
        assert "the random states of 2 data parallel ranks" in told[0]


@pytest.mark.filterwarnings("ignore:The checkpoint holds the same random state on all")
def test_numbers_of_shared_runs_are_not_taken_for_those_of_data_ranks(tmp_path: Path) -> None:
    def run(ckpt_path: Path | None, save_path: Path | None, options: dict[str, Any]) -> list[Any]:
        steps = {"max_steps": 2 if ckpt_path is None else 3}
        return train(ckpt_path=ckpt_path, save_path=save_path, trainer=steps, **options).drawn

    path = tmp_path / "x.ckpt"
    run_ranks(run, 2, None, path, {"random_numbers": "shared"})
    first, second = run_ranks(run, 2, path, None, {})
    assert first != second
    assert len(first) == 1


def test_a_copy_of_a_loader_with_a_shared_order_can_be_made() -> None:
    loader = DataLoader(Samples(), shuffle=True)
    draw_order_from_shared_numbers(loader)
    draw_order_from_shared_numbers(loader)
    assert sorted(sample for [sample] in copy.deepcopy(loader.batch_sampler)) == list(range(12))
    assert len(loader) == 12
