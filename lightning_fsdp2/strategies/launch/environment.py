"""The environment that starts the ranks (Lightning itself, torchrun, SLURM), and whether it fits the Trainer."""

import os
import sys

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fsdp2.strategies.launch.end_with_parent import end_with_parent
from lightning_fsdp2.strategies.launch.launcher import RankLauncher

_USES_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that torchrun's own agent sets. This agent starts the ranks from its main thread."""


def get_number_of_nodes(environment: ClusterEnvironment, num_nodes: int) -> int:
    """Return the number of nodes that torchrun has started, or ``num_nodes`` in any other environment.

    With ``--nnodes 2:4`` torchrun starts the run on as many nodes as are available, and restarts it when a node is
    lost.
    """
    if not isinstance(environment, TorchElasticEnvironment):
        return num_nodes
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", num_nodes))  # launchers other than torchrun may not set it
    if nodes != num_nodes:
        rank_zero_info(f"torchrun has started {nodes} node(s) in place of Trainer(num_nodes={num_nodes}).")
    return nodes


def make_launcher(environment: ClusterEnvironment, devices: int, nodes: int) -> RankLauncher | None:
    """Build the launcher that starts the other ranks of this node. None if they run already, or there are none.

    Args:
        environment: Cluster environment of this process.
        devices: Number of processes per node.
        nodes: Number of nodes.

    Raises:
        ValueError: When the number of started processes is not the one that the Trainer asks for, or when a notebook
            would have to start other processes.
    """
    if environment.creates_processes_externally:
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
        _check_tasks_of_slurm(environment, devices, nodes)
        if isinstance(environment, TorchElasticEnvironment) and _USES_AGENT_STORE in os.environ:
            end_with_parent(os.getppid())
        return None
    if hasattr(sys, "ps1"):  # a notebook or an interactive shell
        if devices > 1:
            raise ValueError(
                f"devices={devices} needs that many processes, and a notebook is one. Use devices=1 here, save the code"
                f" as a script and run `python script.py` or `torchrun --nproc-per-node {devices} script.py`, or use"
                " the command line `lightning-fsdp2 fit`."
            )
        return None
    return RankLauncher(environment, devices, nodes, lambda: check_variables(environment, devices, nodes))


def check_variables(environment: ClusterEnvironment | None, devices: int, nodes: int) -> None:
    """Refuse variables left by another launcher or an earlier run, if Lightning starts the processes.

    Raises:
        ValueError: When a variable contradicts the Trainer. The message names the variable and both values.
    """
    if not isinstance(environment, LightningEnvironment):
        return
    node, local = environment.node_rank(), environment.local_rank()
    asked = f"Trainer(devices={devices}, num_nodes={nodes})"
    if not 0 <= node < nodes:
        name = "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"
        raise ValueError(
            f"{name}={node} is no node of {asked}, which are 0 to {nodes - 1}. Set num_nodes to the number of nodes, or"
            f" unset {name}."
        )
    for name, own in (("WORLD_SIZE", nodes * devices), ("RANK", node * devices + local)):
        value = os.environ.get(name, str(own))
        if value != str(own):
            raise ValueError(
                f"{name}={value} contradicts {asked}, in which it would be {own} here (NODE_RANK={node},"
                f" LOCAL_RANK={local}). Unset it, which a launcher or an earlier run has left in the environment,"
                " or start the run by torchrun, which sets all of them."
            )


def _check_tasks_of_slurm(environment: ClusterEnvironment, devices: int, nodes: int) -> None:
    """Check that SLURM has started the right number of tasks; Lightning only checks the options of ``sbatch``."""
    tasks = environment.world_size()
    if isinstance(environment, SLURMEnvironment) and tasks != nodes * devices:
        raise ValueError(
            f"SLURM has started {tasks} task(s) (SLURM_NTASKS), and Trainer(devices={devices}, num_nodes={nodes}) asks"
            f" for {nodes * devices}. Set both to what `srun --nodes` and `--ntasks-per-node` say."
        )
