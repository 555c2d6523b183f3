"""Plan of a single rank's memory, traffic and time, from a simulation of its training step."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_fsdp2.callbacks.model_flops import get_flops_per_token
from lightning_fsdp2.config import DDPConfig
from lightning_fsdp2.modules.experts import find_experts
from lightning_fsdp2.plan.knobs import Knobs, apply_knobs, get_sequence_length
from lightning_fsdp2.plan.result import (
    RankPlan,
    UnevenMemory,
    build_rank_plan,
    build_uneven_memory,
    without_offloaded,
)
from lightning_fsdp2.plan.simulation.blocks import Summary, get_few, get_optional_repetition, shorten, summarize
from lightning_fsdp2.plan.simulation.sharding import Description
from lightning_fsdp2.plan.simulation.step import Simulation, describe_model, simulate
from lightning_fsdp2.plan.timing.devices import Device
from lightning_fsdp2.sizes import DATA_PARALLEL, DP_REPLICATE, DP_SHARD, TENSOR_PARALLEL


@dataclass(frozen=True)
class PlannedRank:
    """Result that a process returns after it has simulated a rank."""

    plan: RankPlan
    facts: dict[str, Any]
    """Fields of the :class:`~lightning_fsdp2.plan.Plan` that are the same for all ranks."""

    is_even: bool
    """Whether all ranks hold shards of the same sizes."""


@dataclass(frozen=True)
class Run:
    """A run, together with the devices that it is planned for."""

    trainer: Any
    module: Any
    batch: Any
    """A micro-batch of one data parallel rank."""

    world_size: int
    nodes: int
    device: Device

    def plan_rank(self, knobs: Knobs, rank: int) -> PlannedRank:
        """Simulate a rank. Call this in a separate process, since it changes the trainer and the module."""
        batch, simulation = self._simulate(knobs, rank)
        overlapped = get_overlapped_axes(self.trainer.strategy.config)
        plan = build_rank_plan(rank, simulation.recording, self.device, overlapped_axes=overlapped)
        return PlannedRank(plan, self._get_facts(simulation.description, batch, knobs), simulation.is_even)

    def plan_uneven_memory(self, knobs: Knobs, rank: int, load: int) -> UnevenMemory:
        """Simulate a rank whose experts get ``load`` times as many tokens as at even routing.

        Call this in a separate process, since it changes the trainer and the module.
        """
        _, simulation = self._simulate(knobs, rank, load=load)
        return build_uneven_memory(load, simulation.recording)

    def summarize(self, knobs: Knobs, further: int) -> tuple[Summary, int]:
        """Simulate rank 0 with a shortened model that has only ``few + further`` repetitions of its blocks.

        ``few`` is the number that :func:`get_few` returns. Call this method in a separate process, since it changes the
        trainer and the module.

        Returns:
            The summary of the step, and how many more repetitions the whole model has than ``few``. If the model could
            not be shortened, the second value is 0.
        """
        few, left_out, num_experts = get_few(self.trainer.strategy.config), 0, 0
        names: list[list[str]] = []

        def shorten_if_possible(module: nn.Module) -> None:
            nonlocal left_out, names, num_experts
            num_experts = math.gcd(*(experts.num_experts for experts in find_experts(module.modules())))
            found = get_optional_repetition(module, few)
            if found is not None:
                left_out = found.times - few
                names = shorten(module, found, few + further)

        _, simulation = self._simulate(knobs, 0, change=shorten_if_possible)
        return replace(summarize(simulation.recording, names), num_experts=num_experts), left_out

    def describe_model(self) -> str:
        """Build the module and describe it in a string. Call this in a separate process, since the module changes."""
        return describe_model(self.trainer, self.module, world_size=self.world_size, num_nodes=self.nodes)

    def _simulate(self, knobs: Knobs, rank: int, **options: Any) -> tuple[Any, Simulation]:
        torch.set_num_threads(1)
        # hide Lightning's info messages, which would only make sense in a real run
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        batch = apply_knobs(knobs, self.trainer, self.module, self.batch)
        simulation = simulate(
            self.trainer, self.module, batch, world_size=self.world_size, num_nodes=self.nodes, rank=rank, **options
        )
        if getattr(knobs.config, "offload_policy", None) is not None:
            simulation = replace(simulation, recording=without_offloaded(simulation.recording))
        return batch, simulation

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


def get_overlapped_axes(config: Any) -> tuple[str, ...]:
    """Return the axes on which every collective overlaps with computation.

    On other axes, only FSDP2's own collectives overlap.
    """
    if isinstance(config, DDPConfig):
        return (DP_REPLICATE, DP_SHARD, DATA_PARALLEL)
    return (DP_REPLICATE, TENSOR_PARALLEL) if config.enable_async_tensor_parallel else (DP_REPLICATE,)


def _get_model_flops(module: Any, batch: Any, knobs: Knobs) -> float | None:
    length = get_sequence_length(batch)
    if length is None:
        return None
    try:
        return get_flops_per_token(module, length) * length * knobs.samples
    except ValueError:
        return None


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
