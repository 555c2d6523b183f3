"""What Python reads from a DTensor is the value of the whole tensor, on every rank; the oracle is the plain tensor."""

import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import assert_equal_gradients, whole
from helpers.ranks import RankError, raises_on_all_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.compat.dtensor import compute_as_dtensor, set_handler
from lightning_fsdp2.compat.torch import set_group_timeout
from lightning_fsdp2.ranks import whole_values
from lightning_fsdp2.ranks.whole_tensors import gather
from lightning_fsdp2.ranks.whole_values import get_whole, treat_dtensors_as_whole

REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "norm 0": lambda x: x.norm(0),
    "norm 1": lambda x: x.norm(1),
    "norm 3": lambda x: x.norm(3),
    "norm inf": lambda x: x.norm(math.inf),
    "norm -inf": lambda x: x.norm(-math.inf),
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "norm of norms": lambda x: torch.stack([x.norm(), x.norm(1)]).norm(),
    "total norm": lambda x: nn.utils.get_total_norm([x, 2 * x]),
    "foreach norm": lambda x: torch._foreach_norm([x])[0],
    "foreach max": lambda x: torch._foreach_max([x])[0],
    "norm of columns": lambda x: x.norm(dim=0)[1],
    "norm of rows": lambda x: x.norm(dim=1)[4],
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "aminmax": lambda x: x.aminmax().max,
    "absmax": lambda x: x.abs().max(),
    "max of columns": lambda x: x.max(0).values[2],
    "row of max": lambda x: x.max(0).indices[3],
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(),
    "argmax of columns": lambda x: x.argmax(0)[0],
    "median": lambda x: x.median(),
    "median of columns": lambda x: x.median(0).values[0],
    "nansum": lambda x: x.nansum(),
    "prod": lambda x: x.prod(),
    "std": lambda x: x.std(),
    "var": lambda x: x.var(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "count_nonzero": lambda x: (x > 0).count_nonzero(),
    "count": lambda x: (x > 0).sum(),
    "dist": lambda x: torch.dist(x, x * x),
    "mse": lambda x: F.mse_loss(x, x * x),
    "mse sum": lambda x: F.mse_loss(x, x * x, reduction="sum"),
    "l1": lambda x: F.l1_loss(x, x * x),
    "cumsum": lambda x: x.cumsum(0)[4, 3],
    "histc": lambda x: x.histc(4, -2, 2)[1],
    "element": lambda x: x[4, 3],
}

CHECKS: dict[str, Callable[[Tensor], Any]] = {
    "any NaN": lambda x: bool(torch.isnan(x).any()),
    "all finite": lambda x: bool(torch.isfinite(x).all()),
    "sum is NaN": lambda x: math.isnan(x.sum()),
    "norm is finite": lambda x: bool(x.norm().isfinite()),
    "if": lambda x: [1] if (x > 1.9).any() else [],
    "is_nonzero": lambda x: torch.is_nonzero((x > 1.9).any()),
    "count of NaN": lambda x: int(torch.isnan(x).sum()),
    "max is finite": lambda x: math.isfinite(x.max().item()),
    "min is NaN": lambda x: bool(torch.isnan(x.min())),
    "max norm": lambda x: bool(x.norm(math.inf) > 1),
    "equal": lambda x: torch.equal(x, x.nan_to_num(3.0)),
    "allclose": lambda x: torch.allclose(x, x.clamp(max=1.9)),
}

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.norm().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int((x * 10).sum()),
    "complex": lambda x: complex(x.sum()).real,
    "bool": lambda x: bool(x.sum() > 6),
    "index": lambda x: len([0] * int((x > 0).sum())),
    "format": lambda x: f"{x.norm():.3f} {x.max():>6.2f}",
    "old format": lambda x: f"{x.sum():.2e}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "asarray": lambda x: np.asarray(x.sum()).tolist(),
    "sqrt": lambda x: math.sqrt((x * x).sum()),
    "sum of squares": lambda x: sum(part.norm(2).item() ** 2 for part in (x, 2 * x)),
    "max of Python": lambda x: max(x.norm(), x.sum()).item(),
}


def get_table() -> dict[str, Callable[[Tensor], Any]]:
    reductions = {name: lambda x, reduce=reduce: reduce(x).item() for name, reduce in REDUCTIONS.items()}
    return {**reductions, **CHECKS, **READS}


def make_values(bad: bool) -> Tensor:
    values = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))  # uneven over two ranks
    if bad:
        values[-1] = math.nan
    return values


def make_sharded_values() -> DTensor:
    mesh = init_device_mesh("cpu", (2,))
    treat_dtensors_as_whole(mesh)
    return distribute_tensor(make_values(bad=False), mesh, [Shard(0)])


def check(layouts: dict[str, tuple[tuple[int, ...], list[Any]]]) -> None:
    for layout, (shape, placements) in layouts.items():
        mesh = init_device_mesh("cpu", shape)
        treat_dtensors_as_whole(mesh)
        for name, read in get_table().items():
            for bad in (False, True) if name in CHECKS else (False,):
                whole = make_values(bad)
                value = read(distribute_tensor(whole.clone(), mesh, placements))
                expected = read(whole)
                assert type(value) is type(expected), (layout, name, value)
                assert value == expected or value == pytest.approx(expected, rel=1e-5), (layout, name, value, expected)


@pytest.mark.guarantees("whole-values")
def test_every_reduction_check_and_way_to_read_gives_the_value_of_the_whole() -> None:
    run_ranks(check, 2, {"rows": ((2,), [Shard(0)])})


@pytest.mark.slow
def test_values_of_every_layout_are_those_of_the_whole() -> None:
    run_ranks(
        check,
        4,
        {
            "columns": ((4,), [Shard(1)]),
            "replicas of rows": ((2, 2), [Replicate(), Shard(0)]),
            "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
            "rows twice": ((2, 2), [Shard(0), Shard(0)]),
            "replicated": ((2, 2), [Replicate(), Replicate()]),
        },
    )


def _check_fully_sharded_after_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    treat_dtensors_as_whole(mesh)
    torch.manual_seed(0)
    layer = nn.Linear(4, 8)
    whole = layer.weight.detach().clone()
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    with torch.no_grad():
        assert layer.weight.norm().item() == pytest.approx(whole.norm().item(), rel=1e-6)
        assert layer.weight.tolist() == whole.tolist()
        assert layer.weight.argmax().item() == whole.argmax().item()


@pytest.mark.slow
def test_a_weight_that_is_sharded_twice_is_read_in_its_own_order() -> None:
    run_ranks(_check_fully_sharded_after_tensor_parallel, 4)


def read_on_one_rank(limit: float) -> None:
    values = make_sharded_values()
    set_group_timeout(values.device_mesh.get_group(), timedelta(seconds=2 * limit))
    norm = values.norm()
    if dist.get_rank() == 0:
        assert "placements" in f"{norm}"  # shown as by `repr`, without the other ranks
        norm.item()  # the line that the error names
    time.sleep(2 * limit)


@pytest.mark.guarantees("value-on-one-rank")
def test_a_value_that_one_rank_reads_alone_is_an_error_that_names_the_line() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(read_on_one_rank, 2, 1.0)
    message = str(caught.value.failures[0])
    line = read_on_one_rank.__code__.co_firstlineno + 6
    assert f"{os.path.basename(__file__)}:{line}: rank 0 reads" in message
    assert re.search(r"within 0:00:01.*full_tensor\(\).*GradientNorm", message)


def _read_in_different_lines() -> None:
    values = make_sharded_values()
    if dist.get_rank() == 0:
        values.norm().item()
    else:
        values.sum().item()


def test_values_that_ranks_read_in_different_lines_are_an_error_on_all_of_them() -> None:
    with raises_on_all_ranks(RuntimeError, "another one reads a value in another line"):
        run_ranks(_read_in_different_lines, 2)


def _read_on_a_part_of_the_world() -> None:
    """Each pair of ranks reads another number of values, as pipeline stages do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    treat_dtensors_as_whole(mesh)
    values = distribute_tensor(make_values(bad=False), mesh, [Shard(0)])
    for _ in range(1 + dist.get_rank() // 2):
        assert values.norm().item() == pytest.approx(make_values(bad=False).norm().item())
        assert torch.equal(values, values.clone())


@pytest.mark.slow
def test_only_the_ranks_that_hold_a_value_read_it() -> None:
    run_ranks(_read_on_a_part_of_the_world, 4)


def make_optimizers(parameters: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    for options in ({"foreach": True}, {"foreach": False}):
        yield torch.optim.AdamW(parameters, weight_decay=0.1, **options)
        yield torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)
    yield torch.optim.AdamW(parameters, fused=True)
    for kind in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax):
        yield kind(parameters)
    yield torch.optim.AdamW(parameters, torch.tensor(0.1), amsgrad=True, foreach=False)


def _count_reads_of_steps() -> None:
    layer = nn.Linear(4, 5)
    fully_shard(layer)
    treat_dtensors_as_whole(layer.weight.device_mesh)
    reads = []
    whole_values._check_all_ranks_read = reads.append
    for optimizer in make_optimizers(list(layer.parameters())):
        for _ in range(2):
            layer(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not reads, optimizer


def test_steps_of_optimizers_read_no_value_of_other_ranks() -> None:
    run_ranks(_count_reads_of_steps, 2)


def _read_a_tensor_that_only_some_ranks_hold() -> None:
    mesh = init_device_mesh("cpu", (2,))
    treat_dtensors_as_whole(mesh)
    whole = make_values(bad=False)[:1]
    for name in ("max", "min", "amax", "amin", "aminmax", "norm inf", "norm -inf", "norm", "sum", "argmax", "absmax"):
        value, expected = (REDUCTIONS[name](one) for one in (distribute_tensor(whole, mesh, [Shard(0)]), whole))
        assert value.item() == pytest.approx(expected.item(), rel=1e-6), name


def test_a_tensor_with_fewer_rows_than_ranks_has_a_largest_value() -> None:
    run_ranks(_read_a_tensor_that_only_some_ranks_hold, 2)


def _read_other_kinds() -> None:
    mesh = init_device_mesh("cpu", (2,))
    treat_dtensors_as_whole(mesh)
    values = distribute_tensor(make_values(bad=False), mesh, [Shard(0)]).requires_grad_()
    assert values.sum().item() == pytest.approx(make_values(bad=False).sum().item())  # also of what has a gradient
    with pytest.raises(RuntimeError, match="requires grad"):
        values.numpy()
    assert "placements" in f"{values.detach()}"  # as in a debugger, without the other ranks
    assert torch.equal(get_whole(values.detach()), make_values(bad=False))
    detached = values.detach()
    with torch.inference_mode():
        assert detached.max().item() == make_values(bad=False).max().item()
    meta = distribute_tensor(torch.empty(4, 2, device="meta"), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(RuntimeError, match="meta"):
        meta.sum().item()


def test_gradients_inference_mode_and_the_meta_device_are_as_for_plain_tensors() -> None:
    run_ranks(_read_other_kinds, 2)


COMBINATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda loss, penalty: loss + 0.1 * penalty,
    "+ a loss": lambda loss, penalty: penalty + loss,
    "sum": lambda loss, penalty: sum([loss, penalty]),  # type: ignore[arg-type, return-value]
    "-": lambda loss, penalty: loss - penalty,
    "- a loss": lambda loss, penalty: penalty - loss,
    "*": lambda loss, penalty: loss * penalty,
    "/": lambda loss, penalty: loss / penalty,
    "/ a loss": lambda loss, penalty: penalty / loss,
    "**": lambda loss, penalty: loss ** (0.01 * penalty),
    "/ a value of the batch": lambda loss, penalty: loss + penalty / loss.detach(),
    "times a tensor": lambda loss, penalty: loss + torch.tensor(0.3) * penalty,
    "whole": lambda loss, penalty: loss * (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty),
}
"""Ways to combine a batch's loss with a penalty on weights. In some, the penalty's gradient depends on the batch."""


def make_llama() -> Any:
    torch.manual_seed(0)
    return make_causal_lm({**LLAMA, "num_hidden_layers": 2})


def penalise(model: nn.Module, name: str) -> Tensor:
    return sum(weight.square().sum() for key, weight in model.named_parameters() if name in key)  # type: ignore[return-value]


def check_penalties(sizes: dict[str, int], names: tuple[str, ...]) -> None:
    """Compare gradients with those of one process, for penalties on the weights that have one of ``names`` in theirs.

    Each data parallel rank has another batch, and so another loss.
    """
    tp_size, mesh = sizes.get("tp_size", 1), create_device_mesh(**sizes)
    batches = make_token_batches(mesh.size() // tp_size, ragged=False)
    own, model, alone = batches[dist.get_rank() // tp_size], make_llama(), make_llama()
    FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh).parallelize(model)
    for name, combine in itertools.product(names, COMBINATIONS.values()):
        losses = [combine(alone(**batch).loss, penalise(alone, name)) for batch in batches]
        torch.stack(losses).mean().backward()
        loss = combine(model(**own).loss, penalise(model, name))
        loss.backward()
        torch.testing.assert_close(loss.detach(), losses[dist.get_rank() // tp_size].detach())
        gradients = whole({key: weight.grad for key, weight in model.named_parameters()})
        expected = {key: weight.grad for key, weight in alone.named_parameters()}
        assert_equal_gradients(gradients, expected)
        model.zero_grad()
        alone.zero_grad()


def test_a_penalty_on_weights_has_the_gradients_of_one_process() -> None:
    run_ranks(check_penalties, 2, {}, ("layers.0",))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"dp_replicate_size": 2}, {"tp_size": 2}], ids=str)
def test_it_has_them_on_every_mesh(sizes: dict[str, int]) -> None:
    run_ranks(check_penalties, 4, sizes, ("layers.0", ""))


def make_losses() -> dict[str, Callable[..., Tensor]]:
    """Return all losses of torch that take DTensors, as functions of probabilities and targets in rows."""
    return {
        **{name: getattr(F, name) for name in ("mse_loss", "l1_loss", "kl_div", "poisson_nll_loss")},
        "smooth_l1_loss": lambda x, y, **options: F.smooth_l1_loss(x, y, beta=0.1, **options),
        "huber_loss": lambda x, y, **options: F.huber_loss(x, y, delta=0.1, **options),
        "binary_cross_entropy": lambda x, y, **options: F.binary_cross_entropy(x, y, y + 1, **options),
        "with_logits": lambda x, y, **options: F.binary_cross_entropy_with_logits(x, y, y + 1, **options),
        "soft_margin_loss": lambda x, y, **options: F.soft_margin_loss(x, sign(y), **options),
        "gaussian_nll_loss": lambda x, y, **options: F.gaussian_nll_loss(x, y, y + 1, **options),
        "hinge_embedding_loss": lambda x, y, **options: F.hinge_embedding_loss(x, sign(y), **options),
        "cosine_embedding_loss": lambda x, y, **options: F.cosine_embedding_loss(x, y, sign(y[:, 0]), **options),
        "margin_ranking_loss": lambda x, y, **options: F.margin_ranking_loss(x, y, sign(y), **options),
        "triplet_margin_loss": lambda x, y, **options: F.triplet_margin_loss(x, y, x * y, **options),
        "nll_loss": lambda x, y, **options: F.nll_loss(x, classes(y), **options),
        "cross_entropy": lambda x, y, **options: F.cross_entropy(x, classes(y), label_smoothing=0.1, **options),
        "of classes": lambda x, y, **options: F.cross_entropy(x, classes(y), y[0] + 1, **options),
        "of some": lambda x, y, **options: F.cross_entropy(x, classes(y), ignore_index=0, **options),
        "of probabilities": lambda x, y, **options: F.cross_entropy(x, y, **options),
    }


def sign(values: Tensor) -> Tensor:
    return (values > 0.5) * 2.0 - 1


def classes(values: Tensor) -> Tensor:
    return (values[:, 0] * 3).long()


def _compute_losses(names: list[str], reductions: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    treat_dtensors_as_whole(mesh)
    generator = torch.Generator().manual_seed(0)
    for rows in (4, 5):
        values = [0.01 + 0.98 * torch.rand(rows, 3, generator=generator) for _ in range(2)]
        for name in names:
            for reduction in reductions:
                loss, results = make_losses()[name], []
                for first, second in (values, [distribute_tensor(one, mesh, [Shard(0)]) for one in values]):
                    first = first.detach().clone().requires_grad_()
                    result = loss(first, second, reduction=reduction).square().sum()
                    result.backward()
                    results.append([gather(result.detach()), gather(first.grad)])
                torch.testing.assert_close(*results, msg=f"{name} {reduction} {rows}")


def test_mean_losses_of_shards_and_their_gradients_are_those_of_the_whole() -> None:
    run_ranks(_compute_losses, 2, ["mse_loss", "with_logits", "of classes"], ["mean"])


@pytest.mark.slow
def test_all_losses_of_shards_and_their_gradients_are_those_of_the_whole() -> None:
    run_ranks(_compute_losses, 2, list(make_losses()), ["mean", "sum", "none"])


def _compute_on_other_meshes() -> None:
    """Compute on a mesh of this package, and on one that is not: slices of a mesh are as the mesh."""
    meshes = [init_device_mesh("cpu", (2, 1), mesh_dim_names=(name, "other")) for name in ("own", "foreign")]
    treat_dtensors_as_whole(meshes[0]["own"])
    whole = make_values(bad=False)
    own, foreign = (distribute_tensor(whole, mesh[mesh.mesh_dim_names[0]], [Shard(0)]) for mesh in meshes)
    parts = [whole[:3], whole[3:]][dist.get_rank()]
    assert own.norm().item() == pytest.approx(whole.norm().item())
    assert foreign.norm().item() == pytest.approx(parts.norm().item())  # as torch does
    with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
        foreign.numpy()
    assert F.mse_loss(foreign, 0 * foreign).full_tensor() != pytest.approx(whole.square().mean().item())
    assert torch.equal(foreign, foreign)
    with pytest.raises(TypeError, match="unsupported format"):
        f"{foreign.norm():.3f}"
    torch.manual_seed(0)
    assert torch.equal(
        foreign.normal_().to_local(), torch.randn(parts.shape, generator=torch.Generator().manual_seed(0))
    )


def test_dtensors_on_meshes_of_other_libraries_are_left_alone() -> None:
    run_ranks(_compute_on_other_meshes, 2)


def _find_extremes_of_columns() -> None:
    mesh = init_device_mesh("cpu", (2,))
    treat_dtensors_as_whole(mesh)
    values = make_values(bad=False)
    values[0, 1] = math.nan
    sharded = distribute_tensor(values, mesh, [Shard(0)])
    gathers: list[Any] = []
    torch.distributed._functional_collectives.all_gather_tensor = lambda *args, **options: gathers.append(args)
    for name in ("amax", "amin"):
        assert torch.equal(getattr(sharded, name)(0).full_tensor().isnan(), getattr(values, name)(0).isnan())
        torch.testing.assert_close(getattr(sharded, name)(0).full_tensor(), getattr(values, name)(0), equal_nan=True)
    assert not gathers


def test_an_extreme_is_all_reduced_and_keeps_a_nan_of_any_rank() -> None:
    run_ranks(_find_extremes_of_columns, 2)


def _compute_in_threads() -> int:
    mesh, calls = init_device_mesh("cpu", (1,)), []
    treat_dtensors_as_whole(mesh)
    values = distribute_tensor(make_values(bad=False), mesh, [Shard(0)])
    operation = torch.ops.aten.linalg_vector_norm.default

    def handle(*args: Any) -> Any:
        calls.append(args)
        return compute_as_dtensor(*args)

    set_handler(operation, handle)
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: torch.linalg.vector_norm(values), range(200)))
    return len(calls)


def test_every_thread_reaches_a_handler_while_another_computes() -> None:
    assert run_ranks(_compute_in_threads, 1) == [200]
