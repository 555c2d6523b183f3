"""The processes of a run: their ranks, their mesh, and the collectives between them."""

import os
import platform
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_fsdp2.compat.torch import set_group_timeout
from lightning_fsdp2.config import DistributedConfig
from lightning_fsdp2.mesh import (
    CONTEXT_PARALLEL,
    CP_TP,
    DATA_PARALLEL,
    DP_CP,
    TENSOR_PARALLEL,
    MeshSizes,
    ParallelSizes,
    get_mesh,
)
from lightning_fsdp2.ranks.coordination import gather_objects, get_group
from lightning_fsdp2.strategies.launch import process_groups as distributed
from lightning_fsdp2.strategies.launch.end_with_parent import end_with_parent
from lightning_fsdp2.strategies.launch.launcher import RankLauncher, is_of_launcher

T = TypeVar("T")

_USES_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that torchrun's own agent sets. This agent starts the ranks from its main thread."""


class WorldStrategy(ParallelStrategy):
    """Strategy that starts the processes of a run, arranges them in a mesh and lets them communicate.

    Args:
        sizes: Requested sizes of the mesh.
        config: Config whose ``backend`` and ``bind_device_id`` are read here.
        timeout: Timeout of collectives.
        rendezvous_timeout: How long to wait for the other ranks at the start.

    Attributes:
        hosts: Host names of all ranks, in rank order.
    """

    def __init__(
        self,
        *,
        sizes: ParallelSizes,
        config: DistributedConfig,
        timeout: timedelta,
        rendezvous_timeout: timedelta,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_nodes = 1
        self.asked_sizes = sizes
        self.hosts: list[str] = []
        self._timeout = timeout
        self._rendezvous_timeout = rendezvous_timeout
        self.group_timeout = timeout
        """The current timeout of the collectives of a step. :meth:`set_group_timeout` changes it."""
        self._full_device_mesh: DeviceMesh | None = None
        self._control_group: dist.ProcessGroup | None = None

    # ------------------------------------------------------------------ mesh and ranks

    @property
    def full_device_mesh(self) -> DeviceMesh:
        """The mesh with all four axes; see :func:`~lightning_fsdp2.create_device_mesh`."""
        if self._full_device_mesh is None:
            raise RuntimeError("The device mesh exists once the Trainer has started its processes (`setup`).")
        return self._full_device_mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh ``(data_parallel, context_parallel, tensor_parallel)``, also ``LightningModule.device_mesh``."""
        return get_mesh(self.full_device_mesh, (DATA_PARALLEL, CONTEXT_PARALLEL, TENSOR_PARALLEL))

    @property
    def dp_size(self) -> int | Literal["auto"] | None:
        """Number of data parallel ranks; before setup, the requested value."""
        return self.asked_sizes.dp_size if self._full_device_mesh is None else self.sizes.dp

    @property
    def dp_replicate_size(self) -> int | Literal["auto"] | None:
        """Number of replicas of the sharded model; before setup, the requested value."""
        return self.asked_sizes.dp_replicate_size if self._full_device_mesh is None else self.sizes.dp_replicate

    @property
    def tp_size(self) -> int:
        """Number of tensor parallel ranks."""
        return self.asked_sizes.tp_size or 1

    @property
    def cp_size(self) -> int:
        """Number of context parallel ranks."""
        return self.asked_sizes.cp_size or 1

    @property
    def data_parallel_rank(self) -> int:
        """Index of the part of the data that this rank reads, out of ``data_parallel_size`` parts."""
        return get_mesh(self.full_device_mesh, DATA_PARALLEL).get_local_rank()

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different data: replicas x shards."""
        return get_mesh(self.full_device_mesh, DATA_PARALLEL).size()

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise RuntimeError("The devices are known once the strategy was given to a Trainer.")
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
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def set_world_ranks(self) -> None:
        """Set the global rank and the world size; the Trainer calls this before any process group exists."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ processes

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment.creates_processes_externally:
            self._take_nodes_of_torchrun()
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            self._check_tasks_of_slurm()
            if isinstance(self.cluster_environment, TorchElasticEnvironment) and _USES_AGENT_STORE in os.environ:
                end_with_parent(os.getppid())
            return
        if hasattr(sys, "ps1"):  # a notebook or an interactive shell
            if self.num_processes > 1:
                raise ValueError(
                    f"devices={self.num_processes} needs that many processes, and a notebook is one. Use devices=1"
                    " here, save the code as a script and run `python script.py` or `torchrun --nproc-per-node"
                    f" {self.num_processes} script.py`, or use the command line `lightning-fsdp2 fit`."
                )
            return
        self._launcher = RankLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self._check_variables
        )

    def _check_variables(self) -> None:
        """Refuse variables left by another launcher or an earlier run, if Lightning starts the processes."""
        environment = self.cluster_environment
        if not isinstance(environment, LightningEnvironment):
            return
        node, local, devices = environment.node_rank(), environment.local_rank(), self.num_processes
        asked = f"Trainer(devices={devices}, num_nodes={self.num_nodes})"
        if not 0 <= node < self.num_nodes:
            name = "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"
            raise ValueError(
                f"{name}={node} is no node of {asked}, which are 0 to {self.num_nodes - 1}. Set num_nodes to the number"
                f" of nodes, or unset {name}."
            )
        for name, own in (("WORLD_SIZE", self.num_nodes * devices), ("RANK", node * devices + local)):
            value = os.environ.get(name, str(own))
            if value != str(own):
                raise ValueError(
                    f"{name}={value} contradicts {asked}, in which it would be {own} here (NODE_RANK={node},"
                    f" LOCAL_RANK={local}). Unset it, which a launcher or an earlier run has left in the environment,"
                    " or start the run by torchrun, which sets all of them."
                )

    @property
    def is_launched_by_lightning(self) -> bool:
        """Whether the first process of the node started the other ranks and watches them."""
        return isinstance(self.cluster_environment, LightningEnvironment) and is_of_launcher()

    def _take_nodes_of_torchrun(self) -> None:
        """Take the number of nodes from torchrun.

        With ``--nnodes 2:4`` torchrun starts the run on as many nodes as are available, and restarts it when a node is
        lost.
        """
        if not isinstance(self.cluster_environment, TorchElasticEnvironment):
            return
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", self.num_nodes))  # launchers other than torchrun may not set it
        if nodes != self.num_nodes:
            rank_zero_info(f"torchrun has started {nodes} node(s) in place of Trainer(num_nodes={self.num_nodes}).")
            self.num_nodes = nodes

    def _check_tasks_of_slurm(self) -> None:
        """Check that SLURM has started the right number of tasks; Lightning only checks the options of ``sbatch``."""
        asked = self.num_nodes * self.num_processes
        if isinstance(self.cluster_environment, SLURMEnvironment) and self.world_size != asked:
            raise ValueError(
                f"SLURM has started {self.world_size} task(s) (SLURM_NTASKS), and Trainer(devices={self.num_processes},"
                f" num_nodes={self.num_nodes}) asks for {asked}. Set both to what `srun --nodes` and"
                " `--ntasks-per-node` say."
            )

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of the mesh, resolved for the number of ranks.

        Raises:
            ValueError: When the sizes do not fit the number of ranks.
        """
        return self.asked_sizes.resolve(world_size=self.world_size, num_nodes=self.num_nodes)

    @override
    def setup_environment(self) -> None:
        RankLauncher.has_failed = False
        self._check_variables()  # again: the launcher does not run in a notebook
        sizes = self.sizes  # raises before any process group exists
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        distributed.init_process_group(
            self.cluster_environment,
            self.config.backend,
            self.root_device,
            bind_device_id=self.config.bind_device_id,
            timeout=self._timeout,
            rendezvous_timeout=self._rendezvous_timeout,
        )
        # for messages that must not touch the accelerator or mix with the step's collectives
        self._control_group = get_group("control", self._timeout)
        get_group("rendezvous", self._timeout)
        self.hosts = gather_objects(platform.node(), self._control_group)
        self.check_ranks()
        self.enter_mesh(distributed.get_device_mesh(sizes, self.root_device.type, self._timeout))

    def check_ranks(self) -> None:
        """Refuse ranks that would train differently. They can already communicate, but have no mesh yet."""

    def enter_mesh(self, mesh: DeviceMesh) -> None:
        """Store a mesh with all four axes, and this rank's process groups in it."""
        self._full_device_mesh = mesh
        # cache the groups, since slicing a mesh reads its ranks one by one
        self._data_group = get_mesh(mesh, DATA_PARALLEL).get_group()
        self._loss_group = get_mesh(mesh, DP_CP).get_group()
        self._replica_group = get_mesh(mesh, CP_TP).get_group()

    # ------------------------------------------------------------------ collectives

    def set_group_timeout(self, timeout: timedelta | None) -> None:
        """Change the timeout of collectives that start from now on; None restores the strategy's ``timeout``.

        This applies to all groups that steps use, but not to the group for background saves.
        """
        timeout = timeout or self._timeout
        if timeout == self.group_timeout:
            return
        self.group_timeout = timeout
        for group in (dist.group.WORLD, self._control_group, *distributed.get_groups(self.full_device_mesh)):
            set_group_timeout(group, timeout)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._control_group is not None:
            dist.barrier(group=self._control_group)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._control_group is None:
            return obj
        message = [obj]
        dist.broadcast_object_list(message, src, group=self._control_group)
        return message[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that read different data; ranks that read the same data count once.

        A DTensor is gathered first. Anything other than a tensor is returned unchanged.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        if group is None:
            group = self._data_group
        # the accelerator's backend may not support host tensors
        return distributed.reduce(tensor.to(self.root_device), group, reduce_op).to(tensor.device)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        result = torch.tensor(int(decision))
        op = dist.ReduceOp.MIN if all else dist.ReduceOp.MAX
        dist.all_reduce(result, op=op, group=self._control_group)
        return bool(result)

    def start_maximum(self, number: int) -> Callable[[], int]:
        """Start to find the largest ``number`` of all ranks, on the host. Return a function that waits for it."""
        largest = torch.tensor(number)
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control_group, async_op=True)

        def wait() -> int:
            work.wait()
            return int(largest)

        return wait

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return distributed.all_gather(tensor, group or dist.group.WORLD, sync_grads)
