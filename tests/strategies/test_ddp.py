"""What is DDP's own; what it does like the other strategies is in test_conformance.py."""

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.cases import make_case
from helpers.mesh_runs import check_parity
from helpers.ranks import RankError, raises_on_all_ranks, run_ranks
from helpers.user_modules import (
    WORLD,
    Batch,
    Regressor,
    assert_same_weights,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
)
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp2 import CheckpointConfig, DDPConfig, DDPManager, DDPStrategy, FSDP2Strategy, create_device_mesh

FLAGS: list[dict[str, Any]] = [
    {"activation_checkpointing": "selective", "static_graph": True},
    {"autocast_dtype": torch.bfloat16},
    *(
        pytest.param({name: value}, marks=pytest.mark.slow)
        for name, value in (
            ("static_graph", True),
            ("gradient_as_bucket_view", True),
            ("bucket_cap_mb", 0.001),
            ("find_unused_parameters", True),
            ("broadcast_buffers", False),
            ("activation_checkpointing", True),
        )
    ),
]


@pytest.mark.guarantees("float32-losses", "float32-gradients")
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_flag_has_the_numbers_of_one_process(flags: dict[str, Any]) -> None:
    def run() -> None:
        for accumulate, tied in ((1, False), (3, True)):
            strategy = {"config": DDPConfig(**flags)}
            options = {"accumulate": accumulate, "clip": 0.1, "tied": tied, "meta": tied}
            check_parity(make_case("llama", **options, strategy_class=DDPStrategy, strategy=strategy))

    run_ranks(run, WORLD)


class SkipsABlock(Regressor):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.blocks[0](inputs)) * self.scale)


def test_parameters_without_a_gradient_are_explained() -> None:
    def fit(**flags: Any) -> None:
        make_trainer(DDPStrategy(DDPConfig(**flags))).fit(SkipsABlock(), make_loader(make_batches(2 * WORLD)))

    with raises_on_all_ranks(RuntimeError, match=r"freeze them, or set DDPConfig\(find_unused_parameters=True\)"):
        run_ranks(fit, WORLD)
    run_ranks(lambda: fit(find_unused_parameters=True), WORLD)


@pytest.mark.guarantees("unused-parameters-under-ddp")
@pytest.mark.parametrize("steps", [1, 2])
def test_a_gradient_that_was_not_reduced_is_an_error_in_its_own_step(steps: int) -> None:
    """Torch notices in the next forward, when each rank has made a step of its own."""

    class SkipsLast(Regressor):
        def forward(self, inputs: Tensor) -> Tensor:
            return (SkipsABlock if self.global_step == steps - 1 else Regressor).forward(self, inputs)

    def run() -> None:
        module = SkipsLast()
        with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            make_trainer(DDPStrategy(), max_steps=steps).fit(module, make_loader(make_batches(2 * WORLD)))
        weight = module.blocks[1].weight.detach()
        assert torch.equal(*run_gather(weight))

    run_ranks(run, WORLD)


def run_gather(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(WORLD)]
    torch.distributed.all_gather(everyone, tensor)
    return everyone


# ---------------------------------------------------------------------- parameters that are frozen and unfrozen


class Alternates(Regressor):
    """Trains blocks and head in turns, as the step itself decides."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.alternate(batch_idx)
        return super().training_step(batch, batch_idx)

    def alternate(self, step: int) -> None:
        self.blocks.requires_grad_(step % 2 == 0)
        self.head.requires_grad_(step % 2 == 1)


@pytest.mark.guarantees("unfrozen-parameters")
def test_parameters_that_steps_freeze_and_unfreeze() -> None:
    batches = make_batches(4 * WORLD)

    def run() -> None:
        module, expected = Alternates(), Alternates()
        strategy = DDPStrategy(DDPConfig(find_unused_parameters=True))
        make_trainer(strategy, max_steps=4).fit(module, make_loader(batches))
        optimizer = make_optimizer(expected.parameters())
        for step in range(4):
            expected.alternate(step)
            optimizer.zero_grad()
            (sum(map(expected.loss, batches[step * WORLD : (step + 1) * WORLD])) / WORLD).backward()
            optimizer.step()
        assert_same_weights(module, expected)

    run_ranks(run, WORLD)


class Unfreezes(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.blocks.requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)


def test_parameters_that_a_step_unfreezes_for_the_first_time_are_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"were unfrozen inside `training_step`.*: blocks.0.bias, "):
            make_trainer(DDPStrategy()).fit(Unfreezes(), make_loader(make_batches(2 * WORLD)))

    run_ranks(run, WORLD)


class Freezes(pl.Callback):
    """Freezes the blocks within a window of accumulation."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.blocks.requires_grad_(batch_idx < 1)


def test_gradients_of_what_is_frozen_within_a_window_are_reduced() -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = Regressor(), Regressor()
        trainer = make_trainer(DDPStrategy(), max_steps=1, accumulate_grad_batches=2, callbacks=[Freezes()])
        trainer.fit(module, make_loader(batches))
        optimizer = make_optimizer(expected.parameters())
        (sum(map(expected.loss, batches[:WORLD])) / WORLD / 2).backward()
        expected.blocks.requires_grad_(False)
        (sum(map(expected.loss, batches[WORLD:])) / WORLD / 2).backward()
        optimizer.step()
        assert_same_weights(module, expected)

    run_ranks(run, WORLD)


def test_a_module_without_anything_to_train() -> None:
    class Frozen(Regressor):
        automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> None:
            self.log("loss", self.loss(batch))

        def configure_optimizers(self) -> None: ...

    def run() -> None:
        module = Frozen()
        module.requires_grad_(False)
        before = {name: parameter.clone() for name, parameter in module.named_parameters()}
        trainer = make_trainer(DDPStrategy(), max_steps=-1, max_epochs=1)
        trainer.fit(module, make_loader(make_batches(2 * WORLD)))
        assert trainer.fit_loop.total_batch_idx == 1  # of two batches on each rank
        assert trainer.callback_metrics["loss"] > 0
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, before[name])

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- manual optimisation


class CallsBackward(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


def test_a_backward_that_lightning_does_not_see_is_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"call `self.manual_backward\(loss\)` instead of `loss.backward\(\)`"):
            make_trainer(DDPStrategy()).fit(CallsBackward(), make_loader(make_batches(2 * WORLD)))

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- buffers


class CountsByRank(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.count += 1 + self.global_rank
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize(("shares", "counts"), [(True, [4.0, 5.0]), (False, [4.0, 8.0])])
def test_buffers_are_those_of_rank_0_or_of_each_rank_however_often_it_is_interrupted(
    shares: bool, counts: list[float], validates: bool
) -> None:
    def run() -> float:
        module, loader = CountsByRank(), make_loader(make_batches(4 * WORLD))
        strategy = DDPStrategy(DDPConfig(broadcast_buffers=shares))
        options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 0}
        trainer = make_trainer(strategy, max_steps=2, limit_val_batches=int(validates), **options)
        trainer.fit(module, loader, loader)
        return module.count.item()

    # behind the last step of training nothing is shared any more, but for a validation there
    assert run_ranks(run, WORLD) == (counts if not (shares and validates) else [4.0, 4.0])


# ---------------------------------------------------------------------- precision


def test_gradients_in_bfloat16_are_summed_in_float32() -> None:
    """Four ranks' ones and 2^-8s: in bfloat16 a sum would lose each of the latter."""

    def run() -> Tensor:
        config = DDPConfig()
        layer = torch.nn.Linear(1, 1, bias=False).bfloat16()
        model = DDPManager(config, create_device_mesh(config, device_type="cpu")).parallelize(layer)
        rank = torch.distributed.get_rank()
        model(torch.tensor([[[256.0, 1.0, 1.0, 1.0][rank]]], dtype=torch.bfloat16)).sum().backward()
        return layer.weight.grad

    assert run_ranks(run, 4)[0].item() == torch.tensor(259 / 4).bfloat16().item()


def test_weights_of_another_precision_are_not_taken_over() -> None:
    def run() -> None:
        loader = make_loader(make_batches(2 * WORLD))
        for first, second in (("bf16-true", "32-true"), ("32-true", "bf16-true"), ("32-true", "bf16-mixed")):
            module = Regressor()
            make_trainer(DDPStrategy(), precision=first, limit_val_batches=0).fit(module, loader)
            with pytest.raises(ValueError, match=r"by an earlier Trainer.* the same precision"):
                make_trainer(DDPStrategy(), precision=second).fit(module, loader)

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- synchronisation


class Counts(pl.Callback):
    """The gradients that differ between the ranks behind each backward: those that were not reduced."""

    def __init__(self) -> None:
        self.reduced: list[bool] = []

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        gradients = module.all_gather(module.head.weight.grad)
        self.reduced.append(torch.equal(gradients[0], gradients[1]))


@pytest.mark.parametrize(("static_graph", "first"), [(False, False), (True, True)])
def test_gradients_are_reduced_once_per_step(static_graph: bool, first: bool) -> None:
    """A static graph needs one more, to begin with."""

    def run() -> None:
        counts = Counts()
        strategy = DDPStrategy(DDPConfig(static_graph=static_graph))
        trainer = make_trainer(strategy, accumulate_grad_batches=3, callbacks=[counts])
        trainer.fit(Regressor(), make_loader(make_batches(6 * WORLD)))
        assert counts.reduced == [first, False, True, False, False, True]

    run_ranks(run, WORLD)


class Frozen(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        assert not isinstance(self.trainer.strategy.model, DistributedDataParallel)


def test_only_training_needs_the_wrapper() -> None:
    def run() -> None:
        loader = make_loader(make_batches(2 * WORLD))
        make_trainer(DDPStrategy()).test(Frozen(), loader, verbose=False)
        module, trainer = Regressor(), make_trainer(DDPStrategy())
        trainer.fit(module, loader)
        assert trainer.strategy.model is module
        with pytest.raises(RuntimeError, match="wrapped in DDP only during a fit"):
            _ = trainer.strategy.replica
        wrappers = [weakref.ref(found) for found in gc.get_objects() if isinstance(found, DistributedDataParallel)]
        gc.collect()
        assert not any(wrapper() for wrapper in wrappers)

    run_ranks(run, WORLD)


class UsesZero(Regressor):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.guarantees("zero-redundancy-optimizer")
@pytest.mark.parametrize("format", ["sharded", "full"])
def test_zero_redundancy_optimizer_goes_on_from_its_checkpoint_and_is_read_by_another(
    format: Any, tmp_path: Path
) -> None:
    batches = make_batches(4 * WORLD)

    def train(module: Regressor, **options: Any) -> pl.Trainer:
        trainer = make_trainer(DDPStrategy(checkpoint=CheckpointConfig(format=format)), **options)
        trainer.fit(module, make_loader(batches), ckpt_path=tmp_path / "x.ckpt" if trainer.max_steps == 4 else None)
        return trainer

    def run() -> None:
        train(Regressor()).save_checkpoint(tmp_path / "x.ckpt")
        expected = Regressor()
        train(expected, max_steps=4)
        trainer = train(UsesZero())
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        (optimizer,) = trainer.optimizers
        assert 0 < len(optimizer.optim.state) < len(optimizer.param_groups[0]["params"]), "nothing was partitioned"
        for module in (UsesZero(), Regressor()):
            train(module, max_steps=4)
            assert_same_weights(module, expected)

    run_ranks(run, WORLD)
    trainer = make_trainer(FSDP2Strategy(), devices=1)
    with pytest.raises(RankError, match="ZeroRedundancyOptimizer cannot step on the sharded parameters"):
        run_ranks(lambda: trainer.fit(UsesZero(), make_loader(batches)), 1)
