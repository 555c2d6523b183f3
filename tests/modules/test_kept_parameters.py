"""Parameters that are kept in dicts, lists, partials and closures are those of the module after sharding."""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.model_kinds import parallelize
from helpers.ranks import raises_on_all_ranks, run_ranks
from torch import Tensor, nn

from lightning_fsdp2.modules.kept_parameters import find_kept_parameters
from lightning_fsdp2.ranks.whole_tensors import gather


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def make_closure(weight: Tensor) -> Callable[[], Tensor]:
    return lambda: weight


PLACES: dict[str, tuple[Callable[[nn.Parameter], Any], Callable[[Any], Any]]] = {
    "dict value": (lambda p: {"weight": p}, lambda kept: kept["weight"]),
    "dict key": (lambda p: {"first": 0, p: 1, "last": 2}, lambda kept: [*kept][1]),
    "list": (lambda p: [None, p], lambda kept: kept[1]),
    "set": (lambda p: {p, "other"}, lambda kept: next(iter(kept - {"other"}))),
    "tuple": (lambda p: (1, p), lambda kept: kept[1]),
    "tuple in a dict": (lambda p: {"pairs": [("weight", p)]}, lambda kept: kept["pairs"][0][1]),
    "partial": (lambda p: functools.partial(F.linear, weight=p), lambda kept: kept.keywords["weight"]),
    "argument of a partial": (lambda p: functools.partial(F.linear, p), lambda kept: kept.args[0]),
    "closure": (make_closure, lambda kept: kept()),
    "object": (lambda p: SimpleNamespace(weight=p), lambda kept: kept.weight),
    "slot": (Slotted, lambda kept: kept.weight),
    "id": (lambda p: {id(p), 1}, lambda kept: kept),
    "ids as keys": (lambda p: {id(p): "weight"}, lambda kept: set(kept)),
}


class Keeping(nn.Module):
    def __init__(self, keep: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.kept = keep(self.layers[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.guarantees("kept-parameters")
def test_parameters_kept_elsewhere_are_replaced_with_those_of_the_module() -> None:
    def run() -> None:
        for name, (keep, read) in PLACES.items():
            model = parallelize(Keeping(keep))
            weight, found = model.layers[0].weight, read(model.kept)
            assert (id(weight) in found) if isinstance(found, set) else found is weight, name

    run_ranks(run, 2)


@pytest.mark.guarantees("kept-parameters")
@pytest.mark.parametrize("keep", [lambda p: frozenset([id(p)]), lambda p: frozenset([p])])
def test_places_that_cannot_change_are_named(keep: Callable[[nn.Parameter], Any]) -> None:
    with raises_on_all_ranks(ValueError, r"frozenset.*layers\.0\.weight"):
        run_ranks(lambda: parallelize(Keeping(keep)), 2)


def test_a_penalty_on_kept_parameters_has_the_gradients_of_one_process() -> None:
    class Penalised(Keeping):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(lambda p: None)
            self.kept = dict(self.named_parameters())

        def penalty(self) -> Tensor:
            return sum(p.square().sum() for p in self.kept.values())

    def train(model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss, penalty = model(torch.ones(2, 4)).square().mean(), model.penalty()
            (loss + 0.1 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run() -> None:
        alone, model = Penalised(), parallelize(Penalised())
        train(alone)
        train(model)
        for own, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(gather(own.detach()), other.detach())

    run_ranks(run, 2)


def test_a_thousand_parameters_take_little_time() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(500))
    start = time.perf_counter()
    assert not find_kept_parameters(model)
    nothing = time.perf_counter() - start
    kept = [dict(model.named_parameters()), list(model.parameters())]
    start = time.perf_counter()
    assert len(find_kept_parameters(model)) == len(kept) * 1000
    assert nothing < 2
    assert time.perf_counter() - start < 5
