"""Construction of a model on the meta device, as one rank of a simulated world of any size would build it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.compat.lightning import call_module_hook, let_steps_run_alone
from lightning_fsdp2.compat.torch_simulation import simulate_world
from lightning_fsdp2.mesh import build_device_mesh
from lightning_fsdp2.strategies.mesh_strategy import MeshStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_BATCHES = 10**6
"""Number of batches that an epoch claims to have, so large that no epoch ends."""


@contextmanager
def build_model(
    trainer: "Trainer", module: "LightningModule", *, world_size: int, num_nodes: int, rank: int = 0
) -> Iterator[DeviceMesh]:
    """Build the model of ``module`` as ``Trainer.fit`` does, and run the ``with`` block as one of ``world_size`` ranks.

    The module's hooks ``setup`` and ``configure_model`` are called on the meta device. Nothing is sharded, and no
    weights are allocated. Neither the trainer nor the module can be used after the block.

    Args:
        trainer: Trainer with one of this package's strategies. Its devices are ignored.
        module: Module that was built on the meta device, or that builds its model there in ``configure_model``.
        world_size: Number of ranks.
        num_nodes: Number of nodes. With ``dp_replicate_size="auto"``, there is one replica per node.
        rank: Rank that the block runs as.

    Yields:
        The mesh that the strategy would build for these ranks.

    Raises:
        RuntimeError: When this process belongs to a process group.
        ValueError: When the strategy's sizes do not fit ``world_size``.
    """
    strategy = cast("MeshStrategy[Any]", trainer.strategy)
    sizes = strategy.asked_sizes.resolve(world_size=world_size, num_nodes=num_nodes)
    with simulate_world(world_size, rank):
        mesh = build_device_mesh(sizes, strategy.config, device_type="cpu")
        _connect(trainer, module)
        try:
            strategy.enter_mesh(mesh)
            _call_hooks(trainer)
            yield mesh
        finally:
            strategy.teardown()


def _connect(trainer: Any, module: Any) -> None:
    """Connect the trainer, the strategy and the module as ``Trainer.fit`` does."""
    module.trainer = trainer
    trainer.strategy.connect(module)
    trainer.state.fn = TrainerFn.FITTING
    trainer.state.stage = RunningStage.TRAINING
    let_steps_run_alone(trainer, _BATCHES)


def _call_hooks(trainer: Any) -> None:
    """Call the hooks in which a module builds its model.

    Lightning's own way to call ``configure_model`` is not used, since it would set the default device to the strategy's
    device instead of the meta device.
    """
    precision = trainer.strategy.precision_plugin
    with torch.device("meta"):
        call_module_hook(trainer, "setup", stage=trainer.state.fn)
        with precision.tensor_init_context(), precision.module_init_context():
            call_module_hook(trainer, "configure_model")
