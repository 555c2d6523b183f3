"""Random values of DTensors are those that one process draws; the oracle is the plain tensor with the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_fsdp2.ranks import whole_random
from lightning_fsdp2.ranks.own_random import OwnRandomNumbers, shared_random_numbers
from lightning_fsdp2.ranks.whole_tensors import gather
from lightning_fsdp2.ranks.whole_values import treat_dtensors_as_whole
from lightning_fsdp2.sizes import TENSOR_PARALLEL

CPU = torch.device("cpu")

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "random_": lambda x: x.random_(0, 9),
    "exponential_": lambda x: x.exponential_(),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "data.normal_": lambda x: x.data.normal_(),
    "transposed": lambda x: x.t().normal_().t(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like half": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.3),
    "normal": lambda x: torch.normal(x, 0.5),
    "poisson": lambda x: torch.poisson(x.exp()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout with a gradient": lambda x: F.dropout(x.detach().requires_grad_(), 0.3).detach(),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "xavier_uniform_": nn.init.xavier_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
}


def check(layouts: dict[str, tuple[tuple[int, ...], list[Any]]]) -> None:
    for layout, (shape, placements) in layouts.items():
        mesh = init_device_mesh("cpu", shape)
        treat_dtensors_as_whole(mesh)
        for name, draw in DRAWS.items():
            values = torch.randn(19, 5, generator=torch.Generator().manual_seed(0))
            sharded = distribute_tensor(values.clone(), mesh, placements)
            results, states = [], []
            for one in (values, sharded):
                torch.manual_seed(3)
                results.append(draw(one))
                states.append(torch.get_rng_state())
            torch.testing.assert_close(gather(results[1]), results[0], msg=f"{layout}: {name}")
            assert torch.equal(*states), (layout, name)
            assert len(results[1].to_local().unique()) <= len(results[0].unique()), (layout, name)


@pytest.mark.guarantees("whole-random-values")
def test_random_values_are_those_of_one_process() -> None:
    run_ranks(check, 2, {"rows": ((2,), [Shard(0)])})


@pytest.mark.slow
def test_random_values_of_every_layout_are_those_of_one_process() -> None:
    run_ranks(
        check,
        4,
        {
            "columns": ((4,), [Shard(1)]),
            "replicas of rows": ((2, 2), [Replicate(), Shard(0)]),
            "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
            "replicated": ((2, 2), [Replicate(), Replicate()]),
        },
    )


def _reset_a_layer_that_is_sharded_twice() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    treat_dtensors_as_whole(mesh)
    layer, alone = nn.Linear(4, 8), nn.Linear(4, 8)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    for one in (layer, alone):
        torch.manual_seed(3)
        one.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert torch.equal(gather(parameter.detach()), alone.get_parameter(name)), name


@pytest.mark.slow
def test_a_layer_that_is_sharded_twice_is_reset_as_in_one_process() -> None:
    run_ranks(_reset_a_layer_that_is_sharded_twice, 4)


def _draw_with_own_states(draws_by_torch: bool) -> list[float]:
    replicas = distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (2,)), [Replicate()])
    treat_dtensors_as_whole(replicas.device_mesh)
    whole_random.has_random_tracker = lambda mesh: draws_by_torch
    torch.manual_seed(5)
    expected = [torch.randn(4, 3), torch.randn(4, 3)]
    torch.randint(2**62, ())  # the seed of the ranks' own numbers, which `end` skips
    after = torch.randn(4, 3)
    numbers = OwnRandomNumbers()
    torch.manual_seed(5)
    numbers.begin(dist.get_rank(), CPU)
    alone = torch.rand(3)
    numbers.end()
    torch.manual_seed(5)
    numbers.begin(dist.get_rank(), CPU)
    first = torch.rand(2)
    assert torch.equal(gather(torch.randn_like(replicas)), expected[0])
    with shared_random_numbers():
        assert torch.equal(torch.randn(4, 3), expected[1])
    assert torch.equal(torch.cat([first, torch.rand(1)]), alone)
    numbers.end()
    assert torch.equal(torch.randn(4, 3), after)
    return alone.tolist()


@pytest.mark.parametrize("draws_by_torch", [False, True])
def test_ranks_that_draw_numbers_of_their_own_draw_those_of_a_tensor_together(draws_by_torch: bool) -> None:
    first, second = run_ranks(_draw_with_own_states, 2, draws_by_torch)
    assert first != second


def _draw_from_a_generator() -> None:
    sharded = distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    treat_dtensors_as_whole(sharded.device_mesh)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for draw in (lambda x, g: x.normal_(generator=g), lambda x, g: torch.rand_like(x, generator=g)):
        expected = draw(torch.zeros(4, 3), torch.Generator().manual_seed(7))
        assert torch.equal(gather(draw(sharded, torch.Generator().manual_seed(7))), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_is_given_is_used() -> None:
    run_ranks(_draw_from_a_generator, 2)


def _drop_activations() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(TENSOR_PARALLEL,))
    treat_dtensors_as_whole(mesh)
    whole_random.has_random_tracker = lambda mesh: True
    states = []
    for like in (distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]), torch.ones(4, 6)):
        torch.manual_seed(3)
        torch.native_dropout(like, 0.5, True)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)  # a rank has drawn the numbers of its shard, not those of all shards


def test_a_rank_drops_elements_of_its_own_activations_where_torch_draws_different_numbers_for_shards() -> None:
    run_ranks(_drop_activations, 2)
