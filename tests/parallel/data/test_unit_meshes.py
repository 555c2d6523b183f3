"""Units on different meshes train as in one process: deferred gradients, norms, clipping, steps of all optimizers."""

from typing import Any

import pytest
import torch
from helpers.oracle import assert_equal_gradients, assert_equal_runs, whole
from helpers.ranks import run_ranks
from helpers.unit_meshes import (
    BATCHES,
    MAX_NORM,
    RANKS,
    READERS,
    ROWS,
    backward,
    get_gradients,
    make_model,
    make_optimizer,
    shard_over_many_meshes,
    train,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_fsdp2 import defer_grad_sync
from lightning_fsdp2.compat.torch import StridedShard, has_packed_shards
from lightning_fsdp2.parallel.data.fully_shard import apply_fully_shard
from lightning_fsdp2.parallel.data.gradients import drop_deferred_gradients
from lightning_fsdp2.parallel.data.units import Unit
from lightning_fsdp2.parallelizer import unshard_fsdp2_model
from lightning_fsdp2.weights.materialize import materialize

STEPS = range(3)
RUNS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "one micro-batch": ({}, {}),
    "two, deferred, fused": ({"micro_batches": 2}, {"fused": True}),
    "two, reduce-scattered, foreach": ({"micro_batches": 2, "reduce_scatter": True}, {"foreach": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_units_on_different_meshes_train_as_in_one_process(name: str) -> None:
    options, implementation = RUNS[name]

    def run() -> list[float]:
        model = make_model()
        expected = train_alone(model, STEPS)
        shard_over_many_meshes(model)
        actual = train(model, make_optimizer(model, **implementation), STEPS, readers=READERS, **options)
        assert_equal_runs(actual, expected)
        assert expected.norms[0] > MAX_NORM  # clipping changes the gradients
        return actual.norms

    norms = run_ranks(run, RANKS)
    assert all(own == norms[0] for own in norms), "the norm differs by rank"


def test_parameters_lie_on_the_meshes_of_their_units() -> None:
    def run() -> None:
        meshes = shard_over_many_meshes(model := make_model())
        placements = {
            "embedding.weight": ("", (Shard(0),)),
            "blocks.0.mlp.0.weight": ("blocks.0", (Shard(0),)),
            "blocks.1.mlp.0.weight": ("blocks.1", (Replicate(), Shard(0))),
            "blocks.2.attention.out_proj.weight": ("", (Shard(0),)),
            "blocks.2.mlp.0.weight": ("blocks.2.mlp", (StridedShard(0, split_factor=2), Shard(0))),
            "blocks.2.mlp.2.weight": ("blocks.2.mlp", (Shard(0), Shard(1))),
            "blocks.2.mlp.2.bias": ("blocks.2.mlp", (Shard(0), Replicate())),
        }
        for name, (unit, expected) in placements.items():
            parameter = model.get_parameter(name)
            assert isinstance(parameter, DTensor)
            assert (parameter.device_mesh, parameter.placements) == (meshes[unit], expected), name

    run_ranks(run, RANKS)


@pytest.mark.parametrize("reduce_scatter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_deferred_gradients_on_different_meshes_can_be_dropped(reduce_scatter: bool) -> None:
    def run() -> None:
        model, reference = make_model(), make_model()
        backward(reference, BATCHES[1], 1)
        shard_over_many_meshes(model)
        rows = slice(0, ROWS // 2) if torch.distributed.get_rank() < RANKS // 2 else slice(ROWS // 2, ROWS)
        first, second = ({name: value[rows] for name, value in BATCHES[step].items()} for step in range(2))
        with defer_grad_sync(model, reduce_scatter=reduce_scatter):
            backward(model, first, 1)
        drop_deferred_gradients(model, model.parameters())
        model.zero_grad()
        backward(model, second, 1)
        assert_equal_gradients(get_gradients(model), get_gradients(reference))

    run_ranks(run, RANKS)


def test_a_model_without_weights_gets_those_of_one_process_on_any_meshes() -> None:
    def run() -> None:
        with torch.device("meta"):
            model, reference = make_model(), make_model()
        meshes = shard_over_many_meshes(model)
        for module, mesh in ((model, meshes[""]), (reference, None)):
            torch.manual_seed(0)
            materialize(module, torch.device("cpu"), mesh)
        weights = whole(dict(model.named_parameters()))
        assert all(torch.equal(weights[name], weight) for name, weight in reference.named_parameters())

    run_ranks(run, RANKS)


def test_units_on_different_meshes_are_gathered_together() -> None:
    def run() -> None:
        reference = make_model()
        shard_over_many_meshes(model := make_model())
        with unshard_fsdp2_model(model), torch.no_grad():
            inside = model.blocks[1](torch.ones(1, 2, 32))
        torch.testing.assert_close(inside, reference.blocks[1](torch.ones(1, 2, 32)))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    run_ranks(run, RANKS)


@pytest.mark.skipif(not has_packed_shards(), reason="this torch cannot gather packed shards")
def test_a_packed_weight_is_sharded_along_dim_1_by_the_ranks_of_its_unit() -> None:
    def run() -> None:
        two_axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for width, is_divided in ((6, True), (5, False)):
            model = nn.Linear(width, 8, bias=False)
            packed = distribute_tensor(model.weight.detach(), two_axes["tensor"], [StridedShard(0, split_factor=2)])
            model.weight = nn.Parameter(packed)
            units = [Unit(modules=[model], mesh=two_axes["data"])]
            if is_divided:
                apply_fully_shard(units, model, mp_policy=MixedPrecisionPolicy())
                assert model.weight.placements == (Shard(1), StridedShard(0, split_factor=2))
                continue
            message = (
                r"shape \(8, 5\) packs several projections.* Its size 5 is not divisible by the 2 data parallel ranks"
            )
            with pytest.raises(ValueError, match=message):
                apply_fully_shard(units, model, mp_policy=MixedPrecisionPolicy())

    run_ranks(run, 4)
