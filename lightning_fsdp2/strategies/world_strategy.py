"""Base class that handles a strategy's ranks, processes and collectives. Most methods delegate to a :class:`World`."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_fsdp2.config import DistributedConfig
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.sizes import (
    CONTEXT_PARALLEL,
    DATA_PARALLEL,
    DP_REPLICATE,
    TENSOR_PARALLEL,
    MeshSizes,
    ParallelSizes,
)
from lightning_fsdp2.strategies.launch.environment import get_number_of_nodes, make_launcher
from lightning_fsdp2.strategies.launch.launcher import is_of_launcher
from lightning_fsdp2.strategies.launch.process_groups import all_gather
from lightning_fsdp2.strategies.parts.world import World

T = TypeVar("T")


class WorldStrategy(ParallelStrategy):
    """Lightning strategy that manages the ranks of a run, their device mesh and their collectives.

    Attributes:
        config: The flags of the strategy.
        asked_sizes: Mesh sizes that the user asked for.
        world: The ranks of the run, their groups and their mesh.
    """

    def __init__(
        self, *, sizes: ParallelSizes, config: DistributedConfig, timeout: timedelta, rendezvous_timeout: timedelta
    ) -> None:
        super().__init__()
        self.config = config
        self.asked_sizes = sizes
        self.num_nodes = 1
        self.world = World(timeout=timeout, rendezvous_timeout=rendezvous_timeout)

    # ------------------------------------------------------------------ mesh and ranks

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of the mesh, resolved for the number of ranks in the run.

        Raises:
            ValueError: When the sizes do not fit the number of ranks.
        """
        return self.world.sizes or self.asked_sizes.resolve(world_size=self.world_size, num_nodes=self.num_nodes)

    @property
    def full_device_mesh(self) -> DeviceMesh:
        """The device mesh of this rank's stage, with all axes; see :func:`~lightning_fsdp2.create_device_mesh`."""
        return self.world.mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh ``(data_parallel, context_parallel, tensor_parallel)``, also set as the module's ``device_mesh``."""
        return get_mesh(self.full_device_mesh, (DATA_PARALLEL, CONTEXT_PARALLEL, TENSOR_PARALLEL))

    @property
    def dp_size(self) -> int | Literal["auto"] | None:
        """Number of data parallel ranks. Before setup, this is the value that the user asked for."""
        return self.data_parallel_size if self.world.has_mesh else self.asked_sizes.dp_size

    @property
    def dp_replicate_size(self) -> int | Literal["auto"] | None:
        """Number of replicas of the sharded model. Before setup, this is the value that the user asked for."""
        return self.world.axis_sizes[DP_REPLICATE] if self.world.has_mesh else self.asked_sizes.dp_replicate_size

    @property
    def tp_size(self) -> int:
        """Number of tensor parallel ranks."""
        return self.asked_sizes.tp_size or 1

    @property
    def cp_size(self) -> int:
        """Number of context parallel ranks."""
        return self.asked_sizes.cp_size or 1

    @property
    def ep_size(self) -> int:
        """Number of expert parallel ranks."""
        return self.asked_sizes.ep_size or 1

    @property
    def pp_size(self) -> int:
        """Number of pipeline parallel ranks."""
        return self.asked_sizes.pp_size or 1

    @property
    def data_parallel_rank(self) -> int:
        """Index of the part of the data that this rank reads, out of ``data_parallel_size`` parts."""
        return self.world.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different data: replicas x shards."""
        return self.world.data_parallel_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise RuntimeError("The strategy has no devices yet: pass it to a Trainer first.")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices or [])

    @property
    def is_distributed(self) -> bool:
        """True, so that Lightning shards data and synchronises metrics."""
        return True

    @property
    def is_launched_by_lightning(self) -> bool:
        """Whether the first process of the node started the other ranks and watches them."""
        return isinstance(self.cluster_environment, LightningEnvironment) and is_of_launcher()

    @property
    def hosts(self) -> list[str]:
        """Host names of all ranks, in rank order."""
        return self.world.hosts

    # ------------------------------------------------------------------ processes

    def set_world_ranks(self) -> None:
        """Set the global rank and the world size, before any process group exists."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        environment = cast(Any, self.cluster_environment)
        self.num_nodes = get_number_of_nodes(environment, self.num_nodes)
        self._launcher = make_launcher(environment, self.num_processes, self.num_nodes)

    # ------------------------------------------------------------------ collectives

    @property
    def group_timeout(self) -> timedelta:
        """The current timeout of the collectives that run during a step."""
        return self.world.group_timeout

    def set_group_timeout(self, timeout: timedelta | None) -> None:
        """Change the timeout of collectives that start from now on. None restores the strategy's ``timeout``."""
        self.world.set_group_timeout(timeout)

    @override
    def barrier(self, name: str | None = None) -> None:
        self.world.wait()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.world.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ``group``, by default over the ranks that read different data.

        By default, data that several ranks read counts only once. A DTensor is gathered first. Anything other than a
        tensor is returned unchanged.
        """
        return self.world.reduce(tensor, self.root_device, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.world.decide(decision, all=all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return all_gather(tensor, group or dist.group.WORLD, sync_grads)

    def start_maximum(self, number: int) -> Callable[[], int]:
        """Begin to compute the maximum of ``number`` over all ranks. Return a function that waits for the result."""
        return self.world.start_maximum(number)
