"""Class that represents the ranks of a run, with their process groups, device mesh and collectives."""

import platform
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.compat.torch import set_group_timeout
from lightning_fsdp2.config import DistributedConfig
from lightning_fsdp2.mesh import get_axis_sizes, get_extra_group, get_mesh, get_optional_mesh
from lightning_fsdp2.mesh_axes import get_pipeline_control, get_stage_control
from lightning_fsdp2.ranks.coordination import gather_objects, get_group, shorten_timeout
from lightning_fsdp2.ranks.own_random import OwnRandomNumbers
from lightning_fsdp2.ranks.random_state import get_random_state, set_random_state
from lightning_fsdp2.sizes import CP_TP, DATA_PARALLEL, DP_CP, PIPELINE_PARALLEL, STAGE, MeshSizes
from lightning_fsdp2.strategies.launch.process_groups import get_groups, init_process_group, reduce

T = TypeVar("T")


class World:
    """The ranks of a run. :meth:`start` connects them, and :meth:`enter_mesh` sets their device mesh.

    Args:
        timeout: Timeout of collectives.
        rendezvous_timeout: How long to wait for the other ranks at the start.

    Attributes:
        timeout: Timeout of collectives, as given.
        group_timeout: Current timeout of the collectives of a step; :meth:`set_group_timeout` changes it.
        sizes: Sizes of the mesh, resolved for the number of ranks. The strategy sets this before :meth:`start`.
        hosts: Host names of all ranks, in rank order.
        shares_random_numbers: Whether all ranks draw the same random numbers in training.
        random_numbers: This rank's own random numbers, unless ``shares_random_numbers``.
        control_group: CPU group of all ranks, for messages that must not use the accelerator or mix with the
            collectives of a step. None before :meth:`start`, and while :mod:`lightning_fsdp2.plan` simulates a run.
        data_group: Group of the ranks that read different data and hold the same part of each sequence and layer.
        loss_group: Group of the ranks whose losses add up to the loss of a step.
        replica_group: Group of the ranks that read the same batch, in all pipeline stages.
        stage_group: Group of the ranks of this pipeline stage, which are all ranks if there is one stage.
        pipeline_group: Group of the ranks along the pipeline axis. None if there is one stage.
        pipeline_control: CPU group of the same ranks, for messages from the host. None if there is one stage, and while
            ``control_group`` is None.
    """

    data_group: dist.ProcessGroup
    loss_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    stage_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup | None
    pipeline_control: dist.ProcessGroup | None

    def __init__(self, *, timeout: timedelta, rendezvous_timeout: timedelta) -> None:
        self._rendezvous_timeout = rendezvous_timeout
        self._mesh: DeviceMesh | None = None
        self._pipeline_mesh: DeviceMesh | None = None
        self.timeout = timeout
        self.group_timeout = timeout
        self.sizes: MeshSizes | None = None
        self.hosts: list[str] = []
        self.shares_random_numbers = False
        self.random_numbers = OwnRandomNumbers()
        self.control_group: dist.ProcessGroup | None = None

    def start(
        self, config: DistributedConfig, environment: ClusterEnvironment, device: torch.device, num_processes: int
    ) -> None:
        """Connect this rank to the other ranks, and create the process groups that need no mesh.

        ``num_processes`` is the number of processes on this node.
        """
        init_process_group(
            environment,
            config.backend,
            device,
            num_processes=num_processes,
            bind_device_id=config.bind_device_id,
            timeout=self.timeout,
            rendezvous_timeout=self._rendezvous_timeout,
        )
        self.control_group = get_group("control", self.timeout)
        get_group("rendezvous", self.timeout)
        self.hosts = gather_objects(platform.node(), self.control_group)

    def enter_mesh(self, mesh: DeviceMesh) -> None:
        """Set the run's device mesh, and look up this rank's process groups in it.

        ``mesh`` is a mesh from :func:`~lightning_fsdp2.create_device_mesh`, not a submesh of it.
        """
        self._mesh = mesh
        # cache the groups, since slicing a mesh is slow with many ranks
        self.data_group = get_mesh(mesh, DATA_PARALLEL).get_group()
        self.loss_group = get_mesh(mesh, DP_CP).get_group()
        self.replica_group = _get_replica_group(mesh)
        pipeline = self._pipeline_mesh = get_optional_mesh(mesh, PIPELINE_PARALLEL)
        self.stage_group = cast(Any, dist.group.WORLD) if pipeline is None else get_mesh(mesh, STAGE).get_group()
        self.pipeline_group = self.pipeline_control = None
        if pipeline is not None:
            self.pipeline_group = pipeline.get_group()
            if self.control_group is not None:
                self.pipeline_control = get_pipeline_control(mesh)

    @property
    def has_mesh(self) -> bool:
        """Whether the device mesh has been set."""
        return self._mesh is not None

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of this rank's stage, with all axes; see :func:`~lightning_fsdp2.create_device_mesh`."""
        if self._mesh is None:
            raise RuntimeError("The strategy has no device mesh yet: the Trainer creates it in `setup`.")
        return self._mesh

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis of the mesh, by name. The pipeline axis is left out if there is one stage."""
        return get_axis_sizes(self.mesh)

    @property
    def size(self) -> int:
        """Number of all ranks, in all pipeline stages."""
        return self.pipeline_size * self.mesh.size()

    @property
    def pipeline_rank(self) -> int:
        """Index of this rank along the pipeline axis."""
        return 0 if self._pipeline_mesh is None else self._pipeline_mesh.get_local_rank()

    @property
    def pipeline_size(self) -> int:
        """Number of pipeline parallel ranks. The ranks along the pipeline axis read the same batch."""
        return 1 if self._pipeline_mesh is None else self._pipeline_mesh.size()

    @property
    def data_parallel_rank(self) -> int:
        """Index of the part of the data that this rank reads, out of ``data_parallel_size`` parts."""
        return get_mesh(self.mesh, DATA_PARALLEL).get_local_rank()

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different data: replicas x shards."""
        return get_mesh(self.mesh, DATA_PARALLEL).size()

    @property
    def has_own_random_numbers(self) -> bool:
        """Whether this rank draws other random numbers in training than the ranks that read different data."""
        return self.data_parallel_size > 1 and not self.shares_random_numbers

    def get_stage_control(self) -> dist.ProcessGroup:
        """Return the CPU group of the ranks of this pipeline stage. All of them must make the first call."""
        if self.pipeline_size == 1:
            return cast(Any, self.control_group)
        return get_stage_control(self.mesh)

    def shorten_timeout(self, limit: timedelta) -> timedelta:
        """Return ``limit``, or :attr:`timeout` if that is shorter, or longer than its default."""
        return shorten_timeout(self.timeout, limit)

    def set_group_timeout(self, timeout: timedelta | None) -> None:
        """Change the timeout of collectives that start from now on. None restores the strategy's ``timeout``.

        This applies to all groups that steps use, but not to the group for background saves.
        """
        timeout = timeout or self.timeout
        if timeout == self.group_timeout:
            return
        self.group_timeout = timeout
        for group in (dist.group.WORLD, self.control_group, *get_groups(self.mesh)):
            set_group_timeout(group, timeout)

    # ------------------------------------------------------------------ collectives

    def wait(self) -> None:
        """Wait until all ranks have called this. Return at once if :attr:`control_group` is None."""
        if self.control_group is not None:
            dist.barrier(group=self.control_group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast an object from rank ``src``, and return it on all ranks."""
        if self.control_group is None:
            return obj
        message = [obj]
        dist.broadcast_object_list(message, src, group=self.control_group)
        return message[0]

    def share_random_state(self, device: torch.device) -> None:
        """Set the random state of all ranks to that of rank 0."""
        if self.size > 1:
            set_random_state(self.broadcast(get_random_state(device)), device)

    def begin_random_numbers(self, device: torch.device) -> None:
        """Give each data parallel rank its own random numbers for the training that begins.

        The ranks of a replica read the same batch, so their dropout must use the same numbers.
        """
        if self.has_own_random_numbers:
            self.random_numbers.begin(self.data_parallel_rank, device)

    def decide(self, decision: bool, *, all: bool) -> bool:
        """Return whether ``decision`` is true on all ranks or, with ``all=False``, on any rank."""
        return bool(self._reduce_number(int(decision), dist.ReduceOp.MIN if all else dist.ReduceOp.MAX))

    def reduce(self, tensor: Any, device: torch.device, group: dist.ProcessGroup | None, op: Any) -> Any:
        """Reduce a tensor over ``group``, by default over the ranks that read different data.

        The tensor is first moved to ``device``, since the backend may not support host tensors. A value other than a
        tensor is returned unchanged.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        return reduce(tensor.to(device), group or self.data_group, op).to(tensor.device)

    def add_up_over_data(self, number: int) -> int:
        """Add up ``number`` on the host, over the ranks that read different data, and return the sum."""
        total = self._reduce_number(number, dist.ReduceOp.SUM)
        return int(total) * self.data_parallel_size // self.size

    def find_maximum(self, numbers: Any) -> Tensor:
        """Return the element-wise maximum of ``numbers`` over all ranks, as float64 on the host."""
        largest = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control_group)
        return largest

    def find_maximum_of_stage(self, numbers: Any) -> Tensor:
        """Return the element-wise maximum of ``numbers`` over the ranks of this stage, as float64 on the host."""
        largest = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.get_stage_control())
        return largest

    def start_maximum(self, number: int) -> Callable[[], int]:
        """Begin to compute the maximum of ``number`` over all ranks. Return a function that waits for the result."""
        largest = torch.tensor(number)
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control_group, async_op=True)

        def wait() -> int:
            work.wait()
            return int(largest)

        return wait

    def _reduce_number(self, number: int, op: Any) -> int:
        result = torch.tensor(number)
        dist.all_reduce(result, op=op, group=self.control_group)
        return int(result)


def _get_replica_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that read the same batch: those along ``cp_tp`` in each pipeline stage."""
    own, pipeline = get_mesh(mesh, CP_TP), get_optional_mesh(mesh, PIPELINE_PARALLEL)
    if pipeline is None:
        return own.get_group()
    if own.size() == 1:
        return pipeline.get_group()
    # the ranks of each stage are consecutive
    shifts = [(stage - pipeline.get_local_rank()) * mesh.size() for stage in range(pipeline.size())]
    return get_extra_group(mesh, "replica", [rank + shift for shift in shifts for rank in own.mesh.tolist()])
