"""Callback that logs the memory that training uses."""

import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_fsdp2.callbacks.logging_steps import gather_numbers, is_logging_step, log_metrics

_GIB = 2**30


class MemoryUsage(Callback):
    """Callback that logs memory use on the Trainer's logging steps: the highest value over all ranks for each metric.

    On an accelerator, ``memory/allocated_gib`` is the memory that tensors occupy. ``memory/reserved_gib`` is the memory
    that torch has reserved on the device, which is roughly what tools such as ``nvidia-smi`` show. Both are peaks since
    the last logging step, in GiB. ``memory/reserved_share`` is the reserved fraction of the device's memory.
    ``memory/allocation_retries`` and ``memory/out_of_memory`` are the numbers of retried allocations and of
    out-of-memory errors since the start of the process. Each retry waits for the device and frees cached memory.

    On a CPU, the only metric is ``memory/process_gib``, the peak memory of the process in GiB.
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
    """Return the memory metrics of this process, without waiting for the device."""
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
