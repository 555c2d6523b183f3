"""The axes of a device mesh that each kind of parallelism uses, and checks of meshes from other software."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.mesh import get_extra_group, get_fsdp_mesh, get_mesh, get_optional_mesh, get_views, is_built_here
from lightning_fsdp2.sizes import (
    CONTEXT_PARALLEL,
    DATA_PARALLEL,
    DP_CP,
    DP_REPLICATE,
    EFSDP,
    EP_SHARD,
    EXPERT_PARALLEL,
    PIPELINE_PARALLEL,
    STAGE,
    TENSOR_PARALLEL,
)

_PIPELINE_AXES = (PIPELINE_PARALLEL, "pp")
"""Names of the pipeline axis here and in meshes from other software."""


@dataclass(frozen=True, kw_only=True)
class AxisNames:
    """Names of the axes of a mesh that other software has built."""

    dp: str | tuple[str, str] = DATA_PARALLEL
    """The axis to shard over, or two axes (replicate, shard)."""

    tp: str = TENSOR_PARALLEL
    """The tensor parallel axis. A mesh without it has no tensor parallelism."""

    dp_cp: str = DP_CP
    """The axis to shard over instead of ``dp``, if the mesh has it."""


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """Submeshes for each kind of parallelism. All except ``pp`` have only ranks of this rank's pipeline stage."""

    fsdp: DeviceMesh
    """Mesh to shard over: 1-D (shard) or 2-D (replicate x shard)."""

    tp: DeviceMesh | None
    """Tensor parallel mesh, 1-D. None if there is one tensor parallel rank."""

    cp: DeviceMesh | None
    """Context parallel mesh, 1-D. None if there is one context parallel rank."""

    ep: DeviceMesh | None
    """Expert parallel mesh, 1-D. None if there is one expert parallel rank."""

    experts: DeviceMesh | None
    """Mesh to shard each expert over: 1-D (shard) or 2-D (replicate x shard). None if there is one expert parallel
    rank, since experts are then sharded like all other parameters."""

    pp: DeviceMesh | None
    """Pipeline parallel mesh, 1-D. None if there is one pipeline stage."""

    @property
    def tp_size(self) -> int:
        """Number of tensor parallel ranks."""
        return 1 if self.tp is None else self.tp.size()


def get_mesh_axes(device_mesh: DeviceMesh, names: AxisNames, moe_mesh: DeviceMesh | None = None) -> MeshAxes:
    """Return the submeshes of ``device_mesh`` that a model is sharded over.

    Args:
        device_mesh: See :func:`~lightning_fsdp2.mesh.get_mesh`.
        names: Names of the axes.
        moe_mesh: Mesh of the experts, if it is not a view of ``device_mesh``.

    Raises:
        ValueError: When an axis does not exist, when the named axes leave out ranks, or when other software has built
            a mesh with a pipeline axis.
    """
    pp = _find_pipeline_mesh(device_mesh)
    _check_pipeline_mesh(pp, device_mesh)
    ep, experts = get_expert_meshes(device_mesh, moe_mesh)
    axes = MeshAxes(
        fsdp=get_fsdp_mesh(device_mesh, dp_mesh_name=names.dp, dp_cp_mesh_name=names.dp_cp),
        tp=get_optional_mesh(device_mesh, names.tp),
        cp=get_optional_mesh(device_mesh, CONTEXT_PARALLEL),
        ep=ep,
        experts=experts,
        pp=pp,
    )
    ranks = axes.fsdp.size() * axes.tp_size
    if ranks < device_mesh.size():
        raise ValueError(
            f"{names.dp!r} and {names.tp!r} cover {ranks} of the {device_mesh.size()} ranks of {device_mesh}: the"
            " other ranks would train unsynchronised copies. Name all data parallel axes in dp_mesh_name, or pass a"
            " smaller mesh."
        )
    return axes


def get_expert_meshes(
    device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None = None
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the expert parallel mesh, and the mesh that each expert is sharded over; see :class:`MeshAxes`.

    Args:
        device_mesh: Mesh of all other parameters.
        moe_mesh: Mesh that distributes experts over the axis ``"ep"``, shards each over ``"ep_shard"`` or ``"efsdp"``,
            and may replicate experts over ``"dp_replicate"``. None uses the experts' view of a ``device_mesh`` from
            :func:`~lightning_fsdp2.create_device_mesh`. Meshes from other software have no such view.

    Raises:
        ValueError: When ``moe_mesh`` has other axes, or when it differs from ``device_mesh`` in its ranks or its number
            of expert parallel ranks.
    """
    ep, mesh = get_optional_mesh(device_mesh, EXPERT_PARALLEL) if is_built_here(device_mesh) else None, device_mesh
    if moe_mesh is not None:
        _check_moe_mesh(moe_mesh, device_mesh, 1 if ep is None else ep.size())
        ep, mesh = get_optional_mesh(moe_mesh, EXPERT_PARALLEL), moe_mesh
    if ep is None:
        return None, None
    known = {axis for view in get_views(mesh) for axis in view.mesh_dim_names or ()}
    shard = next(name for name in (EFSDP, EP_SHARD) if name in known)
    is_replicated = DP_REPLICATE in known and get_mesh(mesh, DP_REPLICATE).size() > 1
    return ep, get_mesh(mesh, (DP_REPLICATE, shard) if is_replicated else shard)


def check_no_expert_parallel(device_mesh: DeviceMesh, sharder: str) -> None:
    """Refuse a mesh that was made for expert parallelism, because ``sharder`` does not support it.

    Raises:
        ValueError: When the mesh has several expert parallel ranks.
    """
    ep, _ = get_expert_meshes(device_mesh)
    if ep is not None:
        raise ValueError(
            f"ep_size={ep.size()}: {sharder} has no expert parallelism; create the mesh with ep_size=1, or use FSDP2."
        )


def get_pipeline_control(device_mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the CPU group of the ranks along the pipeline axis of ``device_mesh``, for messages from the host.

    The first call creates the group, and all ranks of the pipeline must make this call.
    """
    ranks = get_mesh(device_mesh, PIPELINE_PARALLEL).mesh.tolist()
    return get_extra_group(device_mesh, "control of the pipeline", ranks, backend="gloo")


def get_stage_control(device_mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the CPU group of the ranks of this pipeline stage of ``device_mesh``, for messages from the host.

    The first call creates the group, and all ranks of the stage must make this call.
    """
    ranks = get_mesh(device_mesh, STAGE).mesh.tolist()
    return get_extra_group(device_mesh, "control of the stage", ranks, backend="gloo")


def check_no_pipeline_parallel(device_mesh: DeviceMesh, sharder: str) -> None:
    """Refuse a mesh that was made for pipeline parallelism, because ``sharder`` does not support it.

    Raises:
        ValueError: When the mesh has several pipeline stages.
    """
    pp = _find_pipeline_mesh(device_mesh)
    if pp is not None:
        raise ValueError(
            f"pp_size={pp.size()}: {sharder} has no pipeline parallelism; create the mesh with pp_size=1, or use FSDP2."
        )


def _find_pipeline_mesh(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh of the pipeline axis, whatever its name is, or None if there is one stage."""
    axes = (get_optional_mesh(device_mesh, name) for name in _PIPELINE_AXES)
    return next((axis for axis in axes if axis is not None), None)


def _check_pipeline_mesh(pp: DeviceMesh | None, device_mesh: DeviceMesh) -> None:
    if pp is not None and not is_built_here(device_mesh):
        raise ValueError(
            f"The device mesh {device_mesh} has a pipeline axis of size {pp.size()}, which was not made by this"
            " package, so nothing would split the model along it; build the mesh with"
            " lightning_fsdp2.create_device_mesh(pp_size=...). If your own code runs the stages, pass the mesh of the"
            " other axes."
        )


def _check_moe_mesh(moe_mesh: DeviceMesh, device_mesh: DeviceMesh, ep_size: int) -> None:
    names = moe_mesh.mesh_dim_names or ()
    shard = [name for name in (EFSDP, EP_SHARD) if name in names]
    if EXPERT_PARALLEL not in names or len(shard) != 1 or set(names) - {DP_REPLICATE, *shard, EXPERT_PARALLEL}:
        raise ValueError(
            f"moe_mesh={moe_mesh} has the axes {names}; it needs the axes {EXPERT_PARALLEL!r} and {EP_SHARD!r} (of any"
            f" size), and may have {DP_REPLICATE!r}."
        )
    if set(moe_mesh.mesh.flatten().tolist()) != set(device_mesh.mesh.flatten().tolist()):
        raise ValueError(
            f"moe_mesh={moe_mesh} and device_mesh={device_mesh} have different ranks; build both from the same ranks."
        )
    if ep_size not in (1, moe_mesh[EXPERT_PARALLEL].size()):
        raise ValueError(
            f"moe_mesh={moe_mesh} has {moe_mesh[EXPERT_PARALLEL].size()} expert parallel ranks, but device_mesh was"
            f" built with ep_size={ep_size}; leave out moe_mesh or ep_size."
        )
