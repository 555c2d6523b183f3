"""Sizes, axes, the ranks along them by hand, and what is said when sizes do not fit."""

import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_fsdp2 import DDPConfig, FSDP2Config, MegatronFSDPConfig, create_device_mesh
from lightning_fsdp2.mesh import check_bound_device, get_fsdp_mesh, get_mesh, get_shard_size, get_view_sizes, get_views
from lightning_fsdp2.sizes import MeshSizes, ParallelSizes

AXES = ("dp_replicate", "dp_shard", "context_parallel", "tensor_parallel")
VIEWS = {
    AXES,
    ("dp_replicate", "dp_shard_cp", "tensor_parallel"),
    ("dp_cp", "tensor_parallel"),
    ("data_parallel", "context_parallel", "tensor_parallel"),
    ("data_parallel", "cp_tp"),
}
EXPERT_VIEW = ("dp_replicate", "efsdp", "ep")
THREE_AXES = ("data_parallel", "context_parallel", "tensor_parallel")


def run_one_of(world_size: int, rank: int, function: Callable[[], Any]) -> Any:
    """Run ``function`` as one rank of a world whose other ranks do not exist: meshes are made, nothing is sent."""

    def run() -> Any:
        # registers a backend, which must not reach other tests through the parent
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return function()

    return run_ranks(run, 1, group=False)[0]


# ---------------------------------------------------------------------- sizes


def resolve(world_size: int, options: dict[str, Any]) -> MeshSizes:
    sizes = {name: value for name, value in options.items() if name != "num_nodes"}
    return ParallelSizes(**sizes).resolve(world_size=world_size, num_nodes=options.get("num_nodes", 1))


@pytest.mark.guarantees("axes-of-the-mesh")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 8, 1, 1)),
        ({"dp_size": "auto"}, (1, 8, 1, 1)),
        ({"dp_size": None}, (1, 8, 1, 1)),
        ({"dp_size": 0}, (1, 8, 1, 1)),
        ({"dp_size": -1}, (1, 8, 1, 1)),
        ({"dp_size": 8}, (1, 8, 1, 1)),
        ({"dp_replicate_size": None, "cp_size": None, "tp_size": None}, (1, 8, 1, 1)),
        ({"tp_size": 2}, (1, 4, 1, 2)),
        ({"cp_size": 4}, (1, 2, 4, 1)),
        ({"cp_size": 2, "tp_size": 2}, (1, 2, 2, 2)),
        ({"dp_size": 2, "cp_size": 2, "tp_size": 2}, (1, 2, 2, 2)),
        ({"tp_size": 8}, (1, 1, 1, 8)),
        ({"dp_replicate_size": 2}, (2, 4, 1, 1)),
        ({"dp_replicate_size": 8}, (8, 1, 1, 1)),
        ({"dp_size": 4, "dp_replicate_size": 2, "tp_size": 2}, (2, 2, 1, 2)),
        ({"dp_replicate_size": "auto", "num_nodes": 4}, (4, 2, 1, 1)),
        ({"dp_replicate_size": "auto", "num_nodes": 2, "tp_size": 2}, (2, 2, 1, 2)),
        ({"dp_replicate_size": "auto"}, (1, 8, 1, 1)),
        ({"num_nodes": 4}, (1, 8, 1, 1)),
    ],
    ids=str,
)
def test_sizes_of_eight_ranks(options: dict[str, Any], expected: tuple[int, ...]) -> None:
    sizes = resolve(8, options)
    assert (sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp) == expected
    assert sizes.dp == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pp_size": 2}, (2, 1, 8, 1, 1)),
        ({"pp_size": 16}, (16, 1, 1, 1, 1)),
        ({"pp_size": 2, "cp_size": 2, "tp_size": 2}, (2, 1, 2, 2, 2)),
        ({"pp_size": 4, "dp_size": 2, "tp_size": 2}, (4, 1, 2, 1, 2)),
        ({"pp_size": 2, "dp_size": -1, "dp_replicate_size": 4}, (2, 4, 2, 1, 1)),
        ({"pp_size": 2, "dp_replicate_size": "auto", "num_nodes": 8}, (2, 4, 2, 1, 1)),  # a stage is on 4 nodes
        ({"pp_size": 4, "dp_replicate_size": "auto", "num_nodes": 2}, (4, 1, 4, 1, 1)),  # 2 stages are on each node
        ({"pp_size": None}, (1, 1, 16, 1, 1)),
        ({"pp_size": 0}, (1, 1, 16, 1, 1)),
    ],
    ids=str,
)
def test_sizes_of_sixteen_ranks_with_a_pipeline(options: dict[str, Any], expected: tuple[int, ...]) -> None:
    sizes = resolve(16, options)
    assert (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp) == expected
    assert sizes.stage == 16 // expected[0]


@pytest.mark.guarantees("axes-of-the-mesh")
@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (
            8,
            {"pp_size": 2, "dp_size": 3},
            "dp_size=3 x pp_size=2 x cp_size=1 x tp_size=1 = 6, but the world size is 8;"
            ' use dp_size="auto" or start 6 processes.',
        ),
        (
            8,
            {"pp_size": 3, "tp_size": 2},
            "pp_size=3 x cp_size=1 x tp_size=2 = 6 does not divide the world size 8; choose sizes that do, such as"
            " pp_size=2 or 4, or start 12 processes.",
        ),
        (
            24,
            {"pp_size": 2, "dp_replicate_size": 5},
            "dp_replicate_size=5 does not divide the data parallel size 12 (world size 24 / (pp_size=2 x cp_size=1 x"
            " tp_size=1)); use one of [1, 2, 3, 4, 6, 12].",
        ),
        (
            16,
            {"pp_size": 2, "dp_replicate_size": "auto", "num_nodes": 6},
            "dp_replicate_size='auto' (one for each of 3 nodes of a pipeline stage) does not divide the data parallel"
            " size 8 (world size 16 / (pp_size=2 x cp_size=1 x tp_size=1)); use one of [1, 2, 4, 8].",
        ),
        (
            16,
            {"pp_size": 4, "ep_size": 8},
            "ep_size=8 does not divide the 4 ranks of one stage of a model replica (dp_shard=4 x cp_size=1 x"
            " tp_size=1), which share the experts; use one of [1, 2, 4].",
        ),
        (
            4,
            {"dp_size": 3},
            'dp_size=3 x cp_size=1 x tp_size=1 = 3, but the world size is 4; use dp_size="auto" or start 3 processes.',
        ),
        (
            8,
            {"dp_size": 4, "cp_size": 2, "tp_size": 2},
            "dp_size=4 x cp_size=2 x tp_size=2 = 16, but the world size is 8;"
            ' use dp_size="auto" or start 16 processes.',
        ),
        (
            8,
            {"cp_size": 2, "tp_size": 3},
            "cp_size=2 x tp_size=3 = 6 does not divide the world size 8; choose sizes that do, such as tp_size=2 or 4,"
            " or start 12 processes.",
        ),
        (
            2,
            {"tp_size": 4},
            "cp_size=1 x tp_size=4 = 4 does not divide the world size 2; choose sizes that do, such as tp_size=2, or"
            " start 4 processes.",
        ),
        (
            24,
            {"dp_replicate_size": 5, "tp_size": 2},
            "dp_replicate_size=5 does not divide the data parallel size 12 (world size 24 / (cp_size=1 x tp_size=2));"
            " use one of [1, 2, 3, 4, 6, 12].",
        ),
        (
            16,
            {"dp_replicate_size": 4, "cp_size": 4, "tp_size": 2},
            "dp_replicate_size=4 does not divide the data parallel size 2 (world size 16 / (cp_size=4 x tp_size=2));"
            " use one of [1, 2].",
        ),
        (
            4,
            {"dp_replicate_size": "auto", "num_nodes": 3},
            "dp_replicate_size='auto' (one for each of 3 nodes) does not divide the data parallel size 4 (world size 4"
            " / (cp_size=1 x tp_size=1)); use one of [1, 2, 4].",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_world_are_refused_with_the_arithmetic(
    world_size: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolve(world_size, options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dp_size", True),
        ("dp_size", False),
        ("dp_size", 2.0),
        ("dp_size", "2"),
        ("dp_replicate_size", 0),
        ("dp_replicate_size", False),
        ("dp_replicate_size", "nodes"),
        ("tp_size", 0),
        ("tp_size", -1),
        ("tp_size", True),
        ("tp_size", "auto"),
        ("cp_size", 0),
        ("cp_size", 1.0),
        ("pp_size", -1),
        ("pp_size", True),
        ("pp_size", "auto"),
    ],
)
def test_a_size_that_is_no_number_of_ranks_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{option}={value!r} is not a number of ranks; use an integer >= 1.$"):
        resolve(4, {option: value})


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (None, {"ep_size": 3}, "ep_size=3 does not divide the 4 ranks of one model replica .dp_shard=4 x cp_size=1 x"),
        (None, {"ep_size": 4, "dp_replicate_size": 2}, r"ep_size=4 does not divide the 2 ranks .*use one of \[1, 2\]"),
        (DDPConfig(), {"ep_size": 2}, "ep_size=2: DDPConfig has no expert parallelism; use ep_size=1, or FSDP2Config."),
        (
            MegatronFSDPConfig(),
            {"ep_size": 2},
            "ep_size=2: MegatronFSDPConfig has no expert parallelism; use ep_size=1",
        ),
        (
            DDPConfig(),
            {"pp_size": 2},
            "pp_size=2: DDPConfig has no pipeline parallelism; use pp_size=1, or FSDP2Config.",
        ),
        (
            MegatronFSDPConfig(),
            {"pp_size": 4},
            "pp_size=4: MegatronFSDPConfig has no pipeline parallelism; use pp_size=1, or FSDP2Config.",
        ),
        (FSDP2Config(), {"pp_size": 3}, "pp_size=3 x cp_size=1 x tp_size=1 = 3 does not divide the world size 4"),
        (None, {"tp_size": 3}, "cp_size=1 x tp_size=3 = 3 does not divide the world size 4"),
        (
            DDPConfig(),
            {"tp_size": 2},
            "tp_size=2, cp_size=1, dp_replicate_size=1: DDPConfig supports only data parallelism",
        ),
        (
            DDPConfig(),
            {"cp_size": 2},
            "tp_size=1, cp_size=2, dp_replicate_size=1: DDPConfig supports only data parallelism",
        ),
        (DDPConfig(), {"dp_replicate_size": 2}, "dp_replicate_size=2: DDPConfig .* use FSDP2Config"),
    ],
)
def test_sizes_are_refused_before_a_process_group_exists(config: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_device_mesh(config, world_size=4, **options)
    assert not dist.is_initialized()


def test_the_world_is_what_torchrun_says_where_no_group_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(
        ValueError, match="does not divide the world size 6; choose sizes that do, such as tp_size=3 or 6, or"
    ):
        create_device_mesh(tp_size=4)
    assert not dist.is_initialized()


# ---------------------------------------------------------------------- the mesh and its views


def test_every_view_has_all_ranks_by_the_sizes_of_its_axes() -> None:
    sizes = MeshSizes(dp_replicate=2, dp_shard=3, cp=5, tp=7)
    views = get_view_sizes(sizes)
    assert views.keys() == VIEWS
    assert {math.prod(view) for view in views.values()} == {2 * 3 * 5 * 7}
    assert views[AXES] == (2, 3, 5, 7)


def test_experts_have_a_view_of_their_own_if_several_ranks_share_them() -> None:
    sizes = MeshSizes(dp_replicate=2, dp_shard=3, cp=5, tp=7, ep=21)
    views = get_view_sizes(sizes)
    assert views.keys() == VIEWS | {EXPERT_VIEW}
    assert views[EXPERT_VIEW] == (2, 5, 21)


def assert_sizes(mesh: DeviceMesh, sizes: tuple[int, ...], views: set[tuple[str, ...]] = VIEWS) -> None:
    assert mesh.mesh_dim_names == AXES
    assert mesh.shape == sizes
    assert mesh.device_type == "cpu"
    assert [get_mesh(mesh, axis).size() for axis in AXES] == list(sizes)
    assert {view.mesh_dim_names for view in get_views(mesh)} == views


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, [({}, (1, 1, 1, 1)), ({"ep_size": None, "pp_size": 0}, (1, 1, 1, 1))]),
        (2, [({}, (1, 2, 1, 1)), ({"dp_replicate_size": 2}, (2, 1, 1, 1)), ({"tp_size": 2}, (1, 1, 1, 2))]),
    ],
    ids=["one-rank", "two-ranks"],
)
def test_a_mesh_has_all_axes_those_of_size_one_included(world_size: int, cases: list[Any]) -> None:
    def run() -> None:
        for options, sizes in cases:
            assert_sizes(create_device_mesh(device_type="cpu", **options), sizes)

    run_ranks(run, world_size)


@pytest.mark.parametrize(
    ("config", "options", "sizes"),
    [
        (DDPConfig(), {}, (1, 4, 1, 1)),
        (MegatronFSDPConfig(), {"cp_size": 2, "dp_replicate_size": 2}, (2, 1, 2, 1)),
        (FSDP2Config(), {"cp_size": 2, "tp_size": 2}, (1, 1, 2, 2)),
    ],
    ids=["ddp", "megatron", "fsdp2"],
)
def test_sizes_that_a_config_allows(config: Any, options: dict[str, int], sizes: tuple[int, ...]) -> None:
    run_one_of(4, 0, lambda: assert_sizes(create_device_mesh(config, device_type="cpu", **options), sizes))


def ranks_reached(axis: DeviceMesh) -> list[int]:
    """The global ranks that a collective over ``axis`` reaches."""
    present = torch.zeros(dist.get_world_size())
    present[dist.get_rank()] = 1
    dist.all_reduce(present, group=axis.get_group())
    return present.nonzero().flatten().tolist()


def test_collectives_over_an_axis_reach_its_ranks_and_nothing_warns() -> None:
    def run() -> list[dict[str, list[int]]]:
        os.environ["GROUP_WORLD_SIZE"] = "2"  # nodes, as torchrun says
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            meshes = [
                create_device_mesh(tp_size=2, device_type="cpu"),
                create_device_mesh(dp_replicate_size="auto", device_type="cpu"),
            ]
            names = ("data_parallel", "dp_replicate", "dp_shard_cp", "dp_cp", "tensor_parallel", "cp_tp")
            return [{name: ranks_reached(get_mesh(mesh, name)) for name in names} for mesh in meshes]

    for rank, (tensor_parallel, replicas) in enumerate(run_ranks(run, 4)):
        neighbours = [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
        across = [[0, 2], [1, 3], [0, 2], [1, 3]][rank]
        assert tensor_parallel == {
            "data_parallel": across,
            "dp_replicate": [rank],
            "dp_shard_cp": across,
            "dp_cp": across,
            "tensor_parallel": neighbours,
            "cp_tp": neighbours,
        }
        assert replicas == {
            "data_parallel": [0, 1, 2, 3],
            "dp_replicate": across,
            "dp_shard_cp": neighbours,
            "dp_cp": [0, 1, 2, 3],
            "tensor_parallel": [rank],
            "cp_tp": [rank],
        }


def test_global_ranks_along_every_axis_with_tensor_parallel_innermost() -> None:
    """Rank 13 of 2 x 2 x 2 x 2 is replica 1, shard 1, cp 0, tp 1."""

    def run() -> None:
        mesh = create_device_mesh(dp_replicate_size=2, cp_size=2, tp_size=2, device_type="cpu")
        assert tuple(mesh.get_coordinate()) == (1, 1, 0, 1)
        expected = {
            "dp_replicate": [5, 13],
            "dp_shard": [9, 13],
            "context_parallel": [13, 15],
            "tensor_parallel": [12, 13],
            "dp_shard_cp": [9, 11, 13, 15],
            "dp_cp": [1, 3, 5, 7, 9, 11, 13, 15],
            "data_parallel": [1, 5, 9, 13],
            "cp_tp": [12, 13, 14, 15],
            ("dp_shard_cp",): [9, 11, 13, 15],
            ("dp_replicate", "dp_shard_cp"): [[1, 3, 5, 7], [9, 11, 13, 15]],
            ("dp_shard_cp", "tensor_parallel"): [[8, 9], [10, 11], [12, 13], [14, 15]],
            ("data_parallel", "context_parallel"): [[1, 3], [5, 7], [9, 11], [13, 15]],
        }
        for view in get_views(mesh):
            for names, ranks in expected.items():
                axes = get_mesh(view, names)
                assert axes.mesh_dim_names == (names if isinstance(names, tuple) else (names,))
                assert axes.mesh.tolist() == ranks
                if axes.ndim == 1:
                    assert dist.get_process_group_ranks(axes.get_group()) == ranks

    run_one_of(16, 13, run)


def test_a_pipeline_axis_is_outside_of_all_others() -> None:
    """Of 2 stages with 2 x 2 x 2 x 2 ranks each, rank 29 is in stage 1: replica 1, shard 1, cp 0, tp 1."""

    def run() -> None:
        mesh = create_device_mesh(pp_size=2, dp_replicate_size=2, cp_size=2, tp_size=2, ep_size=4, device_type="cpu")
        assert_sizes(mesh, (2, 2, 2, 2), {*VIEWS, EXPERT_VIEW, ("pipeline_parallel",), ("stage",)})
        assert tuple(mesh.get_coordinate()) == (1, 1, 0, 1)
        expected = {
            "pipeline_parallel": [13, 29],
            "stage": list(range(16, 32)),
            "dp_replicate": [21, 29],
            "dp_shard": [25, 29],
            "context_parallel": [29, 31],
            "tensor_parallel": [28, 29],
            "dp_shard_cp": [25, 27, 29, 31],
            "dp_cp": [17, 19, 21, 23, 25, 27, 29, 31],
            "data_parallel": [17, 21, 25, 29],
            "cp_tp": [28, 29, 30, 31],
            "ep": [28, 29, 30, 31],
            "efsdp": [25, 29],
            ("dp_replicate", "dp_shard_cp"): [[17, 19, 21, 23], [25, 27, 29, 31]],
            ("dp_shard_cp", "tensor_parallel"): [[24, 25], [26, 27], [28, 29], [30, 31]],
        }
        for view in get_views(mesh):
            for names, ranks in expected.items():
                axes = get_mesh(view, names)
                assert axes.mesh.tolist() == ranks, names
                if axes.ndim == 1:
                    assert dist.get_process_group_ranks(axes.get_group()) == ranks

    run_one_of(32, 29, run)


def test_collectives_of_a_stage_stay_in_it_and_nothing_warns() -> None:
    names = ("pipeline_parallel", "stage", "data_parallel", "dp_shard_cp", "dp_cp", "tensor_parallel", "cp_tp")

    def run() -> dict[str, list[int]]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mesh = create_device_mesh(FSDP2Config(), pp_size=2, tp_size=2, device_type="cpu")
            return {name: ranks_reached(get_mesh(mesh, name)) for name in names}

    for rank, reached in enumerate(run_ranks(run, 8)):
        first = rank // 4 * 4  # of the stage
        replicas, neighbours = [first + rank % 2, first + rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert reached == {
            "pipeline_parallel": [rank % 4, rank % 4 + 4],
            "stage": [first, first + 1, first + 2, first + 3],
            **dict.fromkeys(("data_parallel", "dp_shard_cp", "dp_cp"), replicas),
            **dict.fromkeys(("tensor_parallel", "cp_tp"), neighbours),
        }


def test_one_pipeline_stage_makes_no_axis_and_no_group() -> None:
    """Each axis of a view has a group, but an axis of all ranks has the default one."""

    def run() -> None:
        def count() -> int:
            return len(dist.distributed_c10d._world.pg_map)

        axes = 4 + 3 + 2 + 3 + 2
        for options, groups in (
            ({}, axes - 5),  # dp_shard, dp_shard_cp, dp_cp and, in two views, data_parallel have all ranks
            ({"tp_size": 2}, axes),
            ({"pp_size": 2}, axes + 2),
            ({"pp_size": 4, "tp_size": 2}, axes + 2),
        ):
            before = count()
            mesh = create_device_mesh(device_type="cpu", **options)
            assert count() - before == groups, options
            assert len(get_views(mesh)) == (5 if options.get("pp_size", 1) == 1 else 7)
        with pytest.raises(
            ValueError, match=r"no axis 'pipeline_parallel'; it has \['context_parallel', 'cp_tp', 'data"
        ):
            get_mesh(create_device_mesh(device_type="cpu"), "pipeline_parallel")

    run_one_of(8, 5, run)


def test_get_mesh_refuses_an_unknown_name_with_those_there_are() -> None:
    def run() -> None:
        ours = create_device_mesh(device_type="cpu")
        known = (
            r"\['context_parallel', 'cp_tp', 'data_parallel', 'dp_cp', 'dp_replicate', 'dp_shard', 'dp_shard_cp',"
            r" 'tensor_parallel'\]"
        )
        with pytest.raises(ValueError, match=rf"^The device mesh has no axis 'dp'; it has {known}\.$"):
            get_mesh(ours, "dp")
        with pytest.raises(ValueError, match=r"no axis 'dp_shard' x 'dp_cp'; it has \["):  # of two views
            get_mesh(ours, ("dp_shard", "dp_cp"))
        with pytest.raises(ValueError, match=r"no axis 'dp_cp'; it has \['shard'\]\."):
            get_mesh(init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), "dp_cp")

    run_one_of(1, 0, run)


def test_a_mesh_made_elsewhere_is_its_own_only_view() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert get_views(mesh) == (mesh,)
        assert get_mesh(mesh, "shard").mesh.tolist() == [2, 3]
        assert get_mesh(mesh, ("replicate", "shard")).mesh.tolist() == [[0, 1], [2, 3]]

    run_one_of(4, 2, run)


# ---------------------------------------------------------------------- what FSDP shards over


def test_our_mesh_shards_over_dp_shard_and_cp_and_replicates_over_dp_replicate() -> None:
    cases: list[tuple[dict[str, int], dict[str, Any], list[Any]]] = [
        ({}, {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"tp_size": 2}, {}, [0, 2, 4, 6]),
        ({"cp_size": 2}, {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"dp_replicate_size": 2}, {}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"dp_replicate_size": 2, "cp_size": 2, "tp_size": 2}, {}, [[0, 2], [4, 6]]),
        ({"dp_replicate_size": 2, "cp_size": 2, "tp_size": 2}, {"dp_mesh_name": "dp_shard_cp"}, [0, 2]),
        (
            {"dp_replicate_size": 2, "cp_size": 2},
            {"dp_mesh_name": ("dp_replicate", "dp_shard_cp")},
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
        ({"dp_replicate_size": 8}, {}, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ({"dp_replicate_size": 2, "tp_size": 2}, {"dp_mesh_name": "dp_shard"}, [0, 2]),
        ({"dp_replicate_size": 2}, {"dp_mesh_name": ("dp_replicate", "dp_shard")}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ]

    def run() -> None:
        for sizes, names, expected in cases:
            mesh = create_device_mesh(device_type="cpu", **sizes)
            for view in [mesh] if names else get_views(mesh):
                assert get_fsdp_mesh(view, **names).mesh.tolist() == expected, (sizes, names)

    run_one_of(8, 0, run)


def test_a_mesh_made_elsewhere_shards_over_the_axes_it_is_told() -> None:
    cases: list[tuple[tuple[int, ...], tuple[str, ...] | None, dict[str, Any], list[Any]]] = [
        ((4, 1, 2), THREE_AXES, {}, [0, 2, 4, 6]),
        ((8,), None, {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ((8,), ("dp",), {"dp_mesh_name": "dp"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ((4, 2), ("dp_cp", "tensor_parallel"), {}, [0, 2, 4, 6]),
        ((4, 2), ("data_parallel", "dp_cp"), {}, [0, 1]),
        ((4, 2), ("data_parallel", "all"), {"dp_cp_mesh_name": "all"}, [0, 1]),
        ((2, 2, 2), ("a", "b", "tp"), {"dp_mesh_name": ("a", "b")}, [[0, 2], [4, 6]]),
        ((2, 2, 2), ("dp_replicate", "dp_shard_cp", "tp"), {}, [[0, 2], [4, 6]]),
        ((1, 4, 2), ("dp_replicate", "dp_shard_cp", "tp"), {}, [0, 2, 4, 6]),
    ]

    def run() -> None:
        for shape, axes, names, expected in cases:
            fsdp_mesh = get_fsdp_mesh(init_device_mesh("cpu", shape, mesh_dim_names=axes), **names)
            assert fsdp_mesh.mesh.tolist() == expected, (axes, names)
            assert get_shard_size(fsdp_mesh) == torch.tensor(expected).size(-1), (axes, names)

    run_one_of(8, 0, run)


def test_a_mesh_that_would_leave_ranks_out_is_refused() -> None:
    def run() -> None:
        context_parallel = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=THREE_AXES)
        with pytest.raises(
            ValueError,
            match=r"'context_parallel' axis of size 2 but no axis 'dp_cp' to shard over.*create_device_mesh\(cp_size=",
        ):
            get_fsdp_mesh(context_parallel)
        with pytest.raises(ValueError, match=r"no axis 'data_parallel'; it has \[\]"):
            get_fsdp_mesh(init_device_mesh("cpu", (2, 2)))
        with pytest.raises(ValueError, match=r"no axis 'replicate' x 'shard'; it has \['data_parallel'\]"):
            get_fsdp_mesh(
                init_device_mesh("cpu", (4,), mesh_dim_names=("data_parallel",)), dp_mesh_name=("replicate", "shard")
            )

    run_one_of(4, 0, run)


# ---------------------------------------------------------------------- the process group


@pytest.mark.parametrize(("config", "backend"), [(None, "undefined"), (FSDP2Config(backend="gloo"), "gloo")])
def test_a_plain_script_gets_a_group_of_one_process_on_its_machines_device(config: Any, backend: str) -> None:
    def run() -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        mesh = create_device_mesh(config)
        assert mesh.shape == (1, 1, 1, 1)
        assert mesh.device_type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert dist.get_world_size() == 1
        assert dist.get_backend() == backend  # torch's "undefined" means by device type

    run_ranks(run, 1, group=False)


@pytest.mark.guarantees("bound-devices")
@pytest.mark.parametrize(
    ("chosen", "devices", "index"), [(0, 8, 1), (3, 8, 3), (0, 1, 0)], ids=["local rank", "chosen", "only one"]
)
def test_a_group_is_bound_to_the_accelerator_it_is_for(
    chosen: int, devices: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def start(backend: str, **options: Any) -> None:
        given.update(options, backend=backend)
        raise KeyError

    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for world_size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(KeyError):
            create_device_mesh(FSDP2Config(bind_device_id=True), device_type="cuda")
        assert (given["backend"], given["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", index))


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), ("gloo", "cuda:0"), ("cpu:gloo", "cuda:0"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_there_is_nothing_to_bind_a_group_to_on_a_cpu_or_with_gloo(backend: str, device: str) -> None:
    with pytest.raises(ValueError, match=rf"bind_device_id=True .* {device} with the backend '{backend}'; leave"):
        check_bound_device(backend, torch.device(device))


def test_a_group_of_the_users_must_be_bound_to_the_device_already() -> None:
    device = torch.device("cuda", 0)

    def run() -> None:
        with pytest.raises(ValueError, match=r"bind_device_id=True, but .* is bound to None, not to cuda:0; pass"):
            check_bound_device("nccl", device)
        dist.group.WORLD.bound_device_id = device
        check_bound_device("nccl", device)

    run_ranks(run, 1)


def test_a_world_size_that_the_processes_do_not_have_is_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"world_size=1, but the process group has 2 ranks.*leave world_size out"):
            create_device_mesh(device_type="cpu", world_size=1)

    def run_alone() -> None:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        with pytest.raises(ValueError, match=r"world_size=2 needs 2 processes.*torchrun --nproc-per-node 2"):
            create_device_mesh(device_type="cpu", world_size=2)

    run_ranks(run, 2)
    run_ranks(run_alone, 1, group=False)


def test_a_given_device_type_is_that_of_the_mesh() -> None:
    assert run_one_of(2, 0, lambda: create_device_mesh(device_type="meta").device_type) == "meta"


def test_under_torchrun_the_group_is_started_with_the_backend_of_the_config() -> None:
    def run() -> None:
        mesh = create_device_mesh(FSDP2Config(backend="gloo"), device_type="cpu")
        assert mesh.shape == (1, 2, 1, 1)
        assert dist.get_backend() == "gloo"
        assert ranks_reached(get_mesh(mesh, "dp_shard")) == [0, 1]

    run_ranks(run, 2, group=False)


def test_a_group_that_exists_is_used_and_counts_as_the_world() -> None:
    def run() -> None:
        os.environ["WORLD_SIZE"] = "64"
        group = dist.group.WORLD
        assert create_device_mesh(device_type="cpu").shape == (1, 2, 1, 1)
        assert dist.group.WORLD is group

    run_ranks(run, 2)


@pytest.mark.guarantees("groups-end")
@pytest.mark.slow
def test_a_group_that_was_made_here_ends_with_the_process() -> None:
    script = (
        "import atexit\n"
        "import torch.distributed as dist\n"
        "from lightning_fsdp2 import create_device_mesh\n"
        "atexit.register(lambda: print(dist.is_initialized()))\n"
        "create_device_mesh(device_type='cpu')\n"
        "print(dist.is_initialized())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["True", "False"]


def test_experts_on_several_nodes_are_warned_of() -> None:
    sizes = ParallelSizes(ep_size=16)
    with pytest.warns(UserWarning, match=r"ep_size=16 does not divide the 8 ranks of a node.*one of \[1, 2, 4, 8\]"):
        sizes.resolve_for_run(world_size=32, num_nodes=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes.resolve_for_run(world_size=32, num_nodes=2)
        replace(sizes, ep_size=8).resolve_for_run(world_size=32, num_nodes=4)
