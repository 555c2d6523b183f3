"""Code of users that sees gradients in the middle of things: hooks on parameters and after a backward, ``inputs=``."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import raises_on_all_ranks, run_ranks
from helpers.user_modules import Batch, Regressor, assert_same_weights, make_batches, make_loader, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import DDPStrategy, FSDP2Config, FSDP2Strategy

ACCUMULATE, STEPS = 2, 2


def scale_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.7)


def step_at_once(parameter: Tensor) -> None:
    parameter.add_(parameter.grad, alpha=-0.05)
    parameter.grad = None


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.02, 0.02)


def normalize(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 0.1)


def halve_in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


class Hooked(Regressor):
    """Registers hooks of every kind at ``place``. None of them commutes with adding up ranks or micro-batches."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.calls = place, 0
        self.handles: list[Any] = []

    def register(self, place: str) -> None:
        if place != self.place:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = [
            self.blocks[0].weight.register_hook(clamp),
            self.blocks[0].weight.register_hook(self.count),
            self.blocks[1].weight.register_hook(normalize),
            self.blocks[1].weight.register_hook(halve_in_place),
            self.blocks[2].weight.register_post_accumulate_grad_hook(scale_gradient),
            self.blocks[2].bias.register_post_accumulate_grad_hook(step_at_once),
            self.head.weight.register_post_accumulate_grad_hook(scale_gradient),
            self.head.weight.register_hook(clamp),
        ]
        if place != "training_step":  # a step has gathered what the LightningModule holds itself
            self.handles.append(self.scale.register_hook(clamp))

    def count(self, gradient: Tensor) -> None:
        self.calls += 1

    def configure_optimizers(self) -> Any:
        self.register("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.register("on_fit_start")

    def on_train_start(self) -> None:
        self.register("on_train_start")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.register("on_train_batch_start")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.register("training_step")
        return super().training_step(batch, batch_idx)


def train_by_hand(
    module: Any, readers: int, *, after_backward: Callable[[], None] = lambda: None, backward: Any = Tensor.backward
) -> None:
    """The oracle: a loop over the batches of ``readers`` data ranks in one process."""
    optimizer = module.configure_optimizers()
    if isinstance(module, Hooked):
        module.on_fit_start()
        module.on_train_start()
    batches = iter(make_batches(readers * ACCUMULATE * STEPS))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for index in range(ACCUMULATE):
            own = [next(batches) for _ in range(readers)]
            whole = {name: torch.cat([batch[name] for batch in own]) for name in own[0]}
            if isinstance(module, Hooked):
                module.on_train_batch_start(whole, index)
            backward(module.training_step(whole, index) / ACCUMULATE)
            after_backward()
        optimizer.step()


def fit(module: pl.LightningModule, strategy: Any, readers: int, **options: Any) -> pl.Trainer:
    trainer = make_trainer(strategy, **{"accumulate_grad_batches": ACCUMULATE, "max_steps": STEPS, **options})
    batches = make_batches(readers * ACCUMULATE * STEPS)
    first = dist.get_rank() * readers // dist.get_world_size()
    trainer.fit(module, DataLoader(batches[first::readers], batch_size=None))
    return trainer


TENSOR_PARALLEL = FSDP2Config(tp_plan={"blocks.*": "colwise_gather_output"})

MESHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2": (2, 2, {}),
    "dp2, reduced": (2, 2, {"config": FSDP2Config(defer_fsdp_grad_sync=False)}),
    "dp2, gathered": (2, 2, {"config": FSDP2Config(reshard_after_forward=False)}),
    "hsdp2x1": (2, 2, {"dp_replicate_size": 2}),
    "tp2": (2, 1, {"tp_size": 2, "config": TENSOR_PARALLEL}),
    "hsdp2x2": (4, 4, {"dp_replicate_size": 2}),
    "dp2, tp2": (4, 2, {"tp_size": 2, "config": TENSOR_PARALLEL}),
}
"""Ranks, ranks that read their own batches, and options of the strategy."""

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        ("dp2", "configure_optimizers"),
        ("hsdp2x1", "on_fit_start"),
        ("tp2", "on_train_start"),
        pytest.param("dp2", "on_train_batch_start", marks=slow),
        ("dp2", "training_step"),
        pytest.param("dp2, reduced", "on_train_start", marks=slow),
        pytest.param("dp2, gathered", "on_train_batch_start", marks=slow),
        pytest.param("hsdp2x2", "configure_optimizers", marks=slow),
        pytest.param("dp2, tp2", "training_step", marks=slow),
    ],
)
def test_hooks_on_sharded_parameters_see_the_gradient_of_the_micro_batch_on_all_ranks(mesh: str, place: str) -> None:
    world, readers, options = MESHES[mesh]
    expected = Hooked(place)
    train_by_hand(expected, readers)

    def run() -> None:
        module = Hooked(place)
        fit(module, FSDP2Strategy(**options), readers)
        assert module.calls == expected.calls == ACCUMULATE * STEPS
        assert_same_weights(module, expected)

    run_ranks(run, world)
