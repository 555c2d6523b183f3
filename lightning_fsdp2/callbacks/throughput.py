"""Callback that logs tokens per second, FLOPs utilisation, and the time that steps wait for data."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_fsdp2.callbacks.logging_steps import gather_numbers, is_logging_step, log_metrics
from lightning_fsdp2.callbacks.model_flops import get_flops_per_token, get_peak_flops, get_peak_flops_of_model
from lightning_fsdp2.compat.lightning import ignore_fetches, is_accumulating, watch_fetches


class Throughput(Callback):
    """Callback that logs, on the Trainer's logging steps, the speed of training since the previous logging step.

    The metrics are ``throughput/tokens_per_second``, ``throughput/tokens_per_second_per_device``,
    ``throughput/step_seconds``, ``throughput/data_share``, ``throughput/tflops_per_device`` and ``throughput/mfu``.
    Time spent on validation does not count.

    ``data_share`` is the fraction of the time that was spent waiting for the data loader, on the rank that waited
    longest. The copy to the device is not included. If the batch is in pinned memory, the host does not wait for this
    copy. If not, the copy waits until earlier steps have finished, so its time says nothing about the data loader.

    Tokens are the elements of ``batch["input_ids"]``, including padding. If several tensor or context parallel
    ranks read the same batch, its tokens count once.

    MFU, the model FLOPs utilisation (https://arxiv.org/abs/2204.02311), is tokens per second x operations per token /
    (number of devices x peak speed of a device). For operations per token, see
    :func:`~lightning_fsdp2.callbacks.model_flops.get_flops_per_token`. If some layers multiply in float8, the peak
    speed lies between those for float8 and for the other operations' dtype; see
    :func:`~lightning_fsdp2.callbacks.model_flops.get_peak_flops_of_model`. If the operations or the peak speed are not
    known, MFU is not logged, and a message gives the reason once.

    Args:
        flops_per_token: Number of floating-point operations per token, in forward and backward. None derives it from
            the model.
        peak_flops: Peak speed of a device, in operations per second without sparsity. None takes it from a table.
    """

    def __init__(self, flops_per_token: float | None = None, peak_flops: float | None = None) -> None:
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and value <= 0:
                raise ValueError(
                    f"Throughput({name}={value}) must be positive; omit it to have it determined automatically."
                )
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.latest: dict[str, float] = {}
        """Metrics that were logged last, for progress bars."""
        self.average: float | None = None
        """Tokens per second of the whole fit, set at its end; None if tokens are not counted."""
        self._tokens = 0
        self._readers = 1
        self._fit_tokens = self._fit_seconds = 0.0
        self._steps = 0
        self._has_tokens = True
        self._has_said_why = False
        self._started = self._paused = self._waited = self._fetch_started = 0.0

    # ------------------------------------------------------------------ measuring

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_said_why, self._has_tokens, self.latest, self.average = False, True, {}, None
        self._readers = getattr(trainer.strategy, "data_parallel_size", trainer.world_size)
        self._fit_tokens = self._fit_seconds = 0.0
        self._restart()
        watch_fetches(trainer, self._begin_fetch, self._end_fetch)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ignore_fetches(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started += time.monotonic() - self._paused

    def _begin_fetch(self) -> None:
        self._fetch_started = time.monotonic()

    def _end_fetch(self) -> None:
        self._waited += time.monotonic() - self._fetch_started

    def _restart(self) -> None:
        self._tokens, self._steps, self._waited = 0, 0, 0.0
        self._started = time.monotonic()

    # ------------------------------------------------------------------ reporting

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        input_ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(input_ids, Tensor):
            self._tokens += input_ids.numel()
        elif self._has_tokens:
            self._has_tokens = False
            rank_zero_info('Throughput: batches have no tensor "input_ids", so tokens are not counted.')
        self._steps += not is_accumulating(trainer)
        if is_logging_step(trainer):
            self._report(trainer, pl_module, input_ids.size(-1) if isinstance(input_ids, Tensor) else 0)

    def _report(self, trainer: Trainer, pl_module: LightningModule, sequence_length: int) -> None:
        steps = self._steps
        tokens, waited, seconds = self._add_up(trainer)
        metrics = {"throughput/step_seconds": seconds / steps, "throughput/data_share": waited / seconds}
        if self._has_tokens:
            per_device = tokens / seconds / trainer.world_size
            metrics |= {
                "throughput/tokens_per_second": tokens / seconds,
                "throughput/tokens_per_second_per_device": per_device,
                **self._get_utilisation(trainer, pl_module, per_device, sequence_length),
            }
        log_metrics(trainer, metrics)
        self.latest = metrics

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add_up(trainer)
        if self._has_tokens and self._fit_tokens:
            self.average = self._fit_tokens / self._fit_seconds

    def _add_up(self, trainer: Trainer) -> tuple[float, float, float]:
        """Return the number of tokens on all ranks, the longest time that a rank waited for data, and the elapsed time.

        Times are in seconds. All three values cover the period since the previous call.
        """
        # read the clock after `gather_numbers`, which waits until the device has finished the steps
        counts = gather_numbers(trainer, (self._tokens, self._waited))
        seconds = time.monotonic() - self._started
        tokens = float(counts[:, 0].sum()) * self._readers / trainer.world_size
        self._fit_tokens += tokens
        self._fit_seconds += seconds
        self._restart()
        return tokens, float(counts[:, 1].max()), seconds

    def _get_utilisation(
        self, trainer: Trainer, pl_module: LightningModule, tokens_per_second: float, sequence_length: int
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        try:
            flops_per_token = self.flops_per_token or get_flops_per_token(pl_module, sequence_length)
            flops = tokens_per_second * flops_per_token
            metrics["throughput/tflops_per_device"] = flops / 1e12
            get_peak = partial(get_peak_flops, trainer.strategy.root_device)
            dtype = _get_compute_dtype(trainer)
            peak = self.peak_flops or get_peak_flops_of_model(pl_module, flops_per_token, dtype, get_peak)
            metrics["throughput/mfu"] = flops / peak
        except ValueError as error:
            if not self._has_said_why:
                remedy = "Set Throughput(flops_per_token=..., peak_flops=...)."
                rank_zero_info(f"Throughput: no MFU, because {error}. {remedy}")
            self._has_said_why = True
        return metrics


def _get_compute_dtype(trainer: Trainer) -> torch.dtype:
    precision = str(trainer.precision)
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return getattr(trainer.strategy, "compute_dtype", names.get(precision.partition("-")[0], torch.float32))
