"""Steps of sharded models have the gradients of one process, and send no more than they must."""

import contextlib
import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.model_kinds import (
    MODELS,
    Distillation,
    Model,
    assert_equal_gradients,
    make_tokens,
    parallelize,
    token_loss,
)
from helpers.models import LLAMA, PlainTransformer, make_causal_lm
from helpers.ranks import run_ranks
from helpers.user_modules import WithModel, make_trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fsdp2 import FSDP2Strategy, create_device_mesh, defer_grad_sync
from lightning_fsdp2.modules.structure import get_layer_lists
from lightning_fsdp2.parallel.data.fully_shard import reshard
from lightning_fsdp2.parallelizer import (
    fsdp2_strategy_parallelize,
    unshard_fsdp2_model,
)


def train_two_steps(case: Model) -> None:
    torch.manual_seed(0)
    model = case.make()
    reference = copy.deepcopy(model)
    parallelize(model)
    for step in range(2):
        model.zero_grad()
        case.loss(model, 2 * step + dist.get_rank()).backward()
        reference.zero_grad()
        torch.stack([case.loss(reference, 2 * step + rank) for rank in range(2)]).mean().backward()
        assert_equal_gradients(model, reference)


TOGETHER = [list(MODELS)[start : start + 2] for start in range(0, len(MODELS), 2)]
"""Models of one fork, because a fork costs as much as one of them."""


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=pytest.mark.slow if number % 2 else ()) for number, names in enumerate(TOGETHER)],
    ids=", ".join,
)
def test_steps_of_two_ranks_have_the_gradients_of_one_process(names: list[str]) -> None:
    def run() -> None:
        for name in names:
            try:
                train_two_steps(MODELS[name])
            except Exception as error:
                raise AssertionError(name) from error

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what a step sends


def padded_size(modules: list[nn.Module]) -> int:
    """Elements of one all-gather: every parameter's rows are padded to a multiple of the ranks."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    ranks = dist.get_world_size()
    return sum(math.ceil(p.shape[0] / ranks) * ranks * p[0].numel() for p in parameters)


def count_step(model: nn.Module, seed: int | None = None) -> tuple[StepCounter, StepCounter]:
    """Train one micro-batch and return what its forward and its backward sent."""
    with StepCounter() as forward:
        loss = token_loss(model, dist.get_rank() if seed is None else seed)
    with StepCounter() as backward:
        loss.backward()
    return forward, backward


@dataclass
class Counts:
    """Collectives of one step of a three-layer Llama, which is its options: all-gathers are one per unit in forward."""

    options: dict[str, Any]
    forward: int
    backward: int
    tied: bool = False


COUNTS = {
    "default": Counts({}, 5, 2),
    "without-prefetch": Counts({"enable_fsdp2_prefetch": False}, 5, 2),
    "far-prefetch": Counts({"fsdp2_forward_prefetch_depth": 3, "fsdp2_backward_prefetch_depth": 4}, 5, 2),
    "tied": Counts({}, 4, 2, tied=True),
    "tied-without-prefetch": Counts({"enable_fsdp2_prefetch": False}, 4, 2, tied=True),
    "reshard": Counts({"reshard_after_forward": True}, 5, 4),
    "reshard-tied": Counts({"reshard_after_forward": True}, 4, 4, tied=True),
    "no-reshard": Counts({"reshard_after_forward": False}, 5, 0),
}


@pytest.mark.guarantees("counts-unit-by-unit")
@pytest.mark.parametrize("tied", [False, True])
def test_collectives_of_a_step(tied: bool) -> None:
    def run() -> None:
        for name, case in COUNTS.items():
            if case.tied != tied:
                continue
            model = parallelize(make_causal_lm({**LLAMA, "tie_word_embeddings": case.tied}), **case.options)
            units = 4 if case.tied else 5
            for _ in range(2):
                forward, backward = count_step(model)
                assert forward.collectives == {"all_gather": case.forward}, name
                expected = {"all_gather": case.backward, "reduce_scatter": units}
                assert backward.collectives == {kind: count for kind, count in expected.items() if count}, name

    run_ranks(run, 2)


def test_classes_keep_their_names() -> None:
    def run() -> None:
        model = parallelize(make_causal_lm(LLAMA))
        assert isinstance(model.model.layers[0], FSDPModule)
        assert "FSDP" not in repr(model)
        assert type(model).__name__ == "LlamaForCausalLM"

    run_ranks(run, 2)


class Registered(nn.Module):
    """A class that is made with arguments, and knows its subclasses, by name."""

    names: ClassVar[set[str]] = set()

    def __new__(cls, width: int) -> "Registered":
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def __init_subclass__(cls) -> None:
        assert cls.__name__ not in Registered.names
        Registered.names.add(cls.__name__)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def test_a_class_is_tried_without_its_own_new_and_its_registry() -> None:
    def run() -> None:
        assert isinstance(parallelize(Registered(4)), FSDPModule)

    run_ranks(run, 1)


class ThreeLinears(nn.Module):
    """No list of layers, and no Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(self.second(self.first(inputs).relu()).relu())


@pytest.mark.guarantees("reshard-anywhere")
@pytest.mark.parametrize(("value", "gathered"), [(None, 3), (True, 3), (False, 0), (2, 3)])
def test_the_flag_holds_for_modules_that_are_no_layers(value: bool | int | None, gathered: int) -> None:
    def run() -> None:
        model = parallelize(ThreeLinears(), reshard_after_forward=value)
        for _ in range(2):
            loss = model(torch.ones(2, 8)).sum()
            with StepCounter() as backward:
                loss.backward()
            assert backward.collectives.get("all_gather", 0) == gathered

    run_ranks(run, 2)


def test_units_are_gathered_and_reduced_in_the_order_they_run() -> None:
    def run() -> None:
        model = make_causal_lm(LLAMA)
        layers = [padded_size([layer]) for layer in model.model.layers]
        embedding = padded_size([model.model.embed_tokens])
        head = padded_size([model.model.norm, model.lm_head])
        forward, backward = count_step(parallelize(model))
        assert forward.elements == {"all_gather": [embedding, *layers, head]}
        assert backward.elements == {
            "all_gather": [layers[1], layers[0]],
            "reduce_scatter": [head, layers[2], layers[1], layers[0], embedding],
        }

    run_ranks(run, 2)


class Widening(nn.Module):
    """Layers of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ThreeLinears() for _ in range(5))
        for index, block in enumerate(self.blocks):
            block.first, block.second = nn.Linear(8, 2 + 2 * index), nn.Linear(2 + 2 * index, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


GATHERED_AHEAD: dict[int, list[list[int | None]]] = {
    0: [[], [], [], [], []],
    1: [[None], [0], [1], [2], [3]],
    3: [[None], [0], [1, 0], [2, 1, 0], [3, 2, 1]],
}
"""By depth, the blocks that each block gathers ahead in backward; None for the root, which is gathered already."""


def test_units_are_prefetched_in_the_order_in_which_they_are_used() -> None:
    def run() -> None:
        for depth in (0, 1, 3):
            model = Widening()
            sizes = [padded_size([block]) for block in model.blocks]
            parallelize(model, fsdp2_forward_prefetch_depth=depth, fsdp2_backward_prefetch_depth=depth)
            states = {block._get_fsdp_state(): index for index, block in enumerate(model.blocks)}
            assert [[states.get(s) for s in state._states_to_backward_prefetch] for state in states] == GATHERED_AHEAD[
                depth
            ]
            ahead = [list(range(index + 1, min(index + 1 + depth, 5))) for index in range(5)]
            assert [[states.get(s) for s in state._states_to_forward_prefetch] for state in states] == ahead
            with StepCounter() as forward:
                loss = model(torch.ones(2, 8)).sum()
            with StepCounter() as backward:
                loss.backward()
            assert forward.elements == {"all_gather": sizes}
            assert backward.elements == {"all_gather": sizes[-2::-1], "reduce_scatter": sizes[::-1]}

    run_ranks(run, 2)


@pytest.mark.slow
def test_collectives_over_four_ranks() -> None:
    def run() -> None:
        model = parallelize(make_causal_lm(LLAMA), reshard_after_forward=2)
        for _ in range(2):
            forward, backward = count_step(model)
        layer = padded_size([model.model.layers[0]])
        assert forward.collectives == {"all_gather": 5}
        assert backward.collectives == {"all_gather": 3, "reduce_scatter": 5}
        assert max(backward.elements["all_gather"]) <= layer, "blocks are gathered whole, from two ranks"
        reference = make_reference(model)
        torch.stack([token_loss(reference, rank) for rank in range(4)]).mean().backward()
        model.zero_grad()
        token_loss(model, dist.get_rank()).backward()
        assert_equal_gradients(model, reference)

    run_ranks(run, 4)


@pytest.mark.slow
def test_collectives_over_two_replicas_of_two_shards() -> None:
    def run() -> None:
        hsdp = create_device_mesh(dp_replicate_size=2, device_type="cpu")
        model = fsdp2_strategy_parallelize(make_causal_lm(LLAMA), hsdp, mp_policy=MixedPrecisionPolicy())
        forward, backward = count_step(model)
        assert forward.collectives == {"all_gather": 5}
        assert backward.collectives == {"all_gather": 2, "reduce_scatter": 5, "all_reduce": 5}
        for reduce_scatter in (False, True):
            with defer_grad_sync(model, reduce_scatter=reduce_scatter):
                for _ in range(2):
                    _, backward = count_step(model)
                    assert backward.collectives["reduce_scatter"] == (5 if reduce_scatter else 0)
                    assert backward.collectives["all_reduce"] == 0
            _, backward = count_step(model)
            assert backward.collectives == {"all_gather": 2, "reduce_scatter": 5, "all_reduce": 5}

    run_ranks(run, 4)


def test_replicas_without_shards_gather_nothing() -> None:
    def run() -> None:
        mesh = create_device_mesh(dp_replicate_size=2, device_type="cpu")
        model = fsdp2_strategy_parallelize(make_causal_lm(LLAMA), mesh, mp_policy=MixedPrecisionPolicy())
        forward, backward = count_step(model)
        assert forward.collectives == {}
        assert backward.collectives == {"all_reduce": 5}

    run_ranks(run, 2)


@pytest.mark.guarantees("deferred-reduction")
def test_accumulation_reduces_once_per_unit_and_gathers_no_more_than_single_steps() -> None:
    def run() -> None:
        for options in ({}, {"enable_fsdp2_prefetch": False}):
            model = make_causal_lm(LLAMA)
            reference = copy.deepcopy(model)
            parallelize(model, **options)
            for micro_batch in range(3):
                is_last = micro_batch == 2
                with contextlib.nullcontext() if is_last else defer_grad_sync(model):
                    forward, backward = count_step(model, 2 * micro_batch + dist.get_rank())
                assert forward.collectives == {"all_gather": 5}
                expected = {"all_gather": 2, "reduce_scatter": 5} if is_last else {"all_gather": 2}
                assert backward.collectives == expected, f"micro-batch {micro_batch}, {options}"
            torch.stack([token_loss(reference, index) for index in range(6)]).sum().div(2).backward()
            assert_equal_gradients(model, reference)

    run_ranks(run, 2)


def test_a_forward_without_backward_leaves_the_next_step_as_it_was() -> None:
    def run() -> None:
        model = parallelize(make_causal_lm(LLAMA))
        before = [counter.elements for counter in count_step(model)]
        with torch.no_grad():
            token_loss(model, 0)
        reshard(model)
        assert [counter.elements for counter in count_step(model)] == before

    run_ranks(run, 2)


def test_nothing_is_gathered_for_a_teacher_in_backward() -> None:
    def run() -> None:
        model = parallelize(Distillation())
        for _ in range(2):
            forward, backward = count_step(model)
            assert forward.collectives == {"all_gather": 9}
            assert backward.collectives == {"all_gather": 1, "reduce_scatter": 4}

    run_ranks(run, 2)


def make_reference(model: nn.Module) -> nn.Module:
    """An unsharded Llama with the weights of ``model``; every rank must call it."""
    reference = make_causal_lm(LLAMA)
    reference.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    return reference


# ---------------------------------------------------------------------- through the Trainer


class HandShardedModule(WithModel):
    """Shards as Lightning's ModelParallelStrategy asks its users to."""

    def configure_model(self) -> None:
        super().configure_model()
        mesh, model = self.device_mesh["data_parallel"], self.model
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not model.model.layers[-1])
        fully_shard(model.model.embed_tokens, mesh=mesh).set_unshard_in_backward(False)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)


class CountingCallback(pl.Callback):
    """Counts from the start of one window of micro-batches to the start of the next, the loop of Lightning included.

    In the first three backwards, ranks compare on the host which layers they have run.
    """

    def __init__(self, micro_batches: int) -> None:
        self.counter = StepCounter()
        self.window = (3 * micro_batches, 4 * micro_batches)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.window[0]:
            self.counter.__enter__()
        if batch_idx == self.window[1]:
            self.counter.__exit__(None, None, None)


def count_trainer_step(strategy: Any, module: pl.LightningModule, micro_batches: int = 1) -> StepCounter:
    tokens = make_tokens(0)
    batches = [{"input_ids": tokens, "labels": tokens}] * (4 * micro_batches + 1)
    callback = CountingCallback(micro_batches)
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=micro_batches, callbacks=[callback])
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return callback.counter


@pytest.mark.guarantees("counts-unit-by-unit")
@pytest.mark.parametrize("micro_batches", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_trainer_step_costs_no_more_than_that_of_model_parallel_strategy(micro_batches: int) -> None:
    make_model = partial(make_causal_lm, LLAMA)

    def run() -> None:
        ours = count_trainer_step(FSDP2Strategy(), WithModel(make_model), micro_batches)
        theirs = count_trainer_step(ModelParallelStrategy(2, 1), HandShardedModule(make_model), micro_batches)
        expected = {"all_gather": 7 * micro_batches, "reduce_scatter": 5}
        # Lightning broadcasts a flag per micro-batch, and reads it; ours agree on a number per step, on the host
        assert ours.collectives == {**expected, "all_reduce": 1}
        assert theirs.collectives == {**expected, "broadcast": micro_batches, "reduce_scatter": 5 * micro_batches}
        assert ours.host_syncs == 1 <= theirs.host_syncs == micro_batches
        assert ours.operations.total() <= theirs.operations.total(), ours.operations - theirs.operations

    run_ranks(run, 2)


# ---------------------------------------------------------------------- the public functions


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "llama-tied", "plain"])
def test_unshard_fsdp2_model(name: str) -> None:
    def compute_logits(model: nn.Module, tokens: Tensor) -> Tensor:
        output = model(tokens)
        return getattr(output, "logits", output)

    def use_unsharded(model: nn.Module, reference: nn.Module) -> None:
        """What may be done inside the block, and an exception at its end."""
        with unshard_fsdp2_model(model), torch.no_grad(), StepCounter() as counter:
            for parameter_name, parameter in model.named_parameters():
                assert not isinstance(parameter, DTensor), parameter_name
                torch.testing.assert_close(parameter, reference.get_parameter(parameter_name), rtol=0, atol=0)
            for tokens in map(make_tokens, range(3 * dist.get_rank())):  # rank 0 calls nothing
                actual, expected = (compute_logits(each, tokens) for each in (model, reference))
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
                get_layer_lists(model)[0][1].mlp(torch.ones(1, 3, 32))
            assert counter.collectives == {}
            raise KeyError("inside")

    def run() -> None:
        torch.manual_seed(0)
        model = MODELS[name].make()
        reference = copy.deepcopy(model)
        parallelize(model)
        before = [counter.elements for counter in count_step(model)]
        with pytest.raises(KeyError, match="inside"):
            use_unsharded(model, reference)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.zero_grad()
        assert [counter.elements for counter in count_step(model)] == before
        torch.stack([token_loss(reference, rank) for rank in range(2)]).mean().backward()
        assert_equal_gradients(model, reference)

    run_ranks(run, 2)


FOREIGN_MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None, dict[str, Any]]] = {
    "three-axes": ((2, 1, 1), ("data_parallel", "context_parallel", "tensor_parallel"), {}),
    "unnamed": ((2,), None, {}),
    "one-axis": ((2,), ("dp",), {"dp_mesh_name": "dp"}),
    "replicate-x-shard": ((2, 1), ("replicate", "shard"), {"dp_mesh_name": ("replicate", "shard")}),
    "replicate1-x-shard": ((1, 2), ("replicate", "shard"), {"dp_mesh_name": ("replicate", "shard")}),
    "dp_cp": ((2, 1), ("dp_cp", "tensor_parallel"), {}),
}


def test_meshes_made_elsewhere() -> None:
    def run() -> None:
        torch.manual_seed(0)
        reference = make_causal_lm(LLAMA)
        torch.stack([token_loss(reference, rank) for rank in range(2)]).mean().backward()
        for name, (shape, axes, options) in FOREIGN_MESHES.items():
            torch.manual_seed(0)
            model = make_causal_lm(LLAMA)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
            fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), **options)
            token_loss(model, dist.get_rank()).backward()
            try:
                assert_equal_gradients(model, reference)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    run_ranks(run, 2)


def test_a_mesh_without_the_named_axis_is_refused() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(ValueError, match=r"no axis 'data_parallel'; it has \['dp'\]"):
            fsdp2_strategy_parallelize(PlainTransformer(), mesh)

    run_ranks(run, 1)
