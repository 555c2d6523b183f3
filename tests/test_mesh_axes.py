"""What each kind of parallelism gets of a mesh that is split into pipeline stages, and meshes that are refused."""

import pytest
import torch.distributed as dist
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp2 import (
    DDPConfig,
    DDPManager,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    create_device_mesh,
)
from lightning_fsdp2.mesh_axes import AxisNames, get_expert_meshes, get_mesh_axes


def test_all_axes_but_the_pipelines_are_those_of_a_stage() -> None:
    def run() -> None:
        rank = dist.get_rank()
        first = rank // 4 * 4  # of the stage
        axes = get_mesh_axes(create_device_mesh(device_type="cpu", pp_size=2, tp_size=2, ep_size=2), AxisNames())
        assert axes.pp is not None
        assert axes.tp is not None
        assert axes.ep is not None
        assert axes.experts is not None
        assert axes.pp.mesh.tolist() == [rank % 4, rank % 4 + 4]
        assert axes.fsdp.mesh.tolist() == axes.experts.mesh.tolist() == [first + rank % 2, first + rank % 2 + 2]
        assert axes.tp.mesh.tolist() == axes.ep.mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert axes.cp is None
        assert get_mesh_axes(create_device_mesh(device_type="cpu", tp_size=2), AxisNames()).pp is None

    run_ranks(run, 8)


def test_a_mesh_of_experts_has_the_ranks_of_a_stage() -> None:
    def run() -> None:
        device_mesh = create_device_mesh(device_type="cpu", pp_size=2)
        world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "ep_shard", "ep"))
        ep, experts = get_expert_meshes(device_mesh, world["ep_shard", "ep"])
        assert ep is not None
        assert experts is not None
        first = dist.get_rank() // 2 * 2
        assert ep.mesh.tolist() == [first, first + 1]
        assert experts.mesh.tolist() == [dist.get_rank()]
        of_all = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
        with pytest.raises(ValueError, match="have different ranks; build both from the same ranks"):
            get_expert_meshes(device_mesh, of_all)

    run_ranks(run, 4)


@pytest.mark.parametrize("name", ["pipeline_parallel", "pp"])
def test_a_pipeline_axis_of_other_software_is_refused(name: str) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(name, "data_parallel"))
        with pytest.raises(ValueError, match=r"has a pipeline axis of size 2, .*create_device_mesh\(pp_size=\.\.\.\)"):
            FSDP2Manager(FSDP2Config(), mesh).parallelize(make_causal_lm(LLAMA))
        with pytest.raises(ValueError, match="pp_size=2: DDP has no pipeline parallelism"):
            DDPManager(DDPConfig(), mesh)
        # code of one's own may run the stages, each on a mesh of its own
        first = dist.get_rank() // 2 * 2
        assert get_mesh_axes(mesh["data_parallel"], AxisNames()).fsdp.mesh.tolist() == [first, first + 1]
        flat = init_device_mesh("cpu", (1, 4), mesh_dim_names=(name, "data_parallel"))
        assert get_mesh_axes(flat, AxisNames()).pp is None

    run_ranks(run, 4)


@pytest.mark.guarantees("pipeline-limits")
def test_other_managers_refuse_a_mesh_with_stages() -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu", pp_size=2)
        with pytest.raises(ValueError, match=r"pp_size=2: DDP has no pipeline parallelism; .* pp_size=1, or use FSDP2"):
            DDPManager(DDPConfig(), mesh)
        message = "pp_size=2: Megatron-FSDP has no pipeline parallelism"
        with cuda_on_cpu(), pytest.raises(ValueError, match=message):
            MegatronFSDPManager(MegatronFSDPConfig(), mesh).parallelize(make_causal_lm(LLAMA))

    run_ranks(run, 2)
