"""Collectives forward and backward, against the same computation of all ranks in one process with autograd."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.ranks import run_ranks
from torch import Tensor

from lightning_fsdp2.ranks.collectives import (
    copy_last_to_ranks,
    copy_to_ranks,
    copy_together,
    exchange,
    gather_for_ranks,
    gather_shards,
    gather_twice,
    get_shard_range,
    reduce_from_ranks,
    reduce_scatter,
    split,
    sum_over_ranks,
)

DIMS = [0, 1, 2, -1]


def make_random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_shape(dim: int, size: int) -> list[int]:
    """Three dims, of which ``dim`` has ``size`` elements and the others differ."""
    shape = [2, 3, 5]
    shape[dim] = size
    return shape


def cut(whole: Tensor, dim: int, ranks: int) -> list[Tensor]:
    """Torch's own chunks, completed by empty ones."""
    parts = list(whole.chunk(ranks, dim))
    return parts + [whole.narrow(dim, 0, 0) for _ in range(ranks - len(parts))]


def assert_like_one_process(
    function: Callable[[Tensor], Tensor],
    in_one_process: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    *,
    is_input_equal: bool = False,
    is_result_used_equally: bool = False,
) -> None:
    """Compare this rank's result and gradient of ``function`` with those of the computation of all ranks together.

    Args:
        function: From this rank's input to its result.
        in_one_process: From the inputs of all ranks to all their results.
        inputs: Of all ranks.
        is_input_equal: Whether all ranks hold the same input, so that there is one for all of them.
        is_result_used_equally: Whether all ranks go on with their results in the same way, so that one stands for all.
    """
    rank = dist.get_rank()
    leaves = [value.clone().requires_grad_() for value in (inputs[:1] if is_input_equal else inputs)]
    results = in_one_process(leaves * len(inputs) if is_input_equal else leaves)
    weights = [make_random(100 + (0 if is_result_used_equally else r), *results[r].shape) for r in range(len(inputs))]
    losses = [(weight * result).sum() for weight, result in zip(weights, results, strict=True)]
    (losses[0] if is_result_used_equally else torch.stack(losses).sum()).backward()
    expected_gradient = leaves[0 if is_input_equal else rank].grad

    own = inputs[rank].mT.contiguous().mT.requires_grad_()  # not contiguous
    result = function(own)
    torch.testing.assert_close(result, results[rank], rtol=1e-12, atol=1e-12)
    # a gradient that is not contiguous either
    (weights[rank].transpose(0, -1) * result.transpose(0, -1)).sum().backward()
    torch.testing.assert_close(own.grad, expected_gradient, rtol=1e-12, atol=1e-12)


def get_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_of_whole_tensors(ranks: int) -> None:
    def run() -> None:
        group = get_group()
        equal = [make_random(0, 2, 3, 5)] * ranks
        different = [make_random(r, 2, 3, 5) for r in range(ranks)]
        assert_like_one_process(lambda own: copy_to_ranks(own, group), list, equal, is_input_equal=True)
        assert_like_one_process(
            lambda own: reduce_from_ranks(own, group),
            lambda summands: [torch.stack(summands).sum(0)] * ranks,
            different,
            is_result_used_equally=True,
        )
        assert_like_one_process(
            lambda own: sum_over_ranks(own, group), lambda summands: [torch.stack(summands).sum(0)] * ranks, different
        )

    run_ranks(run, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_and_split_of_even_uneven_and_empty_shards_along_any_dim(ranks: int) -> None:
    def run() -> None:
        group = get_group()
        for dim in DIMS:
            for size in (6, 7, ranks - 1, ranks + 1):  # the third leaves the last rank without any
                whole = make_random(0, *make_shape(dim, size))
                assert_like_one_process(
                    lambda own, dim=dim, size=size: gather_shards(own, dim, size, group),
                    lambda shards, dim=dim: [torch.cat(shards, dim)] * ranks,
                    cut(whole, dim, ranks),
                    is_result_used_equally=True,
                )
                assert_like_one_process(
                    lambda own, dim=dim: split(own, dim, group),
                    lambda equal, dim=dim: [cut(equal[r], dim, ranks)[r] for r in range(ranks)],
                    [whole] * ranks,
                    is_input_equal=True,
                )

    run_ranks(run, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_for_ranks_and_reduce_scatter_along_any_dim(ranks: int) -> None:
    def run() -> None:
        group = get_group()
        for dim in DIMS:
            assert_like_one_process(
                lambda own, dim=dim: gather_for_ranks(own, dim, group),
                lambda shards, dim=dim: [torch.cat(shards, dim)] * ranks,
                cut(make_random(0, *make_shape(dim, 6)), dim, ranks),
            )
            assert_like_one_process(
                lambda own, dim=dim: reduce_scatter(own, dim, group),
                lambda summands, dim=dim: cut(torch.stack(summands).sum(0), dim, ranks),
                [make_random(r, *make_shape(dim, 6)) for r in range(ranks)],
            )

    run_ranks(run, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchange_of_any_numbers_of_rows(ranks: int) -> None:
    sent = [[3, 0, 1], [2, 1, 4], [0, 5, 2]]  # by each rank to each rank

    def send(inputs: list[Tensor]) -> list[Tensor]:
        parts = [rows.split(sent[rank][:ranks]) for rank, rows in enumerate(inputs)]
        return [torch.cat([part[rank] for part in parts]) for rank in range(ranks)]

    def run() -> None:
        rank, received = dist.get_rank(), [sent[other][dist.get_rank()] for other in range(ranks)]
        assert_like_one_process(
            lambda own: exchange(own, sent[rank][:ranks], received, get_group()),
            send,
            [make_random(r, sum(sent[r][:ranks]), 2, 3) for r in range(ranks)],
        )

    run_ranks(run, ranks)


def test_copy_of_the_last_features_sums_only_their_gradients() -> None:
    def run() -> None:
        own = make_random(0, 2, 5).requires_grad_()
        weights = [make_random(1 + rank, 2, 5) for rank in range(2)]
        copied = copy_last_to_ranks(own, 3, get_group())
        assert torch.equal(copied, own)
        (copied * weights[dist.get_rank()]).sum().backward()
        expected = weights[dist.get_rank()].clone()
        expected[:, 2:] = (weights[0] + weights[1])[:, 2:]
        torch.testing.assert_close(own.grad, expected, rtol=1e-12, atol=1e-12)

    run_ranks(run, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_twice_costs_one_all_gather_and_treats_its_two_gradients_differently(ranks: int) -> None:
    def run() -> None:
        group, rank = get_group(), dist.get_rank()
        for dim in (0, 1):
            whole = make_random(0, *make_shape(dim, 6))
            weight = make_random(1, *whole.shape)  # of what all ranks do alike
            weights = [make_random(2 + r, *whole.shape) for r in range(ranks)]  # of what each does
            own = cut(whole, dim, ranks)[rank].clone().requires_grad_()
            with StepCounter() as counter:
                complete, partial = gather_twice(own, dim, group)
            assert counter.collectives == {"all_gather": 1}
            assert torch.equal(complete, whole)
            assert torch.equal(partial, whole)
            assert complete.data_ptr() == partial.data_ptr()

            with StepCounter() as counter:
                (gradient,) = torch.autograd.grad((complete * weight).sum(), own, retain_graph=True)
            assert counter.collectives == {}
            torch.testing.assert_close(gradient, cut(weight, dim, ranks)[rank], rtol=0, atol=0)
            with StepCounter() as counter:
                (gradient,) = torch.autograd.grad((partial * weights[rank]).sum(), own, retain_graph=True)
            assert counter.collectives == {"reduce_scatter": 1}
            summed = torch.stack(weights).sum(0)
            torch.testing.assert_close(gradient, cut(summed, dim, ranks)[rank], rtol=1e-12, atol=1e-12)
            (gradient,) = torch.autograd.grad((complete * weight + partial * weights[rank]).sum(), own)
            torch.testing.assert_close(gradient, cut(weight + summed, dim, ranks)[rank], rtol=1e-12, atol=1e-12)

    run_ranks(run, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_copy_together_sums_gradients_of_mixed_dtypes_in_float32_with_one_all_reduce(ranks: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    shapes = [(3,), (2, 4), (), (300,)]

    def run() -> None:
        tensors = [torch.ones(s, dtype=d, requires_grad=True) for s, d in zip(shapes, dtypes, strict=True)]
        weights = [
            [
                make_random(10 * r + i, *shape).to(dtype)
                for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
            ]
            for r in range(ranks)
        ]
        with StepCounter() as counter:
            copies = copy_together(tensors, get_group())
        assert counter.collectives == {}
        for copy, tensor in zip(copies, tensors, strict=True):
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy, tensor)
        own = weights[dist.get_rank()]
        with StepCounter() as counter:
            # the third one is not used: its gradient is zero on every rank
            torch.stack([(copies[i] * own[i]).float().sum() for i in (0, 1, 3)]).sum().backward()
        assert counter.collectives == {"all_reduce": 1}
        for i, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
            expected = torch.stack([weights[r][i].float() for r in range(ranks)]).sum(0).to(dtype) * (i != 2)
            torch.testing.assert_close(tensor.grad, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6)

    run_ranks(run, ranks)


def test_shard_ranges_are_those_of_torch_chunk() -> None:
    for size in range(10):
        for ranks in (1, 2, 3, 4):
            parts = cut(torch.arange(size), 0, ranks)
            for rank in range(ranks):
                start, length = get_shard_range(size, rank, ranks)
                assert torch.arange(size)[start : start + length].tolist() == parts[rank].tolist(), (size, rank, ranks)


@pytest.mark.slow  # importing the compiler takes ten seconds
@pytest.mark.parametrize("batch_size", [1, 2])  # of one, a shard would be contiguous where it lies
def test_collectives_are_traced_as_one_graph(batch_size: int) -> None:
    def run() -> None:
        group, rank = get_group(), dist.get_rank()

        def compute(hidden: Tensor, weight: Tensor) -> Tensor:
            complete, partial = gather_twice(hidden, 1, group)
            shared = copy_to_ranks(weight, group)
            return reduce_scatter(partial * shared, 1, group) + split(complete * weight, 1, group)

        wholes = [make_random(0, batch_size, 4, 3), make_random(1, 3)]
        results = []
        for function in (compute, torch.compile(compute, backend="aot_eager", fullgraph=True)):
            hidden, weight = cut(wholes[0], 1, 2)[rank].clone().requires_grad_(), wholes[1].clone().requires_grad_()
            output = function(hidden, weight)
            output.square().sum().backward()
            results.append([output.detach(), hidden.grad, weight.grad])
        torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)

    run_ranks(run, 2)
