"""Creation of the default process group and the device mesh, and a few collectives for the strategies."""

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.compat.torch import all_gather_with_gradient, set_group_timeout
from lightning_fsdp2.loggers.run_identity import get_versions
from lightning_fsdp2.mesh import (
    build_device_mesh,
    check_bound_device,
    destroy_process_group,
    get_default_backend,
    get_extra_groups,
    get_views,
)
from lightning_fsdp2.ranks.default_group import keep_with_default_group
from lightning_fsdp2.ranks.whole_tensors import gather
from lightning_fsdp2.sizes import MeshSizes
from lightning_fsdp2.strategies.launch.rendezvous import meet


def init_process_group(
    environment: ClusterEnvironment,
    backend: str | None,
    device: torch.device,
    *,
    num_processes: int,
    bind_device_id: bool = False,
    timeout: timedelta,
    rendezvous_timeout: timedelta,
) -> None:
    """Start the default process group, unless the user has already done so.

    The group lives until the interpreter exits. Lightning calls ``teardown`` after every stage, but a sharded module
    needs the group in later stages too.

    Args:
        environment: Cluster environment, which knows the rank of this process.
        backend: Backend of the group. None chooses a backend for ``device``, or accepts an existing group's backend.
        device: Device of this rank.
        num_processes: Number of processes on this node.
        bind_device_id: Whether the group is bound to ``device``.
        timeout: Timeout of the group's collectives.
        rendezvous_timeout: How long to wait for the other ranks.

    Raises:
        TimeoutError: When a rank does not appear in time.
        ValueError: When a group with a different size, backend or device already exists, when the backend does not
            exist or not for ``device``, when versions or backends differ between the ranks, or when there is no device
            to bind the group to.
    """
    if bind_device_id:
        check_bound_device(backend or get_default_backend(device), device)
    rank, world_size = environment.global_rank(), environment.world_size()
    if dist.is_initialized():
        _check_group_of_user(backend, device, world_size)
        return
    backend = backend or get_default_backend(device)
    _check_backend(backend, device)
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    if world_size > 1:
        os.environ["MASTER_ADDR"] = environment.main_address  # user code and our error messages read these variables
        os.environ["MASTER_PORT"] = str(environment.main_port)
        store = meet(
            environment.main_address,
            environment.main_port,
            rank,
            world_size,
            on_one_node=world_size == num_processes,
            timeout=rendezvous_timeout,
            run={"the backend": backend, **_get_versions()},
        )
        # replace the rendezvous timeout, because process groups use the store from now on
        store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if bind_device_id else None,
    )
    atexit.register(destroy_process_group)


def _check_group_of_user(backend: str | None, device: torch.device, world_size: int) -> None:
    """Refuse a default group that exists already and is not the one that the Trainer asks for."""
    if dist.get_world_size() != world_size:
        raise ValueError(
            f"The Trainer asks for {world_size} rank(s) (devices x num_nodes), but this process already belongs to"
            f" a group of {dist.get_world_size()}; use the same number, or start a new process."
        )
    if backend is not None and not _has_backend(backend, device):
        raise ValueError(
            f"config.backend={backend!r}, but this process already belongs to a group with the backend"
            f" {dist.get_backend_config()!r}; leave `backend` out to use that group, or start a new process."
        )


def get_device_mesh(sizes: MeshSizes, device_type: str, timeout: timedelta) -> DeviceMesh:
    """Return the device mesh with these sizes.

    All Trainers of the process share it, until the default group is destroyed, because its groups hold device memory.
    """
    device_mesh = keep_with_default_group(
        (sizes, device_type), lambda: build_device_mesh(sizes, device_type=device_type)
    )
    for group in get_groups(device_mesh):
        set_group_timeout(group, timeout)
    return device_mesh


def get_groups(device_mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return all process groups of a run's mesh, including those from :func:`~lightning_fsdp2.mesh.get_extra_group`.

    They include the groups of all views of the mesh. A view arranges the same ranks in different axes.
    """
    groups = [group for view in get_views(device_mesh) for group in view.get_all_groups()]
    return groups + get_extra_groups(device_mesh)


def reduce(tensor: Tensor, group: dist.ProcessGroup, op: Any) -> Tensor:
    """All-reduce a copy of ``tensor`` over ``group``. A DTensor is gathered first.

    Args:
        tensor: Tensor of any shape and dtype. The mean of integers is a float.
        group: Process group of the ranks to reduce over.
        op: ``"mean"`` (also ``"avg"``, None), ``"sum"``, ``"max"``, ``"min"``, ``"product"`` or a ``ReduceOp``.
    """
    result = gather(tensor).clone()
    is_mean = op is None or str(op).lower() in ("mean", "avg") or op == dist.ReduceOp.AVG
    if is_mean and not result.is_floating_point():
        result = result.float()
    reduce_op = dist.ReduceOp.SUM if is_mean else _get_reduce_op(op)
    dist.all_reduce(result, op=reduce_op, group=group)
    return result / group.size() if is_mean else result


def all_gather(tensor: Tensor, group: dist.ProcessGroup, sync_grads: bool) -> Tensor:
    """Gather the equally shaped tensors of all ranks into ``[ranks, *tensor.shape]``, with gradients if requested."""
    tensor = gather(tensor)
    if sync_grads:
        return all_gather_with_gradient(tensor.contiguous()[None], group)
    result = [torch.empty_like(tensor) for _ in range(group.size())]
    with torch.no_grad():
        dist.all_gather(result, tensor.contiguous(), group=group)
    return torch.stack(result)


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, *, source: int = 0) -> None:
    """Broadcast tensors from one rank of a group to its other ranks, in place and in one message per device.

    Args:
        tensors: Strided tensors of any dtype, with the same shapes and dtypes on all ranks.
        group: Process group; None for all ranks.
        source: Rank within the group that has the tensors.
    """
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [tensor for tensor in tensors if tensor.device == device]
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in here]
        message = torch.cat(parts)
        dist.broadcast(message, group=group, group_src=source)
        for tensor, received in zip(here, message.split([part.numel() for part in parts]), strict=True):
            tensor.copy_(received.clone().view(tensor.dtype).view(tensor.shape))


def _check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that torch was built without, or that has no collectives for the rank's device."""
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    for name in names:
        if not dist.is_backend_available(name):
            raise ValueError(f"config.backend={backend!r}: this torch was built without {name}; leave `backend` out.")
    if device.type not in dist.BackendConfig(dist.Backend(backend)).get_device_backend_map():
        raise ValueError(
            f"config.backend={backend!r} has no backend for this rank's device, {device.type}; leave `backend` out, or"
            f" use {get_default_backend(device)!r}."
        )


def _has_backend(backend: str, device: torch.device) -> bool:
    """Return whether the existing default group uses the same backends as ``backend``, such as "cpu:gloo,cuda:nccl".

    The backends for ``device`` are compared, and also those for the CPU if ``backend`` names one.
    """
    asked, existing = (
        dist.BackendConfig(dist.Backend(name)).get_device_backend_map() for name in (backend, dist.get_backend_config())
    )
    return all(asked.get(kind) == existing.get(kind) for kind in {device.type, *({"cpu"} & asked.keys())})


def _get_reduce_op(op: Any) -> Any:
    return getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op


def _get_versions() -> dict[str, str]:
    """Return the package versions that must be the same on all ranks. The Python version may differ."""
    return {f"the version of {name}": str(version) for name, version in get_versions().items() if name != "python"}
