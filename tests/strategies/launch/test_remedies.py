"""Advice is given for the errors that need it, and for no others."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from helpers.user_modules import QUIET
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.utilities import grad_norm

from lightning_fsdp2.strategies.launch import remedies
from lightning_fsdp2.strategies.launch.remedies import add_remedy, get_optional_remedy, is_raised_in

VIEW = "Output 0 of _ToTorchTensor is a view and its base or another view of its base has been modified inplace."
FREED = "setStorage: sizes [8], strides [1], and itemsize 4 are out of bounds for storage of size {}"


def catch(function: Callable[[], None]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error")


def fail_in_grad_norm() -> None:
    grad_norm(None, 2)  # type: ignore[arg-type]


MIXED = "aten.add_.Tensor got mixed torch.Tensor and DTensor"


def call_in_hook(fail: Callable[[], None]) -> None:
    """Call ``fail`` as Lightning calls a hook of a module."""
    module = pl.LightningModule()
    module.on_before_zero_grad = lambda _: fail()  # type: ignore[method-assign]
    _call_lightning_module_hook(pl.Trainer(**QUIET, accelerator="cpu"), "on_before_zero_grad", None, pl_module=module)


def fail_in_hook_of_step() -> None:
    """Raise in a hook that the closure of an optimizer's step calls."""

    def closure() -> float:
        call_in_hook(raise_mixed)
        return 0.0

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1).step(closure)


def raise_mixed() -> None:
    raise RuntimeError(MIXED)


class FailingStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise_mixed()


class FailingForward(torch.nn.Module):
    def forward(self) -> None:
        raise_mixed()


def fail_in_step() -> None:
    FailingStep(torch.nn.Linear(1, 1).parameters()).step()


def fail_in_hook_of_backward() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: raise_mixed())
    weight.sum().backward()


def fail_in_loss() -> None:
    def nll_loss(*args: Any, **options: Any) -> None:
        raise_mixed()

    with patch.object(torch._C._nn, "cross_entropy_loss", nll_loss):
        torch.nn.functional.cross_entropy(torch.zeros(1, 2), torch.zeros(1).long())


def fail_in_loss_of_part() -> None:
    torch.nn.functional.cross_entropy(torch.zeros(3, 2), torch.zeros(4).long())


def fail_to_clip() -> None:
    def stack(*args: Any) -> None:
        raise RuntimeError("All operands in aten.stack.default must have the same mesh, but got ...")

    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    with patch.object(torch, "stack", stack):
        torch.nn.utils.clip_grad_norm_([weight], 1.0)


@pytest.mark.parametrize(
    ("fail", "remedy"),
    [
        (fail_in_hook_of_step, r"In hooks, make other tensors .*randn_like\(p\.grad\)"),
        (fail_in_step, r"The step of FailingStep mixes"),
        (FailingForward(), r"unshard_fsdp2_model"),
        (lambda: call_in_hook(FailingForward()), r"unshard_fsdp2_model"),
        (fail_in_hook_of_backward, r"unshard_fsdp2_model"),
        (fail_in_loss, r"loss_parallel=False"),
        (fail_to_clip, r"lightning_fsdp2\.clip_grad_norm_"),
    ],
)
def test_the_remedy_goes_by_the_code_that_raised_the_error(fail: Callable[[], None], remedy: str) -> None:
    assert re.search(remedy, str(get_optional_remedy(catch(fail), [])))


def test_a_loss_of_a_part_of_the_sequence_has_a_remedy_under_context_parallelism_only() -> None:
    error = catch(fail_in_loss_of_part)
    assert get_optional_remedy(error, []) is None
    assert "labels" in str(get_optional_remedy(error, [], context_parallel=True))
    assert get_optional_remedy(ValueError(str(error)), [], context_parallel=True) is None


@pytest.mark.parametrize(
    ("exception", "hosts", "remedy"),
    [
        (RuntimeError("aten.mm.default: got mixed torch.Tensor and DTensor"), [], "unshard_fsdp2_model"),
        (RuntimeError(VIEW), [], "Under tensor parallelism"),
        (RuntimeError(FREED.format(0)), [], "no second-order gradients"),
        (RuntimeError(FREED.format(16)), [], None),
        (RuntimeError("the storage of size 0 is empty"), [], None),
        (RuntimeError("Connection closed by peer [10.0.0.1]:3"), ["a", "b"], "no longer answers. Only b of 2 does."),
        (RuntimeError("Timed out waiting 1800000ms"), ["a", "b"], "Another rank has ended"),
        (RuntimeError("Connection closed by peer [10.0.0.1]:3"), ["a"], None),
        (ValueError("Connection closed by peer [10.0.0.1]:3"), ["a", "b"], None),
        (catch(fail_in_grad_norm), [], "callbacks.GradientNorm"),
        (RuntimeError("can't start new thread"), [], "ulimit -u"),
        (AttributeError("'NoneType' object has no attribute 'named_parameters'"), ["a", "b"], None),
    ],
)
def test_errors_and_their_remedies(
    exception: BaseException, hosts: list[str], remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "say_who_answers", lambda hosts: f"Only b of {len(hosts)} does.")
    message = str(exception)
    found = get_optional_remedy(exception, hosts)
    add_remedy(exception, hosts)
    if remedy is None:
        assert found is None
        assert str(exception) == message
    else:
        assert remedy in found
        assert str(exception) == f"{message}\n{found}"


def training_step(message: str) -> None:
    raise RuntimeError(message)


def validation_step(message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("step", "message", "own", "names"),
    [
        (training_step, "Timed out waiting 15000ms for recv operation to complete", True, True),
        (training_step, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True, True),
        (training_step, "Timed out waiting 15000ms for recv operation to complete", False, False),
        (training_step, "Connection closed by peer [10.0.0.1]:3", True, False),
        (validation_step, "Timed out waiting 15000ms for recv operation to complete", True, False),
    ],
)
def test_a_collective_that_times_out_in_training_names_the_random_numbers(
    step: Callable[[str], None], message: str, own: bool, names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "say_who_answers", lambda hosts: "All do.")
    error = catch(partial(step, message))
    add_remedy(error, ["a", "b"], own_random_numbers=own)
    assert "no longer answers. All do." in str(error)
    assert ('random_numbers="shared"' in str(error)) is names


def test_an_error_comes_from_the_function_that_raises_it() -> None:
    def fail() -> None:
        raise KeyError

    def call() -> None:
        fail()

    error = catch(call)
    assert is_raised_in(fail.__code__, error)
    assert not is_raised_in(call.__code__, error)
    assert not is_raised_in(fail.__code__, KeyError())
