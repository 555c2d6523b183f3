"""Parameters that are kept in dicts, lists, partials and closures are those of the module after sharding."""

import functools
import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from helpers.model_kinds import parallelize
from helpers.models import GPT2, make_causal_lm
from helpers.ranks import raises_on_all_ranks, run_ranks
from torch import Tensor, nn

from lightning_fsdp2 import DDPConfig, DDPManager, FSDP2Config, FSDP2Manager, create_device_mesh
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
    "ids in a list": (lambda p: [*map(id, [p])], lambda kept: set(kept)),
    "ids as values": (lambda p: {"weight": id(p)}, lambda kept: set(kept.values())),
}


class Pair(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter


TWO_PLACES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda *two: two, list),
    "named tuple": (Pair, list),
    "tuple in a tuple": (lambda p, q: ((p,), (1, (q,))), lambda kept: [kept[0][0], kept[1][1][0]]),
    "pairs": (lambda *two: [two], lambda kept: [*kept[0]]),
    "arguments of a partial": (functools.partial(functools.partial, print), lambda kept: [*kept.args]),
    "defaults": (lambda p, q: lambda first=p, second=q: [first, second], lambda kept: kept()),
    "dict": (lambda p, q: {"p": p, "q": (q, p)}, lambda kept: [kept["p"], kept["q"][0]]),
    "deque": (lambda *two: deque(two), list),
}
"""Objects that hold two parameters."""


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
        module = Keeping(lambda p: None)
        for name, (keep, _) in PLACES.items():
            setattr(module, name, keep(module.layers[0].weight))
        model = parallelize(module)
        weight = model.layers[0].weight
        for name, (_, read) in PLACES.items():
            found = read(getattr(model, name))
            assert (id(weight) in found) if isinstance(found, set) else found is weight, name

    run_ranks(run, 2)


@pytest.mark.guarantees("kept-parameters")
def test_objects_that_keep_two_parameters_get_both() -> None:
    def run() -> None:
        module = nn.Sequential(nn.Linear(4, 4))
        module.kept = {name: keep(module[0].weight, module[0].bias) for name, (keep, _) in TWO_PLACES.items()}
        model = parallelize(module)
        for name, (_, read) in TWO_PLACES.items():
            assert [*map(id, read(model.kept[name]))] == [id(model[0].weight), id(model[0].bias)], name

    run_ranks(run, 2)


@pytest.mark.guarantees("kept-parameters")
def test_a_class_that_keeps_a_parameter_gets_the_new_one() -> None:
    """Python remembers attributes of classes, so a change of the class's dict is not enough."""

    def run() -> None:
        class Registry:
            weight: Tensor | None = None

        module = Keeping(lambda p: None)
        Registry.weight = module.layers[0].weight
        read = lambda: Registry.weight  # noqa: E731
        for _ in range(100):
            read()
        model = parallelize(module)
        assert read() is model.layers[0].weight

    run_ranks(run, 2)


def test_a_loop_that_is_not_over_is_no_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loop = enumerate(model.parameters())
    next(loop)
    find_kept_parameters(model)


@pytest.mark.guarantees("kept-parameters")
def test_a_cache_that_keeps_a_parameter_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    @functools.lru_cache
    def find_weight() -> Tensor:
        return model[0].weight

    find_weight()
    with pytest.raises(ValueError, match=r"find_weight \(a _lru_cache_wrapper\) refers to the parameter 0\.weight"):
        find_kept_parameters(model)


def test_a_dict_that_a_thread_changes_is_no_error() -> None:
    numbers: dict[int, None] = dict.fromkeys(range(2**33, 2**33 + 10_000))
    ends = threading.Event()

    def change() -> None:
        while not ends.is_set():
            numbers[2**34] = None
            del numbers[2**34]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(5):
            assert not find_kept_parameters(nn.Linear(2, 2))
    finally:
        ends.set()
        thread.join()


@pytest.mark.guarantees("kept-parameters")
@pytest.mark.parametrize("keep", [lambda p: frozenset([id(p)]), lambda p: frozenset([p])])
def test_places_that_cannot_change_are_named(keep: Callable[[nn.Parameter], Any]) -> None:
    with raises_on_all_ranks(ValueError, r"frozenset.*layers\.0\.weight"):
        run_ranks(lambda: parallelize(Keeping(keep)), 2)


@pytest.mark.parametrize("place", ["list", "id"])
def test_parameters_that_ddp_materialises_are_replaced(place: str) -> None:
    def run() -> None:
        keep, read = PLACES[place]
        with torch.device("meta"):
            model = Keeping(keep)
        config = DDPConfig()
        DDPManager(config, create_device_mesh(config, device_type="cpu")).parallelize(model)
        weight, found = model.layers[0].weight, read(model.kept)
        assert not weight.is_meta
        assert (id(weight) in found) if isinstance(found, set) else found is weight

    run_ranks(run, 1)


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


class TiedHead(nn.Module):
    """A head that computes with the weight of the embedding, which it keeps outside of modules."""

    def __init__(self, make_head: Callable[[nn.Parameter], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = make_head(self.embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_head_with_list(weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
    kept = [weight]
    return lambda x: x @ kept[0].t()


HEADS: dict[str, Callable[[nn.Parameter], Callable[[Tensor], Tensor]]] = {
    "list": make_head_with_list,
    "partial": lambda weight: functools.partial(F.linear, weight=weight),
    "closure": lambda weight: lambda x: F.linear(x, weight),
}


@pytest.mark.guarantees("kept-parameters")
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_keeps_another_modules_weight_is_refused_by_name(kind: str) -> None:
    def run() -> None:
        parallelize(TiedHead(HEADS[kind]))(torch.arange(4))

    with raises_on_all_ranks(RuntimeError, r"keep parameters: embedding\.weight\..*self\.head\.weight = "):
        run_ranks(run, 2)


class KeptByStage(pl.LightningModule):
    def __init__(self, keep: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make_causal_lm(GPT2)
        self.kept = keep(self.model.transformer.h[0].mlp.c_fc.weight)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).logits


def shard_into_stages(keep: Callable[[nn.Parameter], Any]) -> KeptByStage:
    config = FSDP2Config()
    mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
    return FSDP2Manager(config, mesh).parallelize(KeptByStage(keep))


def test_ids_select_the_parameters_of_the_own_pipeline_stage() -> None:
    def run() -> list[str]:
        module = shard_into_stages(lambda p: {id(p)})
        return [name for name, parameter in module.named_parameters() if id(parameter) in module.kept]

    assert run_ranks(run, 2) == [["model.transformer.h.0.mlp.c_fc.weight"], []]


def test_parameters_of_one_pipeline_stage_are_named_on_all() -> None:
    with raises_on_all_ranks(ValueError, r"model\.transformer\.h\.0\.mlp\.c_fc\.weight, which only some pipeline"):
        run_ranks(lambda: shard_into_stages(lambda p: [p]), 2)


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


def test_as_many_objects_as_parameters_take_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(100))
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    searches = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(None) or get_objects())
    assert len(find_kept_parameters(model)) == len(groups)
    assert len(searches) == 2  # for parameters, and for their ids
