"""Norms, clipping, scaling and deferred synchronisation, against torch on the whole gradients in one process."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.models import PlainTransformer
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_fsdp2 import clip_grad_norm_, create_device_mesh, defer_grad_sync
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.parallel.data import gradients as gradients_module
from lightning_fsdp2.parallel.data.gradients import (
    choose_backward_inputs,
    clip_grad_value_,
    get_total_norm,
    scale_gradients,
)
from lightning_fsdp2.parallelizer import fsdp2_strategy_parallelize
from lightning_fsdp2.sizes import DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL

ORDERS = [1.0, 2.0, 3.0, math.inf]

CLIPS = [
    *((torch.float32, order, max_norm) for order in ORDERS for max_norm in (0.5, 1e9)),
    (torch.float32, 2.0, math.inf),
    (torch.bfloat16, 2.0, 0.5),
    (torch.bfloat16, math.inf, 0.5),
]
"""dtype, order, largest norm."""

SHAPES = [(1,), (3, 2), (4, 3), (2, 5), (), (7, 1), (6,)]
"""Of the parameters: on two to four ranks some shards are uneven and some empty."""


def make_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Whole gradients, the same on every rank, of very different size."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator) * 3.0 ** (index - 3)).to(dtype) for index, shape in enumerate(SHAPES)
    ]


class Layout:
    """Where the parameters of ``SHAPES`` lie: the axes of their meshes with placements; plain ones have none.

    Made inside of ``run_ranks``, since it starts process groups.
    """

    def __init__(self, name: str) -> None:
        sizes, self.layouts = LAYOUTS[name][1:]
        self.world = create_device_mesh(device_type="cpu", **sizes)

    def distribute(self, tensors: list[Tensor]) -> list[Tensor]:
        """Cut whole tensors that every rank has, without communication."""
        return [
            distribute_tensor(whole, get_mesh(self.world, axes), placements, src_data_rank=None) if axes else whole
            for whole, (axes, placements) in zip(tensors, self.layouts, strict=True)
        ]

    def make_parameters(self, gradients: list[Tensor]) -> list[nn.Parameter]:
        """Parameters with these gradients, and two without."""
        parameters = [nn.Parameter(torch.zeros(2))]
        for gradient in self.distribute([gradient.clone() for gradient in gradients]):
            parameters.append(nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        return [*parameters, nn.Parameter(torch.zeros(2))]

    def assert_gradients(self, parameters: list[nn.Parameter], expected: list[Tensor], **options: Any) -> None:
        """Compare this rank's shards with those of the expected whole gradients."""
        actual = [parameter.grad for parameter in parameters if parameter.grad is not None]
        expected = self.distribute(expected)
        torch.testing.assert_close([to_local(g) for g in actual], [to_local(g) for g in expected], **options)


def to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


HSDP = (DP_REPLICATE, DP_SHARD_CP)
DP_TP = (DP_SHARD_CP, TENSOR_PARALLEL)
SHARDED: list[tuple[Any, Any]] = [(DP_SHARD_CP, [Shard(0)]) if shape else ((), ()) for shape in SHAPES]
REPLICATED: list[tuple[Any, Any]] = [(HSDP, [Replicate(), Shard(0)]) if shape else ((), ()) for shape in SHAPES]
MIXED: list[tuple[Any, Any]] = [
    (DP_SHARD_CP, [Shard(0)]),
    (DP_TP, [Shard(0), Shard(1)]),
    (DP_TP, [Shard(0), Replicate()]),
    (TENSOR_PARALLEL, [Shard(1)]),
    ((), ()),
    (DP_TP, [Replicate(), Replicate()]),
    (DP_TP, [Shard(0), Shard(0)]),
]
LAYOUTS: dict[str, tuple[int, dict[str, int], list[tuple[Any, Any]]]] = {
    "one-rank": (1, {}, SHARDED),
    "two-ranks": (2, {}, SHARDED),
    "three-ranks": (3, {}, SHARDED),
    "four-ranks": (4, {}, SHARDED),
    "replicas": (4, {"dp_replicate_size": 2}, REPLICATED),
    "mixed-meshes": (4, {"tp_size": 2}, MIXED),
}


def clip_whole(dtype: torch.dtype, order: float, max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """The norm and the clipped gradients of one process, in float32."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, make_gradients(dtype), strict=True):
        parameter.grad = gradient.float()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, order)
    return norm, [parameter.grad for parameter in parameters]


@pytest.mark.guarantees("clipping-and-optimizers")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("two-ranks", "four-ranks") else ()) for name in LAYOUTS],
)
def test_clip_grad_norm_equals_torch_on_whole_gradients(name: str) -> None:
    def run() -> list[float]:
        layout = Layout(name)
        norms = []
        for dtype, order, max_norm in CLIPS:
            parameters = layout.make_parameters(make_gradients(dtype))
            norm = clip_grad_norm_(iter(parameters), max_norm, order)
            expected_norm, expected = clip_whole(dtype, order, max_norm)
            case = f"{dtype}, order {order}, max_norm {max_norm}"
            assert type(norm) is Tensor, case
            assert (norm.shape, norm.dtype) == ((), torch.float32), case
            assert abs(norm - expected_norm) <= 1e-5 * expected_norm, case
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            layout.assert_gradients(parameters, [g.to(dtype) for g in expected], rtol=tolerance, atol=0)
            norms.append(norm.item())
        return norms

    norms = run_ranks(run, LAYOUTS[name][0])
    assert all(own == norms[0] for own in norms), "the norm differs by rank"


def whole_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Gather the gradients; every rank must call it."""
    return [(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone() for p in parameters]


def test_clip_grad_norm_of_a_model_sharded_over_data_and_tensor_parallel_ranks() -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))
        references = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        world = create_device_mesh(tp_size=2, device_type="cpu")
        parallelize_module(model, get_mesh(world, TENSOR_PARALLEL), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=get_mesh(world, DP_SHARD_CP))
        model(torch.randn(3, 6)).square().sum().backward()
        parameters = list(model.parameters())
        for reference, gradient in zip(references, whole_gradients(parameters), strict=True):
            reference.grad = gradient
        expected = torch.nn.utils.clip_grad_norm_(references, 0.1)
        torch.testing.assert_close(clip_grad_norm_(parameters, 0.1), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(whole_gradients(parameters), [reference.grad for reference in references])

    run_ranks(run, 4)


def test_norm_without_any_gradient_is_zero() -> None:
    for parameters in ([], [nn.Parameter(torch.ones(3))]):
        norm = clip_grad_norm_(parameters, 1.0)
        assert type(norm) is Tensor
        assert norm.dtype == torch.float32
        assert norm == 0


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_bound_that_would_turn_gradients_around_is_refused(bound: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    for clip, name in ((clip_grad_norm_, "max_norm"), (clip_grad_value_, "clip_value")):
        with pytest.raises(ValueError, match=f"{name}={bound} must be 0 or more"):
            clip(parameter, bound)
    assert parameter.grad.tolist() == [1, 1]


def test_one_tensor_is_accepted_like_by_torch() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(parameter, 1.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    clip_grad_value_(parameter, 0.7)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.7]))


@pytest.mark.parametrize("value", [math.nan, math.inf, pytest.param(-math.inf, marks=pytest.mark.slow)], ids=str)
def test_a_nonfinite_gradient_of_one_rank_raises_on_all_before_any_is_touched(value: float) -> None:
    def run() -> None:
        layout = Layout("four-ranks")
        for order in ORDERS:
            for row in (0, 3):  # of the first and of the last rank
                gradients = make_gradients()
                gradients[2][row, 0] = value
                parameters = layout.make_parameters(gradients)
                assert not get_total_norm(parameters, order).isfinite(), f"order {order}, rank {row}"
                with pytest.raises(RuntimeError, match=f"norm of order {order} .* No gradient was changed"):
                    clip_grad_norm_(parameters, 0.1, order, error_if_nonfinite=True)
                layout.assert_gradients(parameters, gradients, rtol=0, atol=0, equal_nan=True)

    run_ranks(run, 4)


@pytest.mark.guarantees("clipping-and-optimizers")
def test_clip_grad_value_and_scale_gradients() -> None:
    def run() -> None:
        for name in ("four-ranks", "replicas", "mixed-meshes"):
            layout = Layout(name)
            for dtype in (torch.float32, torch.bfloat16):
                parameters = layout.make_parameters(make_gradients(dtype))
                with StepCounter() as counter:
                    clip_grad_value_(iter(parameters), 0.3)
                    scale_gradients(parameters, torch.tensor(0.25))
                assert counter.collectives == {}
                assert counter.host_syncs == 0
                expected = [gradient.clamp(-0.3, 0.3) * 0.25 for gradient in make_gradients(dtype)]
                layout.assert_gradients(parameters, expected, rtol=0, atol=0)

    run_ranks(run, 4)


FACTOR = torch.tensor(1.0039, dtype=torch.float64)
"""Is 1 in bfloat16."""


def make_plain_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, make_gradients(dtype), strict=True):
        parameter.grad = gradient
    parameters[1].grad[0] = torch.tensor([math.nan, math.inf])
    return parameters


def refuse_to_unscale(tensors: list[Tensor], *_: Any) -> None:
    """What CUDA says in torch 2.11."""
    raise NotImplementedError(
        f'"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for {tensors[0].dtype}'
    )


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scaled_gradients_are_rounded_once(
    dtype: torch.dtype, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_refused:
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse_to_unscale)
    parameters = make_plain_parameters(dtype)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = [(parameter.grad.to(wide) * FACTOR.to(wide)).to(dtype) for parameter in parameters]
    scale_gradients(parameters, FACTOR)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


def test_a_factor_of_16_bits_would_round_twice() -> None:
    for gradient in make_gradients(torch.bfloat16)[1:4]:
        assert not torch.equal((gradient.float() * FACTOR.float()).bfloat16(), gradient * FACTOR.bfloat16())


@pytest.mark.guarantees("scaled-gradients")
def test_gradients_are_scaled_and_clipped_by_one_operation_per_dtype() -> None:
    parameters = [parameter for dtype in (torch.bfloat16, torch.float32) for parameter in make_plain_parameters(dtype)]
    with StepCounter() as scaling:
        scale_gradients(parameters, FACTOR)
    with StepCounter() as clipping:
        clip_grad_norm_(parameters, 1.0)
    for counter in (scaling, clipping):
        scales = {name: count for name, count in counter.operations.items() if "mul_" in name or "unscale" in name}
        assert scales == {"aten::_foreach_mul_": 1, "aten::_amp_foreach_non_finite_check_and_unscale_": 1}
        assert counter.operations["aten::mul"] <= 1  # of the norm, to the factor
        assert counter.host_syncs == 0


def test_clipped_gradients_of_16_bits_are_rounded_once() -> None:
    parameters = make_plain_parameters(torch.bfloat16)
    parameters[1].grad = torch.ones_like(parameters[1])
    before = [parameter.grad.clone() for parameter in parameters]
    norm = clip_grad_norm_(parameters, 1.0)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(
            parameter.grad, (gradient.float() * (1.0 / (norm + 1e-6))).bfloat16(), rtol=0, atol=0
        )


def test_a_norm_costs_one_all_reduce_per_layout_and_no_host_sync() -> None:
    def run() -> None:
        for name, all_reduces in (("four-ranks", 1), ("replicas", 1), ("mixed-meshes", 4)):
            parameters = Layout(name).make_parameters(make_gradients())
            with StepCounter() as counter:
                clip_grad_norm_(parameters, 1.0)
            between_replicas = {"broadcast": 1} if name == "replicas" else {}
            assert counter.collectives == {"all_reduce": all_reduces, **between_replicas}
            assert counter.host_syncs == 0

    run_ranks(run, 4)


def test_replicas_that_round_otherwise_clip_by_the_same_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their shards' norms are added up by collectives of their own, for which a backend may choose another order."""
    reduce_power = gradients_module._reduce_power

    def reduce_in_another_order(power: Tensor, *args: Any) -> Tensor:
        power = reduce_power(power, *args)
        return power if dist.get_rank() < 2 else power * (1 + 1e-6)

    monkeypatch.setattr(gradients_module, "_reduce_power", reduce_in_another_order)

    def run() -> tuple[float, list[Tensor]]:
        parameters = Layout("replicas").make_parameters(make_gradients())
        norm = clip_grad_norm_(parameters, 0.5)
        return norm.item(), [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]

    (norm, first), _, (other_norm, second), _ = run_ranks(run, 4)
    assert norm == other_norm
    assert all(map(torch.equal, first, second))


@pytest.mark.guarantees("partial-gradients")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=str)
def test_partial_gradients_are_reduced_before_they_are_clipped(placement: Any) -> None:
    parts = torch.tensor([[3.0, -1.0], [5.0, -3.0]])

    def clip(clip: Any, bound: float) -> Tensor:
        mesh = get_mesh(create_device_mesh(device_type="cpu"), DP_SHARD_CP)
        is_partial = isinstance(placement, Partial)
        values = DTensor.from_local(torch.ones(2), mesh, [placement]) if is_partial else torch.ones(2)
        parameter = nn.Parameter(values if is_partial else distribute_tensor(values, mesh, [placement]))
        parameter.grad = DTensor.from_local(parts[dist.get_rank()], mesh, [Partial()])
        norm = clip([parameter], bound)
        assert norm is None or norm.item() == pytest.approx(80**0.5)
        assert parameter.grad.placements == (Replicate() if is_partial else placement,)
        return parameter.grad.full_tensor()

    def run() -> None:
        torch.testing.assert_close(clip(clip_grad_norm_, 1.0), torch.tensor([8.0, -4.0]) / 80**0.5)
        torch.testing.assert_close(clip(clip_grad_value_, 5.0), torch.tensor([5.0, -4.0]))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- deferred synchronisation


def get_sync_flags(model: nn.Module) -> set[tuple[bool, bool, bool]]:
    """(reduce-scatter, all-reduce, is the last backward) of every unit that holds parameters."""
    flags = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            group = state._fsdp_param_group
            if group is not None:
                flags.add((group.reduce_grads, group.all_reduce_grads, state._state_ctx.is_last_backward))
    return flags


@pytest.mark.parametrize(
    ("reduce_scatter", "deferred"),
    [(False, (False, False, True)), (True, (True, False, True))],
    ids=["all-communication", "all-reduce-only"],
)
def test_defer_grad_sync_restores_the_flags_after_an_exception(
    reduce_scatter: bool, deferred: tuple[bool, bool, bool]
) -> None:
    def fail_inside(model: nn.Module) -> None:
        with defer_grad_sync(model, reduce_scatter=reduce_scatter):
            assert get_sync_flags(model) == {deferred}
            raise KeyError("inside")

    def run() -> None:
        mesh = create_device_mesh(dp_replicate_size=2, device_type="cpu")
        model = fsdp2_strategy_parallelize(PlainTransformer(), mesh, mp_policy=MixedPrecisionPolicy())
        model(torch.ones(1, 2, dtype=torch.long)).sum().backward()
        assert get_sync_flags(model) == {(True, True, True)}
        with pytest.raises(KeyError, match="inside"):
            fail_inside(model)
        assert get_sync_flags(model) == {(True, True, True)}

    run_ranks(run, 2)


@pytest.mark.parametrize(
    "reduce_scatter", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all-communication", "all-reduce-only"]
)
def test_deferred_gradients_add_up(reduce_scatter: bool) -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = PlainTransformer()
        batches = torch.randint(100, (3, 4, 2, 5))  # [micro-batch, rank, sequence, token]
        references = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        torch.stack([model(batch).square().mean() for batch in batches.flatten(0, 1)]).sum().div(4).backward()
        for reference, parameter in zip(references, model.parameters(), strict=True):
            reference.grad, parameter.grad = parameter.grad, None
        mesh = create_device_mesh(dp_replicate_size=2, device_type="cpu")
        fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy())
        own = batches[:, dist.get_rank()]
        with defer_grad_sync(model, reduce_scatter=reduce_scatter):
            for batch in own[:-1]:
                model(batch).square().mean().backward()
        model(own[-1]).square().mean().backward()
        expected = [reference.grad for reference in references]
        torch.testing.assert_close(whole_gradients(list(model.parameters())), expected, rtol=1e-4, atol=1e-6)

    run_ranks(run, 4)


class SumOfParameters(nn.Module):
    """Autograd hands one gradient on to both parameters."""

    def __init__(self, wrap: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(wrap(torch.ones(4))) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        parameters = (self.first, self.second)
        first, second = (value.to_local() if isinstance(value, DTensor) else value for value in parameters)
        return inputs * (first + second)


def accumulate(model: nn.Module, deferred: int) -> list[Tensor]:
    model.zero_grad()
    with defer_grad_sync(model):
        for step in range(deferred):
            model(torch.full((4,), 1.0 + step)).sum().backward()
    model(torch.full((4,), 3.0)).sum().backward()
    return [
        parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in model.parameters()
    ]


@pytest.mark.guarantees("shared-gradients")
def test_deferred_gradients_of_parameters_that_share_one_are_separate() -> None:
    """Under tensor parallelism, where torch does not see that the other parameter holds the same memory."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        model = SumOfParameters(lambda tensor: distribute_tensor(tensor, mesh["tensor"], [Replicate()]))
        fully_shard(model, mesh=mesh["data"])
        for deferred in (1, 2):  # one leaves the sharing to the backward that synchronises, two to the other deferred
            for gradient in accumulate(model, deferred):
                assert torch.equal(gradient, torch.full((4,), 3.0 + deferred * (deferred + 1) / 2))

    run_ranks(run, 2)


def test_defer_grad_sync_ignores_a_model_that_is_not_sharded() -> None:
    model = nn.Linear(2, 2)
    with defer_grad_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_a_gradient_of_activations_looks_through_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module) -> Any:
        raise AssertionError("the units are looked through")

    def run() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        inputs = torch.ones(2, 4, requires_grad=True)
        hidden = model(inputs)
        with monkeypatch.context() as patch:
            patch.setattr(gradients_module, "get_fsdp_modules", refuse)
            assert choose_backward_inputs(model, (inputs, hidden), False) == [inputs, hidden]
        for accumulates in (False, True):
            plain = nn.Parameter(torch.ones(2))
            assert choose_backward_inputs(model, (plain, inputs), accumulates) == [plain, inputs]
        own = [*model.parameters()]
        chosen = choose_backward_inputs(model, (inputs, *own), True)
        assert chosen[0] is inputs
        assert [tensor.shape for tensor in chosen[1:]] == [parameter.shape for parameter in own]
        assert not any(isinstance(tensor, DTensor) for tensor in chosen)
        hidden.sum().backward(inputs=chosen)  # autograd knows all of them

    run_ranks(run, 2)
