"""The parallel sizes of a run, and the :class:`~torch.distributed.device_mesh.DeviceMesh` that is built from them.

A mesh has *axes*, and a tensor has *dims*. All meshes of a run are views of the ranks of one pipeline stage, which are
all ranks unless the model is split into several stages:

===============  ===================================================================================================
view             axes
===============  ===================================================================================================
the mesh itself  ``dp_replicate, dp_shard, context_parallel, tensor_parallel``: :func:`create_device_mesh` returns it
sharding         ``dp_replicate, dp_shard_cp, tensor_parallel``: FSDP shards and replicates over it
loss             ``dp_cp, tensor_parallel``: losses and gradients are averaged over ``dp_cp``
data             ``data_parallel, context_parallel, tensor_parallel``: each index of ``data_parallel`` reads its own
                 batches; modules written for Lightning's ``ModelParallelStrategy`` expect this mesh
model            ``data_parallel, cp_tp``: ranks along ``cp_tp`` hold one model replica and read the same batch
experts          ``dp_replicate, efsdp, ep``: experts are distributed over ``ep``, and sharded and replicated over the
                 other axes; only with several expert parallel ranks
===============  ===================================================================================================

Every view has all of its axes, including those of size 1, so that the same code runs on one rank and on a thousand.

With several pipeline stages, there are two more meshes, of one axis each: ``pipeline_parallel``, along which the layers
are split into stages, and ``stage``, all ranks of this stage. The pipeline axis is the outermost one, so the ranks of a
stage are consecutive.
"""

import atexit
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_fsdp2.compat.torch import get_group_timeout, unflatten_mesh
from lightning_fsdp2.config import DDPConfig, DistributedConfig, FSDP2Config
from lightning_fsdp2.sizes import (
    CONTEXT_PARALLEL,
    CP_TP,
    DATA_PARALLEL,
    DP_CP,
    DP_REPLICATE,
    DP_SHARD,
    DP_SHARD_CP,
    EFSDP,
    EXPERT_PARALLEL,
    PIPELINE_PARALLEL,
    STAGE,
    TENSOR_PARALLEL,
    MeshSizes,
    ParallelSizes,
)

_MESH_AXES = (DP_REPLICATE, DP_SHARD, CONTEXT_PARALLEL, TENSOR_PARALLEL)

_VIEWS = (
    _MESH_AXES,
    (DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL),
    (DP_CP, TENSOR_PARALLEL),
    (DATA_PARALLEL, CONTEXT_PARALLEL, TENSOR_PARALLEL),
    (DATA_PARALLEL, CP_TP),
)
"""Axis names of every view of a stage's ranks, outermost first. :func:`get_view_sizes` has their sizes."""

_EXPERT_VIEW = (DP_REPLICATE, EFSDP, EXPERT_PARALLEL)
"""Axis names of one more view, which exists only with several expert parallel ranks, because groups cost memory."""

_VIEWS_ATTRIBUTE = "_lightning_fsdp2_views"
_GROUPS_ATTRIBUTE = "_lightning_fsdp2_groups"


def create_device_mesh(
    config: DistributedConfig | None = None,
    *,
    dp_size: int | Literal["auto"] | None = "auto",
    dp_replicate_size: int | Literal["auto"] | None = 1,
    tp_size: int | None = 1,
    cp_size: int | None = 1,
    ep_size: int | None = 1,
    pp_size: int | None = 1,
    device_type: str | None = None,
    world_size: int | None = None,
) -> DeviceMesh:
    """Build the device mesh of a run, with the axes ``(dp_replicate, dp_shard, context_parallel, tensor_parallel)``.

    With several pipeline stages, the mesh has only the ranks of this rank's stage.

    The sizes are checked before any process group is created. Under torchrun, the default process group is started if
    it does not exist yet. :func:`get_mesh` returns other views of the mesh, and the pipeline axis.

    Args:
        config: Config of a strategy, which determines the allowed sizes.
        dp_size: Number of data parallel ranks. See :class:`~lightning_fsdp2.FSDP2Strategy` for all sizes.
        dp_replicate_size: Number of replicas. ``"auto"`` uses the number of nodes that torchrun sets.
        tp_size: Number of tensor parallel ranks. This is the innermost axis.
        cp_size: Number of context parallel ranks.
        ep_size: Number of expert parallel ranks.
        pp_size: Number of pipeline parallel ranks. This is the outermost axis.
        device_type: Device type such as ``"cuda"`` or ``"cpu"``, not the name of a backend. By default the type of the
            machine's accelerator.
        world_size: Number of ranks. By default that of the process group or of torchrun's environment.

    Raises:
        ValueError: When a size is not allowed, or when the product of the sizes is not the world size.
    """
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    sizes = ParallelSizes(
        dp_size=dp_size,
        dp_replicate_size=dp_replicate_size,
        tp_size=tp_size,
        cp_size=cp_size,
        ep_size=ep_size,
        pp_size=pp_size,
    )
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    resolved = sizes.resolve_for_run(world_size=world_size, num_nodes=num_nodes)
    return build_device_mesh(resolved, config, device_type=device_type)


def build_device_mesh(
    sizes: MeshSizes, config: DistributedConfig | None = None, *, device_type: str | None = None
) -> DeviceMesh:
    """Build the device mesh from known sizes; see :func:`create_device_mesh`.

    Raises:
        ValueError: When a size is not allowed, or when the process group has a different number of ranks.
    """
    world_size = sizes.pp * sizes.stage
    _check_sizes_of_config(config, sizes)
    _check_world_size(world_size)
    device_type = device_type or _accelerator_type()
    backend, device_id = getattr(config, "backend", None), None
    if getattr(config, "bind_device_id", False):
        device_id = torch.device(device_type, _get_own_index())
        backend = backend or get_default_backend(device_id)
        check_bound_device(backend, device_id)
    if not dist.is_initialized():
        atexit.register(destroy_process_group)
        if world_size == 1:
            # without a launcher, no address is set for a TCPStore, but a single process needs only a HashStore
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)
        elif backend is not None:
            dist.init_process_group(backend, device_id=device_id)
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
    return _build_views(world, sizes)


def _build_views(world: DeviceMesh, sizes: MeshSizes) -> DeviceMesh:
    """Build all views of the 1-D mesh of all ranks, and return the one with the axes ``_MESH_AXES``."""
    stage, axes_of_stages = world, list[DeviceMesh]()
    if sizes.pp > 1:
        # split off the pipeline axis once instead of in every view, because each split creates groups
        split = unflatten_mesh(world, (sizes.pp, sizes.stage), (PIPELINE_PARALLEL, STAGE))
        stage = split[STAGE]
        axes_of_stages = [split[PIPELINE_PARALLEL], stage]
    views = {names: unflatten_mesh(stage, axes, names) for names, axes in get_view_sizes(sizes).items()}
    meshes = (*views.values(), *axes_of_stages)
    for mesh in meshes:
        # Store all views on each view, because torch offers no way to get from one view to the others.
        setattr(mesh, _VIEWS_ATTRIBUTE, meshes)
    return views[_MESH_AXES]


def get_view_sizes(sizes: MeshSizes) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the axis names and the sizes of every view of the ranks of a stage."""
    dp, cp, tp = sizes.dp_replicate * sizes.dp_shard, sizes.cp, sizes.tp
    axes = {
        DP_REPLICATE: sizes.dp_replicate,
        DP_SHARD: sizes.dp_shard,
        DP_SHARD_CP: sizes.dp_shard * cp,
        DP_CP: dp * cp,
        DATA_PARALLEL: dp,
        CONTEXT_PARALLEL: cp,
        TENSOR_PARALLEL: tp,
        CP_TP: cp * tp,
        EFSDP: sizes.dp_shard * cp * tp // sizes.ep,
        EXPERT_PARALLEL: sizes.ep,
    }
    views = _VIEWS if sizes.ep == 1 else (*_VIEWS, _EXPERT_VIEW)
    return {names: tuple(axes[name] for name in names) for names in views}


def get_default_backend(device: torch.device) -> str:
    """Return torch's backend string: the accelerator's own backend, plus gloo for CPU tensors."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def check_bound_device(backend: str, device: torch.device) -> None:
    """Check that ``bind_device_id=True`` is possible, and that an existing process group is bound to ``device``.

    Args:
        backend: Backend of the default process group.
        device: Device of this rank.

    Raises:
        ValueError: When the backend cannot be bound to a device, or when the group is not bound to ``device``.
    """
    backends = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    if device.type == "cpu" or backends.get(device.type) in (None, "gloo"):
        raise ValueError(
            f"config.bind_device_id=True needs an accelerator with a backend such as NCCL, but this rank has the device"
            f" {device} with the backend {backend!r}; leave bind_device_id out, or use it on GPUs with backend=None."
        )
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if dist.is_initialized() else device
    if bound != device:
        raise ValueError(
            f"config.bind_device_id=True, but this process already belongs to a group that is bound to {bound}, not to"
            f" {device}; pass device_id={str(device)!r} to init_process_group, or leave bind_device_id out."
        )


def get_mesh(device_mesh: DeviceMesh, name: str | tuple[str, ...]) -> DeviceMesh:
    """Return the submesh with only the given axis or axes, from the first view of ``device_mesh`` that has them.

    Raises:
        ValueError: When there is no such axis. The message lists the existing axes.
    """
    names = (name,) if isinstance(name, str) else tuple(name)
    if (view := _get_optional_view(device_mesh, names)) is not None:
        return view[names if len(names) > 1 else names[0]]
    known = sorted({axis for view in get_views(device_mesh) for axis in view.mesh_dim_names or ()})
    raise ValueError(f"The device mesh has no axis {' x '.join(map(repr, names))}; it has {known}.")


def get_optional_mesh(device_mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """Return the 1-D mesh of the axis ``name``, or None if there is no such axis or its size is 1."""
    view = _get_optional_view(device_mesh, (name,))
    return view[name] if view is not None and view[name].size() > 1 else None


def get_axis_sizes(device_mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each axis of ``device_mesh``, by name, with the pipeline axis if there are several stages."""
    sizes = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=False))
    pipeline = get_optional_mesh(device_mesh, PIPELINE_PARALLEL)
    return sizes if pipeline is None else {PIPELINE_PARALLEL: pipeline.size(), **sizes}


def get_views(device_mesh: DeviceMesh) -> tuple[DeviceMesh, ...]:
    """Return all meshes that were built together with ``device_mesh``, including ``device_mesh`` itself.

    For a mesh from other software, return only that mesh.
    """
    return getattr(device_mesh, _VIEWS_ATTRIBUTE, (device_mesh,))


def is_built_here(device_mesh: DeviceMesh) -> bool:
    """Return whether ``device_mesh`` is a mesh from :func:`create_device_mesh` or another view of it."""
    return hasattr(device_mesh, _VIEWS_ATTRIBUTE)


def get_extra_group(
    device_mesh: DeviceMesh, purpose: str, ranks: Sequence[int], *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return a process group for a special ``purpose``, separate from the groups of the mesh's axes.

    The first call creates the group, and all ranks of the group must make this call. Later calls return the same group,
    because every group takes up device memory. All ranks must create equally many groups, because torch names a group
    after the number of groups that a rank has, and would wait forever for ranks that have others.

    Args:
        device_mesh: Mesh on which the group is stored. The group gets the same timeout as the groups of the mesh.
        purpose: Name of the purpose, such as ``"all-gathers"``.
        ranks: Global ranks of the group.
        backend: Backend of the group. None uses the backend of the default group.
    """
    groups = get_views(device_mesh)[0].__dict__.setdefault(_GROUPS_ATTRIBUTE, {})
    if purpose not in groups:
        timeout = get_group_timeout(device_mesh.get_group(0))
        groups[purpose] = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    group: dist.ProcessGroup = groups[purpose]
    return group


def get_extra_groups(device_mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups that :func:`get_extra_group` has created for ``device_mesh`` or another view of its mesh."""
    return list(get_views(device_mesh)[0].__dict__.get(_GROUPS_ATTRIBUTE, {}).values())


def get_fsdp_mesh(
    device_mesh: DeviceMesh,
    *,
    dp_mesh_name: str | tuple[str, str] = DATA_PARALLEL,
    dp_cp_mesh_name: str = DP_CP,
) -> DeviceMesh:
    """Return the 1-D (shard) or 2-D (replicate x shard) mesh to pass to ``fully_shard``.

    On a mesh from :func:`create_device_mesh`, the default names stand for the axes ``dp_replicate`` and
    ``dp_shard_cp``. On any other mesh, the result is the axis ``dp_cp_mesh_name`` if it exists, and otherwise
    ``dp_mesh_name``, which may name two axes (replicate, shard).

    Raises:
        ValueError: When the axis does not exist, or when it would leave out context parallel ranks.
    """
    if dp_mesh_name == DATA_PARALLEL and _get_optional_view(device_mesh, (DP_REPLICATE, DP_SHARD_CP)) is not None:
        if get_mesh(device_mesh, DP_REPLICATE).size() > 1:
            return get_mesh(device_mesh, (DP_REPLICATE, DP_SHARD_CP))
        return get_mesh(device_mesh, DP_SHARD_CP)
    axes = device_mesh.mesh_dim_names or ()
    if dp_cp_mesh_name in axes:
        return get_mesh(device_mesh, dp_cp_mesh_name)
    names = (dp_mesh_name,) if isinstance(dp_mesh_name, str) else dp_mesh_name
    if CONTEXT_PARALLEL in axes and device_mesh[CONTEXT_PARALLEL].size() > 1 and DP_SHARD_CP not in names:
        raise ValueError(
            f"The device mesh has a {CONTEXT_PARALLEL!r} axis of size {device_mesh[CONTEXT_PARALLEL].size()} but no"
            f" axis {dp_cp_mesh_name!r} to shard over; build it with lightning_fsdp2.create_device_mesh(cp_size=...)."
        )
    if device_mesh.ndim == 1 and not axes:
        return device_mesh
    return get_mesh(device_mesh, dp_mesh_name)


def get_shard_size(fsdp_mesh: DeviceMesh) -> int:
    """Return the number of ranks over which ``fully_shard`` shards parameters on ``fsdp_mesh``.

    The axes are (shard) or (replicate, shard). Their names do not matter to torch, only their order.
    """
    return fsdp_mesh.size(fsdp_mesh.ndim - 1)


def get_device(device_mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank uses on ``device_mesh``."""
    if device_mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_mesh.device_type, torch.get_device_module(device_mesh.device_type).current_device())


def _get_optional_view(device_mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """Return the first view of ``device_mesh`` that has all axes in ``names``, or None if there is none."""
    views = (view for view in get_views(device_mesh) if set(names) <= set(view.mesh_dim_names or ()))
    return next(views, None)


def _check_sizes_of_config(config: DistributedConfig | None, sizes: MeshSizes) -> None:
    if config is not None and not isinstance(config, FSDP2Config):
        for option, size, kind in (("ep_size", sizes.ep, "expert"), ("pp_size", sizes.pp, "pipeline")):
            if size > 1:
                raise ValueError(
                    f"{option}={size}: {type(config).__name__} has no {kind} parallelism; use {option}=1, or"
                    " FSDP2Config."
                )
    if isinstance(config, DDPConfig) and (sizes.tp, sizes.cp, sizes.dp_replicate) != (1, 1, 1):
        raise ValueError(
            f"tp_size={sizes.tp}, cp_size={sizes.cp}, dp_replicate_size={sizes.dp_replicate}: DDPConfig supports only"
            " data parallelism; leave these sizes at 1, or use FSDP2Config."
        )


def _check_world_size(world_size: int) -> None:
    if dist.is_initialized() and dist.get_world_size() != world_size:
        raise ValueError(
            f"world_size={world_size}, but the process group has {dist.get_world_size()} ranks, and all of them belong"
            " to the mesh; leave world_size out."
        )
    if not dist.is_initialized() and world_size > 1 and "RANK" not in os.environ:
        raise ValueError(
            f"world_size={world_size} needs {world_size} processes, but only this process was started; use `torchrun"
            f" --nproc-per-node {world_size}`, or leave world_size out."
        )


def destroy_process_group() -> None:
    """Destroy the process group, if there is one, so that no gloo thread aborts the process at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _wait_for_threads()


def _wait_for_threads(seconds: float = 1.0) -> None:
    """Wait until no gloo thread is running, for at most ``seconds``. This works only on Linux.

    Shortly after a collective, a gloo thread releases a tensor, for which it needs the Python interpreter. If the
    interpreter is already finalizing, it kills the thread, and the process aborts ("terminate called without an active
    exception"). ``destroy_process_group`` does not prevent this abort, because meshes and hooks keep groups and their
    threads alive.
    """
    end = time.monotonic() + seconds
    is_running = True
    while is_running and time.monotonic() < end:
        time.sleep(0.01)  # sleeping releases the GIL, so a gloo thread that waits for the GIL can run
        is_running = any("(pt_gloo_runloop) R" in _read(path) for path in Path("/proc/self/task").glob("*/stat"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread ended before its file was read
        return ""


def _get_own_index() -> int:
    """Return the index of this rank's device: the index of the current device or, if that is 0, the local rank."""
    if not torch.accelerator.is_available():
        return 0
    chosen = torch.accelerator.current_device_index()
    # under some launchers, each process sees only one device, whose index is 0 for every local rank
    return chosen or int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"
