"""Blocks that choose the inputs of backwards."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_fsdp2.compat.gradients import replace_backward_inputs


def test_blocks_that_choose_inputs_may_end_in_any_order() -> None:
    original = torch.autograd._engine_run_backward
    seen: list[str] = []

    def choose(name: str, inputs: Any, accumulates: bool) -> Any:
        seen.append(name)
        return inputs

    def run_backward() -> list[str]:
        seen.clear()
        weight = torch.ones(2, requires_grad=True)
        assert torch.autograd.grad(weight.sum(), weight)[0].tolist() == [1, 1]
        weight.sum().backward()  # to no named inputs
        return list(seen)

    first, second, third = (replace_backward_inputs(partial(choose, name)) for name in "abc")
    first.__enter__()
    second.__enter__()
    assert sorted(run_backward()) == ["a", "b"]
    first.__exit__(None, None, None)
    assert run_backward() == ["b"]
    third.__enter__()
    second.__exit__(None, None, None)
    assert run_backward() == ["c"]
    third.__exit__(None, None, None)
    assert run_backward() == []
    assert torch.autograd._engine_run_backward is original


def test_a_block_leaves_what_another_library_has_replaced_since(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def wrap(run: Any) -> Any:
        return lambda *args, **options: (calls.append("theirs"), run(*args, **options))[1]

    def choose(inputs: Any, accumulates: bool) -> Any:
        calls.append("ours")
        return inputs

    def run_backward() -> list[str]:
        calls.clear()
        weight = torch.ones(2, requires_grad=True)
        torch.autograd.grad(weight.sum(), weight)
        return list(calls)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    with replace_backward_inputs(choose):
        torch.autograd._engine_run_backward = wrap(torch.autograd._engine_run_backward)
        assert run_backward() == ["theirs", "ours"]
    assert run_backward() == ["theirs"]
    with replace_backward_inputs(choose):
        assert run_backward() == ["ours", "theirs"]
    assert run_backward() == ["theirs"]
