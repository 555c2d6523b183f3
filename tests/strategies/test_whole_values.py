"""Hooks, optimizers and loggers of a user read the values of one process from sharded gradients and weights."""

import csv
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.families import make_family_model
from helpers.models import make_token_batches
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.user_modules import Batch, Regressor, WithModel, make_batches, make_trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fsdp2 import FSDP2Strategy

NAN_STEP = 2


class Lars(Optimizer):
    """The optimizer as it is written for one process: its rates are numbers of Python."""

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = float(parameter.norm()) / (float(parameter.grad.norm()) + 1e-8)
                    parameter.add_(parameter.grad, alpha=-group["lr"] * 0.02 * rate)
        return loss


class Reads(Regressor):
    """Reads its gradients as one does in one process, skips a step with a NaN, and draws noise and new weights."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def on_train_start(self) -> None:
        self.reset()

    def reset(self) -> None:
        torch.manual_seed(5)
        self.blocks[0].reset_parameters()
        nn.init.orthogonal_(self.blocks[1].weight)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.read.append([(g.norm().item(), float(g.sum()), g.max().item(), int((g > 0).sum())) for g in gradients])
        self.read.append(f"{gradients[0].norm():.3f}")
        self.read.append(math.sqrt(sum(g.norm(2).item() ** 2 for g in gradients)))
        if self.trainer.global_step == NAN_STEP:
            self.blocks[2].weight.grad.mul_(torch.where(self.blocks[2].weight.detach().abs() > 0.3, math.nan, 1.0))
        bad = any(bool(torch.isnan(g).any()) for g in gradients)
        self.read.append(bad)
        for gradient in gradients:
            gradient.add_(torch.randn_like(gradient), alpha=0.01)
            if bad:
                gradient.zero_()
        for logger in self.trainer.loggers:
            logger.log_metrics({"norm": gradients[0].norm()}, step=self.trainer.global_step)


def fit(sizes: dict[str, int] | None, folder: Path) -> tuple[list[Any], list[float], dict[str, Tensor]]:
    """Train on the ranks of ``sizes``, or alone. Every rank reads the same batches, so that one process sees them too.

    Returns:
        What the module read, what the logger wrote, and the weights.
    """
    module = Reads()
    module.make_optimizer = Lars  # type: ignore[method-assign]
    logger = CSVLogger(folder, "", "")
    trainer = make_trainer("auto" if sizes is None else FSDP2Strategy(**sizes), max_steps=4, logger=logger)
    trainer.fit(module, DataLoader(make_batches(4), batch_size=None))
    path = folder / "metrics.csv"
    logged = [float(row["norm"]) for row in csv.DictReader(path.open())] if torch.distributed.get_rank() == 0 else []
    return module.read, logged, whole(dict(module.named_parameters()))


def check(sizes: dict[str, int], folder: Path) -> None:
    read, logged, weights = fit(sizes, folder / "mesh")
    expected_read, expected_logged, expected_weights = fit(None, folder / f"alone{torch.distributed.get_rank()}")
    for own, expected in zip(flatten(read), flatten(expected_read), strict=True):
        assert own == (expected if isinstance(expected, str | bool) else pytest.approx(expected, rel=1e-4, abs=1e-6))
    if logged:
        assert logged == pytest.approx(expected_logged, rel=1e-4)
    torch.testing.assert_close(weights, expected_weights)


def flatten(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from flatten(value)
    else:
        yield values


@pytest.mark.guarantees("whole-values", "whole-random-values")
def test_hooks_optimizers_and_loggers_read_whole_values_and_draw_whole_numbers(tmp_path: Path) -> None:
    run_ranks(check, 2, {}, tmp_path, group=False)


@pytest.mark.slow
def test_they_do_so_under_hybrid_sharding(tmp_path: Path) -> None:
    run_ranks(check, 4, {"dp_replicate_size": 2}, tmp_path, group=False)


class ReadsModel(WithModel):
    """Reads every gradient of a language model in a hook."""

    def __init__(self, family: str) -> None:
        super().__init__(partial(make_seeded_model, family))
        self.read: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            self.read += [float(parameter.grad.norm()), parameter.grad.abs().max().item(), parameter.sum().item()]
        self.read.append(sum(parameter.grad.norm().item() ** 2 for parameter in self.parameters()) ** 0.5)


def make_seeded_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return make_family_model(family)


def check_model(sizes: dict[str, int], family: str) -> None:
    results = []
    for strategy in (FSDP2Strategy(**sizes), "auto"):
        module = ReadsModel(family)
        batches = make_token_batches(2, ragged=False)
        make_trainer(strategy, max_steps=2).fit(module, DataLoader(batches, batch_size=None))
        results.append(module.read)
    assert len(results[0]) > 2
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "family"),
    [({"tp_size": 2}, "llama"), ({"ep_size": 2}, "qwen3_moe"), ({"dp_replicate_size": 2, "tp_size": 2}, "llama")],
)
def test_gradients_of_tensor_and_expert_parallel_weights_are_read_whole(sizes: dict[str, int], family: str) -> None:
    run_ranks(check_model, 4, sizes, family, group=False)


def add_in_place(loss: Tensor, penalty: Tensor) -> Tensor:
    loss += penalty
    return loss


class Penalised(Regressor):
    """Combines its loss with a penalty on sharded weights by something other than arithmetic."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.combine = combine

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.combine(super().training_step(batch, batch_idx), self.blocks[0].weight.square().sum())


def test_a_penalty_whose_gradient_would_be_a_dtensor_names_the_remedy() -> None:
    combinations: list[Callable[[Tensor, Tensor], Tensor]] = [
        add_in_place,
        torch.maximum,
        lambda loss, penalty: torch.stack([loss, penalty]).sum(),
    ]

    def run() -> None:
        for combine in combinations:
            with pytest.raises(
                (RuntimeError, AssertionError), match=r"loss \+ 0.1 \* penalty.*penalty\.full_tensor\(\)"
            ):
                make_trainer().fit(Penalised(combine), DataLoader(make_batches(2), batch_size=None))

    run_ranks(run, 2, group=False)


class Anchored(Regressor):
    """Pulls a weight to zero with a loss of torch, which is a mean over its elements."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.blocks[0].weight
        return super().training_step(batch, batch_idx) + F.mse_loss(weight, torch.zeros_like(weight))


def _check_anchor() -> None:
    weights = []
    for strategy in (FSDP2Strategy(), "auto"):
        torch.manual_seed(0)
        module = Anchored()
        module.make_optimizer = partial(torch.optim.SGD, lr=0.1)  # type: ignore[method-assign]
        make_trainer(strategy, max_steps=1).fit(module, DataLoader(make_batches(1), batch_size=None))
        weights.append(whole(dict(module.named_parameters())))
    torch.testing.assert_close(*weights)


def test_a_loss_on_weights_has_the_gradient_of_one_process() -> None:
    run_ranks(_check_anchor, 2, group=False)
