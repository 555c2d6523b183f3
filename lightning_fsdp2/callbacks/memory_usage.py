"""Memory that training uses."""

import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_fsdp2.callbacks.logging_steps import gather_numbers, is_logging_step, log_metrics

_GIB = 2**30


class MemoryUsage(Callback):
    """Callback that logs memory use on the Trainer's logging steps: the highest value over all ranks for each metric.

    On an accelerator it logs ``memory/allocated_gib`` (of tensors) and ``memory/reserved_gib`` (taken from the device,
    as other tools show it), both in GiB and peaks since the last logging step. ``memory/reserved_share`` is the share
    of the device's memory that is reserved. ``memory/allocation_retries`` and ``memory/out_of_memory`` are counted
    since the start of the process; each retry waits for the device and throws cached memory away. On a CPU it logs
    ``memory/process_gib``, the peak memory of the process in GiB.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        """Metrics that were logged last, for progress bars."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.latest = {}
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(trainer.strategy.root_device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_logging_step(trainer):
            return
        own = _measure(trainer.strategy.root_device)
        most = gather_numbers(trainer, list(own.values())).amax(0).tolist()
        self.latest = dict(zip(own, most, strict=True))
        log_metrics(trainer, self.latest)


def _measure(device: torch.device) -> dict[str, float]:
    """Read the allocator's counters on the host, without waiting for the device."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"memory/process_gib": peak * (1 if sys.platform == "darwin" else 1024) / _GIB}
    stats = torch.accelerator.memory_stats(device)
    torch.accelerator.reset_peak_memory_stats(device)
    reserved = stats["reserved_bytes.all.peak"]
    return {
        "memory/allocated_gib": stats["allocated_bytes.all.peak"] / _GIB,
        "memory/reserved_gib": reserved / _GIB,
        "memory/reserved_share": reserved / torch.accelerator.get_memory_info(device)[1],
        "memory/allocation_retries": stats["num_alloc_retries"],
        "memory/out_of_memory": stats["num_ooms"],
    }
