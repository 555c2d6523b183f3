"""The schedule of the recipes: its values, and what a resumed run makes of it."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import LLAMA
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_fsdp2 import CausalLM, TextDataModule
from lightning_fsdp2.schedulers import WarmupCosine


def make(**arguments: Any) -> tuple[torch.optim.Optimizer, WarmupCosine]:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[1].parameters(), "lr": 10.0}]
    optimizer = torch.optim.AdamW(groups)
    return optimizer, WarmupCosine(optimizer, **arguments)


def run(optimizer: torch.optim.Optimizer, scheduler: WarmupCosine, steps: int) -> list[float]:
    """The learning rates of the first group in the next steps."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[1]["lr"] == pytest.approx(10 * rates[-1])
        optimizer.step()
        scheduler.step()
    return rates


def test_linear_up_cosine_down_and_then_the_lowest() -> None:
    rates = run(*make(warmup_steps=4, total_steps=12, min_ratio=0.1), 15)
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates[4:12] == pytest.approx(cosine)
    assert rates[12:] == pytest.approx([0.1] * 3)
    assert run(*make(warmup_steps=0, total_steps=2, min_ratio=0.0), 3) == pytest.approx([1.0, 0.5, 0.0])


def test_a_resumed_run_goes_on_at_its_step_on_the_curve_of_its_own_arguments() -> None:
    optimizer, scheduler = make(warmup_steps=4, total_steps=12)
    run(optimizer, scheduler, 6)
    for total_steps in (12, 20):
        expected = run(*make(warmup_steps=4, total_steps=total_steps), 10)[7:]
        resumed_optimizer, resumed = make(warmup_steps=4, total_steps=total_steps)
        resumed_optimizer.load_state_dict(optimizer.state_dict())
        resumed.load_state_dict(scheduler.state_dict())
        assert run(resumed_optimizer, resumed, 4)[1:] == pytest.approx(expected)


def test_without_total_steps_it_ends_with_the_run() -> None:
    optimizer, scheduler = make(warmup_steps=4)
    scheduler.fit_to_run(12)
    assert run(optimizer, scheduler, 15) == run(*make(warmup_steps=4, total_steps=12), 15)
    resumed_optimizer, resumed = make(warmup_steps=4)
    resumed.fit_to_run(30)  # a longer run
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    expected = run(*make(warmup_steps=4, total_steps=30), 20)
    assert run(resumed_optimizer, resumed, 4)[1:] == pytest.approx(expected[16:19])
    short = make(warmup_steps=4)
    short[1].fit_to_run(2)
    assert run(*short, 2) == [0.25, 0.5]  # a dry run


class _Rates(pl.Callback):
    """The learning rate of every step."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.rates[trainer.global_step] = optimizer.param_groups[0]["lr"]


def fit(folder: Path, ckpt_path: Path | None = None, *callbacks: pl.Callback, **options: Any) -> dict[int, float]:
    """Train on 24 sequences, 4 of a step; return the learning rates."""

    def make_scheduler(optimizer: torch.optim.Optimizer) -> WarmupCosine:
        return WarmupCosine(optimizer, warmup_steps=3)

    (folder / "text.txt").write_text("a" * (24 * 8 - 1))
    sizes = {"sequence_length": 8, "batch_size": 2, "global_batch_size": 4}
    data = TextDataModule(path=str(folder / "text.txt"), validation_fraction=0.0, **sizes)
    module = CausalLM(config={**LLAMA, "vocab_size": 257}, lr_scheduler=make_scheduler)
    rates, checkpoints = _Rates(), ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(enable_checkpointing=True, callbacks=[*callbacks, rates, checkpoints], **options)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return rates.rates


class _Told(torch.optim.lr_scheduler.ConstantLR):
    """A schedule of the user that must know how long the run is."""

    steps = 0

    def fit_to_run(self, steps: int) -> None:
        self.steps = steps


def test_any_schedule_is_told_the_length_of_the_run() -> None:
    def run_one() -> int:
        data = [{"input_ids": torch.zeros(1, 4, dtype=torch.long)}] * 3
        trainer = make_trainer(max_epochs=2)
        trainer.fit(CausalLM(config=LLAMA, lr_scheduler=_Told), torch.utils.data.DataLoader(data, batch_size=None))
        return trainer.lr_scheduler_configs[0].scheduler.steps

    assert run_ranks(run_one, 1, group=False) == [6]


def test_causal_lm_ends_it_where_the_trainer_ends(tmp_path: Path) -> None:
    def run_all() -> list[dict[int, float]]:
        checkpoint = tmp_path / "step=4.ckpt"  # amid the first epoch of 6 steps
        whole = fit(tmp_path, max_epochs=2)
        return [whole, fit(tmp_path, checkpoint, max_epochs=2), fit(tmp_path, checkpoint, max_steps=9)]

    whole, resumed, shorter = run_ranks(run_all, 1, group=False)[0]
    expected = run(*make(warmup_steps=3, total_steps=12), 12)
    assert [whole[step] for step in range(12)] == pytest.approx([3e-4 * rate for rate in expected])
    assert resumed == {step: pytest.approx(whole[step]) for step in range(4, 12)}
    expected = run(*make(warmup_steps=3, total_steps=9), 9)
    assert shorter[8] == pytest.approx(3e-4 * expected[8])


class _LowerRate(pl.Callback):
    """The remedy that the warning of other options names."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
        scheduler.base_lrs = [1e-4] * len(scheduler.base_lrs)


def test_a_callback_lowers_the_rate_of_a_resumed_run(tmp_path: Path) -> None:
    def run_all() -> dict[int, float]:
        fit(tmp_path, max_steps=8)
        return fit(tmp_path, tmp_path / "step=4.ckpt", _LowerRate(), max_steps=8)

    resumed = run_ranks(run_all, 1, group=False)[0]
    expected = run(*make(warmup_steps=3, total_steps=8), 8)
    assert {step: resumed[step] for step in range(5, 8)} == {
        step: pytest.approx(1e-4 * expected[step]) for step in range(5, 8)
    }


def test_a_run_of_unknown_length_is_refused_and_another_one_than_given_warns() -> None:
    for steps in (math.inf, -1):
        with pytest.raises(ValueError, match="Set max_steps of the Trainer, or total_steps of WarmupCosine"):
            make(warmup_steps=4)[1].fit_to_run(steps)
        make(warmup_steps=4, total_steps=12)[1].fit_to_run(steps)
    with pytest.raises(ValueError, match="does not know how many steps the run has"):
        run(*make(warmup_steps=1), 2)
    _, scheduler = make(warmup_steps=4, total_steps=12)
    scheduler.fit_to_run(12)
    with pytest.warns(UserWarning, match=r"total_steps=12\) ends before the run, which has 20 steps; leave"):
        scheduler.fit_to_run(20)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"warmup_steps": 10, "total_steps": 10},
            r"warmup_steps=10, total_steps=10\): warmup_steps must be at least 0",
        ),
        ({"warmup_steps": -1, "total_steps": 10}, "use fewer warmup_steps or more total_steps"),
        ({"warmup_steps": 1, "total_steps": 10, "min_ratio": 2.0}, "min_ratio=2.0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make(**arguments)
