"""Layers whose forward changes buffers, computed again in backward: everything is as without it, to the last bit."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.collectives import StepCounter
from helpers.dispatch import LiveBytes
from helpers.ranks import run_ranks
from helpers.tensor_parallel import get_gradients
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.activation_checkpointing import apply_activation_checkpointing

FEATURES = 8


class Codebook(nn.Module):
    """Moves the nearest of its vectors towards each input, in place; the distances use them as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.randn(4, FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        vectors = self.vectors.clone()
        distances = torch.cdist(inputs, vectors)
        if self.training:
            with torch.no_grad():
                self.vectors.index_copy_(0, distances.argmin(1)[:1], inputs[:1].detach())
        return inputs + torch.softmax(-distances, 1) @ vectors


class Counter(nn.Module):
    """Its forward depends on how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        return inputs * (1 + torch.sigmoid(inputs) / (1 + self.calls))


class OwnMean(nn.Module):
    """Normalises by a mean of its own making, which it keeps under the name of the buffer of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("nothing", None)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return torch.sigmoid(inputs - self.mean) * inputs


class ImageNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch, self.instance = nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.instance(self.batch(inputs.view(-1, 2, 2, 2))).reshape(inputs.shape)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(FEATURES),
    "batch and instance norm of images": ImageNorms,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES)),
    "codebook": Codebook,
    "counter": Counter,
    "own mean": OwnMean,
}


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(FEATURES, FEATURES), norm

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.norm(self.linear(inputs))


class Net(nn.Module):
    """Uses its layers in the order given, the first one twice."""

    def __init__(self, make: Callable[[], nn.Module], order: tuple[int, ...] = (0, 1, 0)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(make()) for _ in set(order))
        self.order = order

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in map(self.layers.__getitem__, self.order):
            inputs = layer(inputs)
        return inputs


def train(model: Any, batches: list[Tensor], accumulate: Callable[[], Any] | None = None) -> list[dict[str, Any]]:
    """Return losses, gradients and the state after each of some steps of two micro-batches, with an evaluation amid."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        if accumulate is None:
            # both forwards come before both backwards, the second of which repeats what is earlier
            losses = [model(first).square().mean(), model(second).square().mean()]
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            losses[0].backward()
        else:
            with accumulate():
                model(first).square().mean().backward()
            losses = [model(second).square().mean()]
            losses[0].backward()
        gradients = {name: gradient.clone() for name, gradient in get_gradients(model).items() if gradient is not None}
        optimizer.step()
        with torch.no_grad():
            evaluated = model.eval()(first)
            model.train()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items() if "linear" not in name}
        seen.append({"losses": losses, "evaluated": evaluated, **gradients, **state})
    return seen


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            for value, other in zip(values, ours[name], strict=True) if name == "losses" else [(values, ours[name])]:
                torch.testing.assert_close(other, value, rtol=0, atol=0, msg=name)


def make_batches() -> list[Tensor]:
    return list(torch.randn(6, 16, FEATURES, generator=torch.Generator().manual_seed(3)))


@pytest.mark.guarantees("running-statistics")
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("norm", NORMS)
def test_buffers_gradients_and_losses_are_those_without_repetition(norm: str, mode: Any) -> None:
    torch.manual_seed(0)
    plain = Net(NORMS[norm])
    repeated = copy.deepcopy(plain)
    identities = {name: id(buffer) for name, buffer in repeated.named_buffers() if norm != "counter"}
    apply_activation_checkpointing(find_structure(repeated), mode)
    options = {} if mode == "full" else {"accumulate": torch.enable_grad}  # selective serves one backward
    assert_same(train(repeated, make_batches(), **options), train(plain, make_batches(), **options))
    assert all(id(buffer) == identities.get(name, id(buffer)) for name, buffer in repeated.named_buffers())


def make_sharded(make: Callable[[], nn.Module], mode: Any, *, compiles: bool) -> Any:
    # torch itself cannot compile a layer that is used twice and changes buffers in place
    torch.manual_seed(0)
    net = Net(make, (0, 1, 2) if compiles else (0, 1, 0))
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), activation_checkpointing=mode, enable_compile=compiles)
    return FSDP2Manager(config, create_device_mesh(config)).parallelize(net)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_shards_and_compiled_layers_have_them_too(mode: Any, compile_without_code: None) -> None:
    def run() -> None:
        for make, compiles in ((NORMS["batch norm"], True), (NORMS["batch norm"], False), (OwnMean, False)):
            models = [make_sharded(make, own, compiles=compiles) for own in (False, mode)]
            plain, repeated = (train(model, make_batches(), partial(defer_grad_sync, model)) for model in models)
            assert_same(repeated, plain)

    run_ranks(run, 2)


@pytest.mark.parametrize("make", [OwnMean, Counter])
def test_compiled_layers_that_may_see_the_new_value_are_refused(make: Any, compile_without_code: None) -> None:
    def run() -> None:
        model = make_sharded(make, "full", compiles=True)
        with pytest.raises(ValueError, match=r"with enable_compile=True: the forward of Block changes its buffer '"):
            model(make_batches()[0])

    run_ranks(run, 1)


class Late(nn.Module):
    """Changes a large buffer from some forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2**15))
        self.has_begun = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.has_begun:
            self.table += 1
        return inputs * self.table[0]


def test_a_large_buffer_that_changes_after_all_is_refused() -> None:
    net = Net(Late, order=(0,))
    apply_activation_checkpointing(find_structure(net), "full")
    for _ in range(2):
        net(make_batches()[0]).sum().backward()
    net.layers[0].norm.has_begun = True
    with pytest.raises(ValueError, match=r"the forward of Block changes its buffer 'table' \(131072 bytes\), which"):
        net(make_batches()[0])


class Masked(nn.Module):
    """Holds a large constant, as the layers of GPT-Neo do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2**20, dtype=torch.bool))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.mask[0]


def test_large_constants_are_copied_in_the_first_forward_alone_and_not_kept() -> None:
    net = Net(Masked, order=(0,))
    apply_activation_checkpointing(find_structure(net), "full")
    for copies in (1, 0):
        with StepCounter() as counter, LiveBytes(net) as live:
            loss = net(make_batches()[0]).sum()
        assert counter.operations["aten::clone"] == copies
        assert live.count() < 2**20
        loss.backward()
