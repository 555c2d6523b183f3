"""Checks that Lightning, torchrun or SLURM has started as many processes as the Trainer asks for."""

import os
import sys

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fsdp2.strategies.launch.end_with_parent import end_with_parent
from lightning_fsdp2.strategies.launch.launcher import RankLauncher

_USES_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that shows that torchrun's agent started this rank.

The agent's main thread starts the ranks. The thread matters, because the kernel kills a rank that has called
:func:`end_with_parent` when the thread that started the rank ends.
"""

_RANKS_PER_PROCESSOR = 8
"""Number of processes that are started for each processor at most; more would hardly get through their imports."""


def get_number_of_nodes(environment: ClusterEnvironment, num_nodes: int) -> int:
    """Return the number of nodes that torchrun has started, or ``num_nodes`` under any other launcher.

    With ``--nnodes 2:4``, torchrun starts the run on two to four available nodes, and restarts it when a node is lost.
    """
    if not isinstance(environment, TorchElasticEnvironment):
        return num_nodes
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", num_nodes))  # not every launcher sets this
    if nodes != num_nodes:
        rank_zero_info(f"torchrun has started {nodes} node(s) instead of Trainer(num_nodes={num_nodes}).")
    return nodes


def make_launcher(environment: ClusterEnvironment, devices: int, nodes: int) -> RankLauncher | None:
    """Build the launcher that starts the other ranks of this node, or return None if no rank has to be started.

    Args:
        environment: Cluster environment of this process.
        devices: Number of processes per node.
        nodes: Number of nodes.

    Raises:
        ValueError: When the launcher has started a different number of processes than the Trainer asks for, when a
            notebook would have to start processes, when this machine has too few processors for the processes to start,
            or when ``MASTER_PORT`` is not a port.
    """
    _check_port()
    if environment.creates_processes_externally:
        _check_number_of_torchrun(environment, devices, nodes)
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
        _check_tasks_of_slurm(environment, devices, nodes)
        _check_local_rank(environment, devices)
        if isinstance(environment, TorchElasticEnvironment) and _USES_AGENT_STORE in os.environ:
            end_with_parent(os.getppid())
        return None
    if hasattr(sys, "ps1"):  # only notebooks and interactive shells have this attribute
        if devices > 1:
            raise ValueError(
                f"devices={devices} needs {devices} processes, but a notebook is one process. Use devices=1 here, save"
                f" the code as a script and run `python script.py` or `torchrun --nproc-per-node {devices} script.py`,"
                " or use the command line `lightning-fsdp2 fit`."
            )
        return None
    _check_number(devices)
    return RankLauncher(environment, devices, nodes, lambda: check_variables(environment, devices, nodes))


def check_variables(environment: ClusterEnvironment | None, devices: int, nodes: int) -> None:
    """Refuse environment variables left by another launcher or an earlier run, if Lightning starts the processes.

    Raises:
        ValueError: When a variable contradicts the Trainer. The message names the variable and its valid values.
    """
    if not isinstance(environment, LightningEnvironment):
        return
    node, local = environment.node_rank(), environment.local_rank()
    asked = f"Trainer(devices={devices}, num_nodes={nodes})"
    if not 0 <= node < nodes:
        name = "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"
        raise ValueError(
            f"{name}={node} is out of range for {asked}, whose nodes are 0 to {nodes - 1}. Set num_nodes to the number"
            f" of nodes, or unset {name}."
        )
    for name, own in (("WORLD_SIZE", nodes * devices), ("RANK", node * devices + local)):
        value = os.environ.get(name, str(own))
        if value != str(own):
            raise ValueError(
                f"{name}={value} contradicts {asked}, which needs {name}={own} in this process (NODE_RANK={node},"
                f" LOCAL_RANK={local}). Another launcher or an earlier run has probably set {name}: unset it, or start"
                " the run with torchrun, which sets all of these variables."
            )


def _check_number(devices: int) -> None:
    """Refuse to start far more processes than this machine has processors, as a mistyped number of CPUs would."""
    processors = os.cpu_count() or 1
    most = _RANKS_PER_PROCESSOR * processors
    if devices > most:
        raise ValueError(
            f"devices={devices} would start {devices} processes, but this machine has {processors} processor(s); use at"
            f" most {most} ({_RANKS_PER_PROCESSOR} for each). `torchrun --nproc-per-node {devices}` starts them anyway."
        )


def _check_port() -> None:
    port = os.environ.get("MASTER_PORT")
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT={port!r} is not a port; set it to a number from 1 to 65535, or unset it.")


def _check_local_rank(environment: ClusterEnvironment, devices: int) -> None:
    rank = environment.local_rank()
    if not 0 <= rank < devices:
        raise ValueError(
            f"LOCAL_RANK={rank} is out of range for Trainer(devices={devices}), whose ranks on a node are 0 to"
            f" {devices - 1}. Set devices to the number of processes on a node, or unset LOCAL_RANK."
        )


def _check_number_of_torchrun(environment: ClusterEnvironment, devices: int, nodes: int) -> None:
    """Check that torchrun has started one process per rank. Lightning would check this too, but without a remedy."""
    processes = environment.world_size()
    if isinstance(environment, TorchElasticEnvironment) and processes != nodes * devices:
        raise ValueError(
            f"torchrun has started {processes} process(es), but Trainer(devices={devices}, num_nodes={nodes}) asks for"
            f" {nodes * devices}. Set num_nodes to the value of `torchrun --nnodes`, and devices to the value of"
            " `--nproc-per-node`."
        )


def _check_tasks_of_slurm(environment: ClusterEnvironment, devices: int, nodes: int) -> None:
    """Check that SLURM has started one task per rank. Lightning itself checks only the options of ``sbatch``."""
    tasks = environment.world_size()
    if isinstance(environment, SLURMEnvironment) and tasks != nodes * devices:
        raise ValueError(
            f"SLURM has started {tasks} task(s) (SLURM_NTASKS), but Trainer(devices={devices}, num_nodes={nodes}) asks"
            f" for {nodes * devices}. Set num_nodes to the value of `srun --nodes`, and devices to the value"
            " of `--ntasks-per-node`."
        )
