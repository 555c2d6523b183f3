"""The schedule of the recipes: its values, and what a resumed run makes of it."""

import math
from typing import Any

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"warmup_steps": 10, "total_steps": 10},
            r"warmup_steps=10, total_steps=10\): the warm-up, of 0 steps or more",
        ),
        ({"warmup_steps": -1, "total_steps": 10}, "use fewer warmup_steps or more total_steps"),
        ({"warmup_steps": 1, "total_steps": 10, "min_ratio": 2.0}, "min_ratio=2.0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make(**arguments)
