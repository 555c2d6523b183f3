"""Code of users that sees gradients in the middle of things: hooks on parameters and after a backward, ``inputs=``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.oracle import whole
from helpers.ranks import raises_on_all_ranks, run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import WIDTH, Batch, Regressor, assert_same_weights, make_batches, make_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader

from lightning_fsdp2 import DDPStrategy, FSDP2Config, FSDP2Strategy, MegatronFSDPConfig, MegatronFSDPStrategy

ACCUMULATE, STEPS = 2, 2


def scale_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.7)


def step_at_once(parameter: Tensor) -> None:
    parameter.add_(parameter.grad, alpha=-0.05)
    parameter.grad = None


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.02, 0.02)


def normalize(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 0.1)


def halve_in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


class Hooked(Regressor):
    """Registers hooks of every kind at ``place``. None of them commutes with adding up ranks or micro-batches."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.calls = place, 0
        self.handles: list[Any] = []

    def register(self, place: str) -> None:
        if place != self.place:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = [
            self.blocks[0].weight.register_hook(clamp),
            self.blocks[0].weight.register_hook(self.count),
            self.blocks[1].weight.register_hook(normalize),
            self.blocks[1].weight.register_hook(halve_in_place),
            self.blocks[2].weight.register_post_accumulate_grad_hook(scale_gradient),
            self.blocks[2].bias.register_post_accumulate_grad_hook(step_at_once),
            self.head.weight.register_post_accumulate_grad_hook(scale_gradient),
            self.head.weight.register_hook(clamp),
        ]
        if place != "training_step":  # a step has gathered what the LightningModule holds itself
            self.handles.append(self.scale.register_hook(clamp))

    def count(self, gradient: Tensor) -> None:
        self.calls += 1

    def configure_optimizers(self) -> Any:
        self.register("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.register("on_fit_start")

    def on_train_start(self) -> None:
        self.register("on_train_start")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.register("on_train_batch_start")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.register("training_step")
        return super().training_step(batch, batch_idx)


def train_by_hand(
    module: Any, readers: int, *, after_backward: Callable[[], None] = lambda: None, backward: Any = Tensor.backward
) -> None:
    """The oracle: a loop over the batches of ``readers`` data ranks in one process."""
    optimizer = module.configure_optimizers()
    if isinstance(module, Hooked):
        module.on_fit_start()
        module.on_train_start()
    batches = iter(make_batches(readers * ACCUMULATE * STEPS))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for index in range(ACCUMULATE):
            own = [next(batches) for _ in range(readers)]
            whole = {name: torch.cat([batch[name] for batch in own]) for name in own[0]}
            if isinstance(module, Hooked):
                module.on_train_batch_start(whole, index)
            backward(module.training_step(whole, index) / ACCUMULATE)
            after_backward()
        optimizer.step()


def fit(module: pl.LightningModule, strategy: Any, readers: int, **options: Any) -> pl.Trainer:
    trainer = make_trainer(strategy, **{"accumulate_grad_batches": ACCUMULATE, "max_steps": STEPS, **options})
    batches = make_batches(readers * ACCUMULATE * STEPS)
    first = dist.get_rank() * readers // dist.get_world_size()
    trainer.fit(module, DataLoader(batches[first::readers], batch_size=None))
    return trainer


TENSOR_PARALLEL = FSDP2Config(tp_plan={"blocks.*": "colwise_gather_output"})

MESHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2": (2, 2, {}),
    "dp2, reduced": (2, 2, {"config": FSDP2Config(defer_fsdp_grad_sync=False)}),
    "dp2, gathered": (2, 2, {"config": FSDP2Config(reshard_after_forward=False)}),
    "hsdp2x1": (2, 2, {"dp_replicate_size": 2}),
    "tp2": (2, 1, {"tp_size": 2, "config": TENSOR_PARALLEL}),
    "hsdp2x2": (4, 4, {"dp_replicate_size": 2}),
    "dp2, tp2": (4, 2, {"tp_size": 2, "config": TENSOR_PARALLEL}),
}
"""Ranks, ranks that read their own batches, and options of the strategy."""

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        ("dp2", "configure_optimizers"),
        ("hsdp2x1", "on_fit_start"),
        ("tp2", "on_train_start"),
        pytest.param("dp2", "on_train_batch_start", marks=slow),
        ("dp2", "training_step"),
        pytest.param("dp2, reduced", "on_train_start", marks=slow),
        pytest.param("dp2, gathered", "on_train_batch_start", marks=slow),
        pytest.param("hsdp2x2", "configure_optimizers", marks=slow),
        pytest.param("dp2, tp2", "training_step", marks=slow),
    ],
)
def test_hooks_on_sharded_parameters_see_the_gradient_of_the_micro_batch_on_all_ranks(mesh: str, place: str) -> None:
    world, readers, options = MESHES[mesh]
    expected = Hooked(place)
    train_by_hand(expected, readers)

    def run() -> None:
        module = Hooked(place)
        fit(module, FSDP2Strategy(**options), readers)
        assert module.calls == expected.calls == ACCUMULATE * STEPS
        assert_same_weights(module, expected)

    run_ranks(run, world)


class ShardsItself(Hooked):
    """Calls ``fully_shard`` itself, as modules for Lightning's ``ModelParallelStrategy`` do."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.head, mesh=mesh)
        fully_shard(self, mesh=mesh)


@pytest.mark.slow
def test_hooks_run_in_a_module_that_shards_itself() -> None:
    expected = Hooked("on_train_start")
    train_by_hand(expected, 2)

    def run() -> None:
        module = ShardsItself("on_train_start")
        fit(module, FSDP2Strategy(), 2)
        assert_same_weights(module, expected)

    run_ranks(run, 2)


class RegistersIn(Regressor):
    """Registers a hook in the step with a number, on a parameter that ``choose`` picks."""

    def __init__(self, choose: Callable[[Any], Tensor], hook: Callable[[Tensor], Any], batch_idx: int = 0) -> None:
        super().__init__()
        self.choose, self.hook, self.batch_idx = choose, hook, batch_idx

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == self.batch_idx:
            self.choose(self).register_hook(self.hook)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (lambda: RegistersIn(lambda m: m.scale, clamp), ValueError, "on scale while a step had the parameter gathered"),
        (
            lambda: RegistersIn(lambda m: m.head.bias, clamp, batch_idx=1),
            ValueError,
            "on head.bias in the middle of an accumulation window",
        ),
        (
            lambda: RegistersIn(lambda m: m.blocks[0].weight, lambda gradient: gradient * torch.ones(8, 8)),
            ValueError,
            r"A hook on blocks.0.weight combines the gradient.*distribute_tensor\(tensor, gradient.device_mesh",
        ),
        (
            lambda: RegistersIn(lambda m: m.blocks[0].weight, lambda gradient: gradient.full_tensor()),
            TypeError,
            r"A hook on blocks.0.weight returned Tensor\[8, 8\] instead of a DTensor of the shape \[8, 8\]",
        ),
    ],
    ids=["gathered", "late", "whole-tensor", "whole-result"],
)
def test_hooks_that_cannot_be_right_are_refused(
    module: Callable[[], pl.LightningModule], error: type[Exception], message: str
) -> None:
    with raises_on_all_ranks(error, message):
        run_ranks(lambda: fit(module(), FSDP2Strategy(), 2), 2)


class RegistersOnFirstRank(Regressor):
    """Registers a hook on rank 0 alone, as a logger of gradients does, at ``place`` of a fit with a number."""

    def __init__(self, place: str, fit: int = 1) -> None:
        super().__init__()
        self.place, self.fit = place, fit

    def register(self, place: str) -> None:
        if place == self.place and self.fit == 0 and self.trainer.is_global_zero:
            self.blocks[1].weight.register_hook(lambda gradient: None)

    def on_train_start(self) -> None:
        self.fit -= 1
        self.register("on_train_start")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.register("on_train_batch_start")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.register("training_step")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("mesh", "module"),
    [
        ("dp2", lambda: RegistersOnFirstRank("on_train_start")),
        ("dp2", lambda: RegistersOnFirstRank("training_step", fit=2)),
        ("tp2", lambda: RegistersOnFirstRank("on_train_batch_start")),
        pytest.param("hsdp2x2", lambda: RegistersOnFirstRank("on_train_start"), marks=slow),
        pytest.param("dp2, tp2", lambda: RegistersOnFirstRank("on_train_start", fit=2), marks=slow),
    ],
    ids=["at-the-start", "second-fit", "tensor-parallel", "replicas", "tensor-parallel-second-fit"],
)
def test_hooks_on_one_rank_are_refused_on_all_ranks(mesh: str, module: Callable[[], RegistersOnFirstRank]) -> None:
    world, readers, options = MESHES[mesh]

    def run() -> None:
        own = module()
        for _ in range(own.fit):
            fit(own, FSDP2Strategy(**options), readers)

    with raises_on_all_ranks(ValueError, r"not on all ranks: blocks.1.weight \(only on rank 0\)"):
        run_ranks(run, world)


class Masked(Regressor):
    """Freezes the first rows of a weight with a mask."""

    def on_train_start(self) -> None:
        weight, mask = self.blocks[0].weight, torch.arange(8.0)[:, None].clamp(max=1).expand(8, 8).contiguous()
        if isinstance(weight, DTensor):
            mask = distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.register_hook(lambda gradient: gradient * mask)


@pytest.mark.slow
def test_a_mask_works_as_the_message_says() -> None:
    def run() -> None:
        module = Masked()
        before = module.blocks[0].weight.detach().clone()
        fit(module, FSDP2Strategy(), 2)
        is_changed = (module.blocks[0].weight.full_tensor() != before).any(1).tolist()
        assert is_changed == [False] + [True] * 7

    run_ranks(run, 2)


# ---------------------------------------------------------------------- gradients between micro-batches


class Clips(Regressor):
    """Clips what has accumulated after each micro-batch."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = clamp(parameter.grad)


class ClipsByCallback(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        Clips.on_after_backward(pl_module)


@pytest.mark.parametrize(
    ("mesh", "by_callback"),
    [
        ("dp2", False),
        pytest.param("dp2, reduced", True, marks=slow),
        ("hsdp2x1", True),
        ("tp2", False),
        pytest.param("hsdp2x2", False, marks=slow),
    ],
)
def test_gradients_after_each_backward_are_those_of_one_process(mesh: str, by_callback: bool) -> None:
    world, readers, options = MESHES[mesh]
    expected = Clips()
    train_by_hand(expected, readers, after_backward=expected.on_after_backward)

    def run() -> None:
        module = Regressor() if by_callback else Clips()
        fit(module, FSDP2Strategy(**options), readers, callbacks=[ClipsByCallback()] if by_callback else [])
        assert_same_weights(module, expected)

    run_ranks(run, world)


def test_the_log_says_once_why_every_micro_batch_reduces(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> list[str]:
        fit(Clips(), FSDP2Strategy(), 2)
        return [text for text in caplog.messages if "every micro-batch reduces" in text]

    told, *_ = run_ranks(run, 2)
    assert told == [
        "Clips has a hook `on_after_backward`, which may use gradients, so every micro-batch reduces gradients, and not"
        " only the last one of a step. Use `on_before_optimizer_step` to avoid this."
    ]


class Reads(Regressor):
    """Reads a gradient in a hook that does not make every micro-batch reduce."""

    def __init__(self, read: Callable[[Tensor | None], Any]) -> None:
        super().__init__()
        self.read = read

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            self.read(parameter.grad)


@pytest.mark.parametrize(
    ("read", "mesh"),
    [
        (lambda gradient: gradient.norm(), "dp2"),
        pytest.param(lambda gradient: gradient.mul_(2), "hsdp2x1", marks=slow),
        pytest.param(lambda gradient: gradient.full_tensor(), "tp2", marks=slow),
        pytest.param(lambda gradient: torch.stack([gradient.data]), "dp2", marks=slow),
        pytest.param(str, "dp2", marks=slow),
    ],
    ids=["norm", "in-place", "full_tensor", "data", "str"],
)
def test_a_gradient_that_is_not_reduced_yet_is_an_error_and_not_none(read: Callable[[Any], Any], mesh: str) -> None:
    world, readers, options = MESHES[mesh]
    with raises_on_all_ranks(ValueError, r"middle of an accumulation window.*defer_fsdp_grad_sync=False"):
        run_ranks(lambda: fit(Reads(read), FSDP2Strategy(**options), readers), world)


def test_a_gradient_that_is_not_reduced_yet_is_there_and_can_be_cleared() -> None:
    seen: list[Any] = []

    class Clears(Reads):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.optimizers[0].zero_grad(set_to_none=False)  # drops the first micro-batch

    expected = Regressor()
    train_by_hand(expected, 2, after_backward=partial(drop_first, expected, [0]))

    def run() -> None:
        module = Clears(lambda gradient: seen.append((gradient is None, gradient.shape, gradient.dtype)))
        fit(module, FSDP2Strategy(), 2)
        shapes = [parameter.shape for parameter in module.parameters()]
        assert seen == [(False, shape, torch.float32) for shape in shapes] * ACCUMULATE * STEPS
        assert_same_weights(module, expected)

    run_ranks(run, 2)


def drop_first(module: nn.Module, calls: list[int]) -> None:
    if calls[0] == 0:
        module.zero_grad()
    calls[0] += 1


# ---------------------------------------------------------------------- backwards to some parameters


def call_manually(module: pl.LightningModule, loss: Tensor, inputs: list[Tensor]) -> None:
    module.manual_backward(loss, inputs=inputs)


def call_tensor(module: pl.LightningModule, loss: Tensor, inputs: list[Tensor]) -> None:
    loss.backward(inputs=inputs)


def call_function(module: pl.LightningModule, loss: Tensor, inputs: list[Tensor]) -> None:
    torch.autograd.backward(loss, inputs=inputs)


CHOICES: list[Callable[[Any], list[Tensor]]] = [
    lambda module: list(module.blocks[0].parameters()),
    lambda module: [module.head.weight, module.head.bias],
    lambda module: list(module.parameters()),
    lambda module: [module.blocks[1].weight, module.blocks[2].weight],
]
"""Parameters of one backward each; the last two are in one step."""


class Chooses(Regressor):
    """Runs backwards to some parameters alone."""

    def __init__(self, call: Callable[[Any, Tensor, list[Tensor]], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.scale  # manual optimisation cannot train what the LightningModule holds itself
        self.register_buffer("scale", torch.ones(WIDTH))
        self.call = call
        self.gradients: list[dict[str, Tensor | None]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.call(self, loss, CHOICES[batch_idx](self))
        self.note()
        if batch_idx != 2:
            optimizer.step()
            optimizer.zero_grad()

    def note(self) -> None:
        gradients = {name: parameter.grad for name, parameter in self.named_parameters()}
        given = whole({name: gradient for name, gradient in gradients.items() if gradient is not None})
        self.gradients.append({name: given.get(name) for name in gradients})


@pytest.mark.parametrize(
    ("mesh", "call"),
    [
        ("dp2", call_manually),
        ("tp2", call_function),
        pytest.param("hsdp2x1", call_tensor, marks=slow),
        pytest.param("dp2", call_function, marks=slow),
        pytest.param("dp2, gathered", call_tensor, marks=slow),
        pytest.param("hsdp2x2", call_manually, marks=slow),
        pytest.param("dp2, tp2", call_function, marks=slow),
    ],
)
def test_a_backward_to_some_parameters_is_that_of_one_process(mesh: str, call: Any) -> None:
    world, readers, options = MESHES[mesh]
    before = torch.autograd._engine_run_backward
    expected = Chooses(call_tensor)
    optimizer = expected.configure_optimizers()
    expected.optimizers = lambda: optimizer
    batches = make_batches(readers * len(CHOICES))
    for index in range(len(CHOICES)):
        own = batches[index * readers : (index + 1) * readers]
        expected.training_step({name: torch.cat([batch[name] for batch in own]) for name in own[0]}, index)

    def run() -> None:
        module = Chooses(call)
        fit(module, FSDP2Strategy(**options), readers, accumulate_grad_batches=1, max_steps=3)
        torch.testing.assert_close(module.gradients, expected.gradients)
        assert_same_weights(module, expected)
        assert torch.autograd._engine_run_backward is before

    run_ranks(run, world)


class AsksForGradients(Regressor):
    """Calls ``torch.autograd.grad`` for a parameter."""

    def __init__(self, choose: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.choose = choose

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        torch.autograd.grad(loss, [self.choose(self)], retain_graph=True, allow_unused=True)
        return loss


@pytest.mark.parametrize(
    ("mesh", "choose", "name"),
    [
        ("dp2", lambda module: module.blocks[0].weight, "blocks.0.weight"),
        pytest.param("dp2", lambda module: module.scale, "scale", marks=slow),  # gathered
        pytest.param("hsdp2x1", lambda module: module.blocks[2].bias, "blocks.2.bias", marks=slow),
        pytest.param("tp2", lambda module: module.head.weight, "head.weight", marks=slow),
    ],
)
def test_gradients_of_sharded_parameters_are_not_returned(mesh: str, choose: Any, name: str) -> None:
    world, readers, options = MESHES[mesh]
    with raises_on_all_ranks(ValueError, rf"`torch.autograd.grad` .* \({name}\).*self.manual_backward\(loss, inputs="):
        run_ranks(lambda: fit(AsksForGradients(choose), FSDP2Strategy(**options), readers), world)


# ---------------------------------------------------------------------- other strategies


class BackwardToSome(Regressor):
    """Runs its backward to the parameters of a block alone."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(inputs=list(self.blocks[0].parameters()))


class HooksEarly(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(clamp)


class HooksLate(Regressor):
    """Registers a hook between forward and backward."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.head.weight.register_hook(clamp)
        return loss


MEGATRON_MISTAKES: dict[str, tuple[Callable[[], pl.LightningModule], str]] = {
    "early": (HooksEarly, r"head\.weight have hooks.*Change gradients in `on_before_optimizer_step`"),
    "sharded": (lambda: Hooked("on_train_start"), r"blocks\.0\.weight.*, scale have hooks.*cannot run on reduced"),
    "gathered": (HooksLate, r"parameters head\.weight have hooks.*cannot run on reduced"),
    "after-backward": (Clips, r"middle of an accumulation window.*`on_before_optimizer_step`, or use FSDP2Strategy"),
    "inputs": (
        BackwardToSome,
        r"`backward\(inputs=...\)` was called for parameters \(blocks.0.bias, blocks.0.weight\)",
    ),
    "grad": (lambda: AsksForGradients(lambda m: m.head.bias), r"`torch.autograd.grad` .* \(head.bias\).*FSDP2Strategy"),
}


@pytest.mark.parametrize(
    ("mistake", "zero_dp_strategy"),
    [
        ("sharded", 3),
        pytest.param("early", 3, marks=slow),
        pytest.param("gathered", 3, marks=slow),
        ("after-backward", 2),
        ("inputs", 3),
        pytest.param("inputs", 0, marks=slow),
        pytest.param("grad", 1, marks=slow),
    ],
)
def test_megatron_fsdp_refuses_what_it_cannot_do(mistake: str, zero_dp_strategy: int) -> None:
    kind = STRATEGIES["megatron_fsdp"]
    make_module, message = MEGATRON_MISTAKES[mistake]

    def run() -> None:
        fit(make_module(), MegatronFSDPStrategy(config=MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy)), 2)

    with raises_on_all_ranks(ValueError, message):
        kind.run(run, 2)


@pytest.mark.slow
def test_ddp_runs_hooks_on_the_gradient_of_each_rank() -> None:
    class Scaled(Regressor):
        def on_train_start(self) -> None:
            self.blocks[0].weight.register_hook(lambda gradient: gradient * 0.1)

        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

    expected = Scaled()
    expected.on_train_start()
    train_by_hand(expected, 2, after_backward=expected.on_after_backward)

    def run() -> None:
        module = Scaled()
        fit(module, DDPStrategy(), 2)
        assert_same_weights(module, expected)

    run_ranks(run, 2)
