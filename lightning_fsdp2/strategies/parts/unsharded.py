"""Handling of the unsharded parts of a module: buffers, metrics, BatchNorm layers, and some parameters."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_fsdp2.compat.lightning import set_device
from lightning_fsdp2.modules.structure import find_metrics, get_hf_models, get_modules
from lightning_fsdp2.strategies.launch.process_groups import broadcast_coalesced
from lightning_fsdp2.strategies.parts.world import World


class SharedBuffers:
    """List of a module's persistent buffers, such as BatchNorm statistics, which all ranks take from rank 0.

    With several pipeline stages, the ranks of each stage take them from the first rank of the stage. All stages have
    the modules outside of the Hugging Face model, but only the last stage surely runs them, so their buffers are first
    taken from there.

    Args:
        world: The ranks of the run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._owners: list[tuple[nn.Module, str]] = []
        self._outside: list[tuple[nn.Module, str]] = []

    def find(self, root: nn.Module) -> None:
        """Find the buffers of ``root``, in the same order on every rank."""
        inside = {module for model in get_hf_models(root) for module in model.modules()}
        self._owners = [
            (module, name)
            for module in get_modules(root)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set and not isinstance(buffer, DTensor)
        ]
        self._outside = [(module, name) for module, name in self._owners if module not in inside]

    def share(self) -> None:
        """Broadcast the buffers from rank 0, as DDP does, because BatchNorm saw different batches on each rank."""
        if self._world.pipeline_group is not None:
            broadcast_coalesced(_read(self._outside), self._world.pipeline_group, source=self._world.pipeline_size - 1)
        broadcast_coalesced(_read(self._owners), self._world.stage_group)


def _read(owners: list[tuple[nn.Module, str]]) -> list[Tensor]:
    buffers = (module._buffers.get(name) for module, name in owners)
    return [buffer for buffer in buffers if buffer is not None]


def move_to_device(root: LightningModule, device: torch.device) -> None:
    """Move the unsharded parts of ``root`` to ``device``: buffers, metrics, and parameters that are not sharded."""
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)
    for module in root.modules():
        if isinstance(module, Metric):
            module.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    set_device(root, device)


def synchronise_batch_norm(module: nn.Module, layer_sync: Any, device: torch.device) -> None:
    """Replace BatchNorm layers with SyncBatchNorm if ``Trainer(sync_batchnorm=True)`` is set.

    Call this before the module is sharded.

    Args:
        module: Module whose layers are replaced.
        layer_sync: Lightning's plugin that replaces layers. If it is None, no layers are replaced.
        device: This rank's device.

    Raises:
        ValueError: On a CPU, where torch has no synchronised BatchNorm.
    """
    if layer_sync is None:
        return
    if device.type == "cpu":
        raise ValueError(
            "Trainer(sync_batchnorm=True): torch's SyncBatchNorm does not run on a CPU; leave sync_batchnorm out."
        )
    layer_sync.apply(module)


def synchronise_metrics(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make metrics synchronise over ``group`` only, so that a batch counts once even if several ranks read it."""
    for metric in find_metrics(module):
        if metric.process_group is None:
            metric.process_group = group
