"""The pieces of a DTensor that a rank holds: packed, uneven or both, and what checkpoints are told about them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_fsdp2.checkpoint.stored_shards import PiecewiseTensor, describe_shards, get_first_rows, is_unusual
from lightning_fsdp2.compat.torch import StridedShard
from lightning_fsdp2.ranks.pieces import (
    UNEVEN_SHARD,
    get_packed_placements,
    get_pieces,
    without_uneven_axis,
)
from lightning_fsdp2.ranks.whole_tensors import gather, get_first_row, make_dtensor, reshard_like

GATE_AND_UP = StridedShard(0, split_factor=2)

CASES: dict[str, tuple[tuple[int, ...], list[Any], list[int]]] = {
    "one axis": ((4,), [Shard(0)], []),
    "packed alone": ((4,), [GATE_AND_UP], [0]),
    "packed, the last axis": ((2, 4), [Shard(1), GATE_AND_UP], [1]),
    "packed, the first axis": ((4, 2), [GATE_AND_UP, Shard(1)], [0]),
    "packed, between others": ((2, 2, 2), [Replicate(), GATE_AND_UP, Shard(1)], [1]),
    "packed along dim 1": ((2, 4), [Shard(0), StridedShard(1, split_factor=3)], [1]),
    "a shard cut once more": ((2, 4), [StridedShard(0, split_factor=4), Shard(0)], []),
    "a shard of two axes cut once more": ((2, 2, 2), [StridedShard(0, split_factor=4), Shard(0), Shard(0)], []),
    "other dims do not count": ((2, 2, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)], []),
    "what Megatron-FSDP cuts once more": ((1, 2, 2), [Replicate(), GATE_AND_UP, Shard(0)], [1]),
    "replicas do not count": ((2, 2, 2), [StridedShard(0, split_factor=2), Replicate(), Shard(0)], []),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_placements_by_the_axis_of_the_mesh(name: str) -> None:
    shape, placements, expected = CASES[name]

    def run() -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=torch.Size(shape).numel())
        names = ("dp_replicate", "tensor_parallel", UNEVEN_SHARD) if "Megatron" in name else None
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        tensor = DTensor.from_local(
            torch.zeros(2, 2), mesh, placements, run_check=False, shape=(96, 96), stride=(96, 1)
        )
        assert get_packed_placements(tensor) == {axis: placements[axis] for axis in expected}

    run_ranks(run, 1, group=False)


def test_what_fsdp2_cuts_once_more_is_not_packed() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(torch.nn.Linear(8, 8), mesh["tensor"], ColwiseParallel())
        fully_shard(model, mesh=mesh["data"])
        assert isinstance(model.weight.placements[0], StridedShard)
        assert get_packed_placements(model.weight) == {}

    run_ranks(run, 4)


def test_a_mesh_without_the_uneven_axis_is_the_same_mesh() -> None:
    def run() -> None:
        for names in (None, ("data", "tensor_parallel")):
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
            assert without_uneven_axis(mesh) is mesh
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", UNEVEN_SHARD))
        even = without_uneven_axis(mesh)
        assert even.mesh_dim_names == ("data", "even_shard")
        assert torch.equal(even.mesh, mesh.mesh)
        assert even.get_all_groups() == mesh.get_all_groups()

    run_ranks(run, 2)


def take_packed(whole: Tensor, dim: int, parts: int, rank: int, ranks: int) -> Tensor:
    """This rank's shard of each of several projections, one after the other."""
    return torch.cat([part.chunk(ranks, dim)[rank] for part in whole.chunk(parts, dim)], dim)


WHOLE = torch.arange(24 * 10.0).reshape(24, 10)
SHARDS: dict[str, tuple[tuple[int, ...], list[Any], Any]] = {
    "even": ((4,), [Shard(0)], lambda rows: WHOLE.chunk(4)[rows]),
    "shorter at the end": ((3,), [Shard(1)], lambda columns: WHOLE.chunk(3, 1)[columns]),
    "packed rows": ((4,), [GATE_AND_UP], lambda rank: take_packed(WHOLE, 0, 2, rank, 4)),
    "packed columns of a part of the rows": (
        (2, 2),
        [Shard(0), StridedShard(1, split_factor=5)],
        lambda rows, columns: take_packed(WHOLE.chunk(2)[rows], 1, 5, columns, 2),
    ),
    "replicas of packed rows": ((2, 2), [Replicate(), GATE_AND_UP], lambda _, rank: take_packed(WHOLE, 0, 2, rank, 2)),
    "what the last axis has left, cut once more": (
        (2, 2),
        [StridedShard(0, split_factor=2), Shard(0)],
        lambda outer, inner: WHOLE.chunk(2)[inner].chunk(2)[outer],
    ),
}


@pytest.mark.guarantees("nothing-is-converted")
@pytest.mark.parametrize("name", SHARDS)
def test_pieces_are_where_the_shards_come_from(name: str) -> None:
    shape, placements, take = SHARDS[name]

    def run() -> list[bool]:
        mesh = init_device_mesh("cpu", shape)
        local = take(*mesh.get_coordinate())
        tensor = make_dtensor(local, mesh, placements, WHOLE.shape)
        return check_pieces(tensor, 0)

    assert all(run_ranks(run, torch.Size(shape).numel()))


def check_pieces(tensor: DTensor, first_row: int) -> bool:
    """Whether the pieces cover this rank's part, and are equal to the parts of the whole that they name."""
    covered = torch.zeros_like(tensor.to_local())
    for piece in get_pieces(tensor, first_row):
        covered[piece.local] += 1
        assert torch.equal(tensor.to_local()[piece.local], WHOLE[piece.whole])
    return bool((covered == 1).all())


@pytest.mark.parametrize("cut", [0, 3, 8], ids=["none first", "some", "all first"])
@pytest.mark.parametrize(
    ("placement", "take"),
    [
        (Replicate(), lambda rank: WHOLE[:8]),
        (Shard(0), lambda rank: WHOLE[:16].chunk(2)[rank]),
        (Shard(1), lambda rank: WHOLE[:8].chunk(2, 1)[rank]),
        (GATE_AND_UP, lambda rank: take_packed(WHOLE[:16], 0, 2, rank, 2)),
    ],
    ids=["replicated", "rows", "columns", "packed"],
)
def test_uneven_shards_of_tensor_parallel_parts(cut: int, placement: Any, take: Any) -> None:
    """Each part has eight rows, and the first of two data parallel ranks holds ``cut`` of them."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "tensor_parallel", UNEVEN_SHARD))
        part = take(mesh.get_local_rank(1))
        start, end = ((0, cut), (cut, 8))[mesh.get_local_rank(2)]
        local = part[start:end].clone()
        shape = WHOLE[: 8 if placement in (Replicate(), Shard(1)) else 16].shape
        tensor = make_dtensor(local, mesh, [Replicate(), placement, Shard(0)], shape)
        assert get_first_row(tensor) == start
        assert check_pieces(tensor, start)
        whole = gather(tensor)
        assert torch.equal(whole, WHOLE[: len(whole)])
        assert torch.equal(reshard_like(whole.double(), tensor).to_local(), local.double())
        described = describe_shards(tensor, get_first_rows([whole, tensor])[1])
        assert_saved(described, tensor, len(whole))

    run_ranks(run, 4)


def test_even_axes_may_cut_the_same_rows_before_the_uneven_one() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "tensor_parallel", UNEVEN_SHARD))
        local = WHOLE.chunk(2)[mesh.get_local_rank(0)].chunk(2)[mesh.get_local_rank(1)]
        assert torch.equal(gather(make_dtensor(local, mesh, [Shard(0)] * 3, WHOLE.shape)), WHOLE)

    run_ranks(run, 4)


def assert_saved(described: PiecewiseTensor, tensor: DTensor, rows: int) -> None:
    """What the ranks write covers the tensor once, and comes from the memory of ``tensor``."""
    items = described.__create_write_items__("key", described)
    written = [(item.index.offset, described.__get_tensor_shard__(item.index)) for item in items]
    storage = tensor.to_local().untyped_storage().data_ptr()
    assert all(piece.untyped_storage().data_ptr() == storage for _, piece in written if piece.numel())
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, [(tuple(offset), piece.clone()) for offset, piece in written])
    whole = torch.full((rows, 10), -1.0)
    for offset, piece in (each for pieces in everywhere for each in pieces):
        place = tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))
        assert (whole[place] == -1).all()
        whole[place] = piece
    assert torch.equal(whole, WHOLE[:rows])


@pytest.mark.parametrize(
    ("shape", "last"), [((2, 1, 1), Shard(0)), ((1, 1, 2), Replicate())], ids=["replicas", "zero 0"]
)
def test_a_tensor_without_elements_needs_no_description_and_copies_share_the_writing(
    shape: tuple[int, ...], last: Any
) -> None:
    def run() -> int:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "tensor_parallel", UNEVEN_SHARD))
        placements = [Replicate(), Replicate(), last]
        assert not is_unusual(make_dtensor(torch.zeros(0, 4), mesh, placements, torch.Size((0, 4))))
        tensor = make_dtensor(WHOLE.clone(), mesh, placements, WHOLE.shape)
        return describe_shards(tensor).get_written_bytes()

    assert sum(run_ranks(run, 2)) == WHOLE.nbytes
