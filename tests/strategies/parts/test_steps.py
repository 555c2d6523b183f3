"""What surrounds an optimizer step, without a Trainer."""

import gc
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from torch import nn

from lightning_fsdp2 import token_mean_loss
from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.parallel.loss.token_mean import find_token_windows
from lightning_fsdp2.strategies.parts.steps import Steps, use_own_zero_grad
from lightning_fsdp2.strategies.parts.world import World


def make_steps() -> Steps:
    return Steps(World(timeout=timedelta(seconds=1), rendezvous_timeout=timedelta(seconds=1)))


def complete(closure: Any, log: list[str], *, is_manual: bool) -> Any:
    module = cast(Any, SimpleNamespace(automatic_optimization=not is_manual))
    return make_steps().complete_closure(module, closure, lambda: log.append("finish"), lambda: log.append("copied"))


@pytest.mark.parametrize(("is_manual", "expected"), [(False, ["loss", "copied"]), (True, ["loss", "finish", "copied"])])
def test_gradients_are_finished_and_copies_made_between_backward_and_step(is_manual: bool, expected: list[str]) -> None:
    log: list[str] = []
    closure = complete(lambda: log.append("loss") or "output", log, is_manual=is_manual)
    assert log == []
    assert (closure(), log) == ("output", expected)


def test_gradients_of_a_step_without_a_closure_are_finished_before_it() -> None:
    log: list[str] = []
    closure = complete(do_nothing_closure, log, is_manual=True)
    assert log == ["finish"]  # at once, since not every optimizer calls its closure
    closure()
    assert log == ["finish", "copied"]


def test_a_stage_begins_without_the_tokens_of_an_aborted_one() -> None:
    head = nn.Linear(2, 5)
    module = nn.Sequential(head)
    token_mean_loss(head, module(torch.ones(1, 3, 2)), torch.ones(1, 3, dtype=torch.long))
    assert find_token_windows(module).keys() == {"0"}
    make_steps().begin_stage(cast(Any, module))
    assert find_token_windows(module) == {}


def test_a_stage_does_not_keep_the_optimizers_of_an_earlier_one() -> None:
    """Their states may take most of the memory."""
    steps, module = make_steps(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    steps.check_states(cast(Any, module), optimizer)
    known = weakref.ref(optimizer)
    del optimizer
    steps.begin_stage(cast(Any, module))
    gc.collect()
    assert known() is None


def test_lightnings_optimizer_clears_gradients_as_the_strategy_does() -> None:
    optimizer, log = torch.optim.SGD(nn.Linear(2, 2).parameters()), []
    optimizer.zero_grad = lambda set_to_none=True: log.append(set_to_none)  # type: ignore[method-assign]
    wrapper, trainer = LightningOptimizer(optimizer), cast(Any, SimpleNamespace())
    use_own_zero_grad(trainer, optimizer, wrapper)
    wrapper.zero_grad()
    assert log == [True]
    get_ledger(trainer).put_back_all()
    wrapper.zero_grad()
    assert log == [True]


def test_accumulation_ends_with_an_error_too() -> None:
    def fail(steps: Steps) -> None:
        with steps.accumulating():
            assert steps.is_accumulating
            raise KeyError

    steps = make_steps()
    with pytest.raises(KeyError):
        fail(steps)
    assert not steps.is_accumulating
