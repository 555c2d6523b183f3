"""Which calls of a module wait for the other ranks, tested in one process."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from lightning_fsdp2.strategies.parts import step_region
from lightning_fsdp2.strategies.parts.step_region import StepRegion


class Model(nn.Module):
    """A model with layers, which its forward calls, and a head that may be called alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(self.norm(inputs))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What waits for the other ranks, and what comes after a call."""
    calls: list[str] = []

    def wait(purpose: str, timeout: timedelta, remedy: str) -> None:
        assert timeout == timedelta(seconds=3)
        assert remedy.startswith("Its forward is a collective. Call it on all ranks, or wait. If a rank has minutes of")
        calls.append(purpose)

    monkeypatch.setattr(step_region, "wait_for_all_ranks", wait)
    return calls


def make(calls: list[str], root: Model) -> StepRegion:
    """Build a step region in which all modules but the norm hold units."""
    return StepRegion(
        timedelta(seconds=3),
        holds_units=lambda module: not isinstance(module, nn.LayerNorm),
        after_forward=lambda module: calls.append("after the root" if module is root else "after another module"),
        alternative=", or wait",
    )


def call(name: str) -> list[str]:
    return [f"call {name}, which is sharded, outside of a step", "after the root"]


def test_a_call_on_one_rank_is_an_error_after_a_minute() -> None:
    assert timedelta(minutes=1) >= step_region.OUTSIDE_CALL_TIMEOUT


def test_calls_outside_of_a_step_wait_once(calls: list[str]) -> None:
    root, inputs = Model(), torch.ones(1, 2)
    region = make(calls, root)
    region.watch(root)
    region.watch(root)  # by another Trainer
    root(inputs)
    assert calls == call("the LightningModule")
    root.head(inputs)
    assert calls[2:] == call("head")
    for module in (root.norm, *root.layers):  # without units, or called by the model alone
        module(inputs)
    with region(), region():
        root(inputs)
    assert len(calls) == 4


def test_a_call_that_fails_leaves_nothing_behind(calls: list[str]) -> None:
    root, inputs = Model(), torch.ones(1, 2)
    region = make(calls, root)
    region.watch(root)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            root(torch.ones(1, 3))
    assert calls == call("the LightningModule") * 2
    with pytest.raises(RuntimeError, match="shapes"), region():
        root(torch.ones(1, 3))
    assert len(calls) == 4
    root(inputs)
    assert calls[4:] == call("the LightningModule")
