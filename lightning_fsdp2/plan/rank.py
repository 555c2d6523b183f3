"""One rank of a planned run."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fsdp2.callbacks.model_flops import get_flops_per_token
from lightning_fsdp2.config import DDPConfig
from lightning_fsdp2.describe import Description
from lightning_fsdp2.mesh import DATA_PARALLEL, DP_REPLICATE, DP_SHARD, TENSOR_PARALLEL
from lightning_fsdp2.plan.devices import Device
from lightning_fsdp2.plan.knobs import Knobs, apply_knobs
from lightning_fsdp2.plan.result import RankPlan, build_rank_plan, without_offloaded
from lightning_fsdp2.plan.simulate import simulate


@dataclass(frozen=True)
class PlannedRank:
    """What the process that simulates a rank sends back."""

    plan: RankPlan
    facts: dict[str, Any]
    """Fields of the :class:`~lightning_fsdp2.plan.Plan` that are those of all ranks."""

    is_even: bool
    """Whether all ranks hold as much."""


@dataclass(frozen=True)
class Run:
    """A run, and what it is to run on."""

    trainer: Any
    module: Any
    batch: Any
    """A micro-batch of one data parallel rank."""

    world_size: int
    nodes: int
    device: Device

    def plan_rank(self, knobs: Knobs, rank: int) -> PlannedRank:
        """Simulate a rank of it; changes trainer and module, so that it is for a process of its own."""
        torch.set_num_threads(1)
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # it speaks of a run
        batch = apply_knobs(knobs, self.trainer, self.module, self.batch)
        strategy = self.trainer.strategy
        simulation = simulate(
            self.trainer, self.module, batch, world_size=self.world_size, num_nodes=self.nodes, rank=rank
        )
        overlapped = _get_overlapped_axes(strategy.config)
        recording = without_offloaded(simulation.recording) if knobs.offload_policy else simulation.recording
        return PlannedRank(
            build_rank_plan(rank, recording, self.device, overlapped_axes=overlapped),
            self._get_facts(simulation.description, batch, knobs),
            simulation.is_even,
        )

    def _get_facts(self, description: Description, batch: Any, knobs: Knobs) -> dict[str, Any]:
        compute = getattr(torch, description.precision["compute"])
        return {
            "model": description.model,
            "strategy": description.strategy,
            "mesh": description.mesh,
            "precision": description.precision,
            "parameters": description.totals["parameters"],
            "trained_parameters": description.totals["trained_parameters"],
            "placements": _group_placements(description),
            "peak_flops": self.device.get_peak_flops(compute),
            "model_flops": _get_model_flops(self.module, batch, knobs),
        }


def _get_overlapped_axes(config: Any) -> tuple[str, ...]:
    """Axes whose collectives run beside operations, apart from those of FSDP2's units."""
    if isinstance(config, DDPConfig):
        return (DP_REPLICATE, DP_SHARD, DATA_PARALLEL)
    return (DP_REPLICATE, TENSOR_PARALLEL) if config.enable_async_tensor_parallel else (DP_REPLICATE,)


def _get_model_flops(module: Any, batch: Any, knobs: Knobs) -> float | None:
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    if tokens is None:
        return None
    try:
        per_token = get_flops_per_token(module, tokens.size(-1))
    except ValueError:
        return None
    return per_token * tokens.size(-1) * knobs.samples


def _group_placements(description: Description) -> list[dict[str, Any]]:
    groups: dict[tuple[tuple[str, str], ...], list[Any]] = {}
    for unit in description.units:
        for parameter in unit.parameters:
            groups.setdefault(tuple(parameter.placements.items()), []).append(parameter)
    return [
        {
            "placement": dict(placement),
            "tensors": len(parameters),
            "parameters": sum(math.prod(parameter.shape) for parameter in parameters),
            "bytes": sum(parameter.shard_bytes for parameter in parameters),
        }
        for placement, parameters in groups.items()
    ]
