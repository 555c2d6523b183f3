"""Plan of a single rank's memory, traffic and time, from a simulation of its training step."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fsdp2.callbacks.model_flops import get_flops_per_token, get_peak_flops_of_model
from lightning_fsdp2.compat.torch import tree_leaves
from lightning_fsdp2.config import DDPConfig, FSDP2Config
from lightning_fsdp2.modules.experts import find_experts
from lightning_fsdp2.plan.knobs import Knobs, apply_knobs, get_sequence_length
from lightning_fsdp2.plan.pipeline import Pipeline, RankSummary, group_operations
from lightning_fsdp2.plan.result import (
    RankPlan,
    UnevenMemory,
    build_rank_plan,
    build_uneven_memory,
    without_offloaded,
)
from lightning_fsdp2.plan.simulation.blocks import (
    Summary,
    count_equal,
    get_few,
    get_optional_repetition,
    shorten,
    summarize,
)
from lightning_fsdp2.plan.simulation.reserved import estimate_reserved
from lightning_fsdp2.plan.simulation.sharding import Description
from lightning_fsdp2.plan.simulation.stages import Boundary
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
    """Whether all ranks of a pipeline stage hold shards of the same sizes."""

    pipeline: Pipeline | None
    """Pipeline that the rank is a part of; None without pipeline parallelism."""

    boundary: Boundary | None
    """Boundary that the first pipeline rank has seen, which the plans of the other ranks need."""


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

    def plan_rank(self, knobs: Knobs, rank: int, boundary: Boundary | None = None) -> PlannedRank:
        """Simulate a rank. Call this in a separate process, since it changes the trainer and the module.

        Args:
            knobs: Settings of the run.
            rank: Rank to simulate.
            boundary: Boundary that the plan of the first pipeline rank has seen. None for the first rank.
        """
        sizes: dict[str, Any] = {}

        def measure(module: nn.Module) -> None:  # before the module is split
            parameters = [*module.parameters()]
            sizes["parameters"] = sum(parameter.numel() for parameter in parameters)
            sizes["trained_parameters"] = sum(p.numel() for p in parameters if p.requires_grad)
            sizes["model_flops"] = _get_model_flops(module, self.batch, knobs)

        _, simulation = self._simulate(knobs, rank, boundary=boundary, change=measure)
        overlapped = get_overlapped_axes(self.trainer.strategy.config)
        plan = build_rank_plan(rank, simulation.recording, self.device, overlapped_axes=overlapped)
        facts = {**self._get_facts(simulation.description, sizes["model_flops"], knobs), **sizes}
        pipeline = describe_pipeline(knobs, simulation.layers) if knobs.pp > 1 else None
        return PlannedRank(plan, facts, simulation.is_even, pipeline, simulation.boundary)

    def plan_uneven_memory(self, knobs: Knobs, rank: int, load: int, boundary: Boundary | None = None) -> UnevenMemory:
        """Simulate a rank whose experts get ``load`` times as many tokens as at even routing.

        Call this in a separate process, since it changes the trainer and the module.
        """
        _, simulation = self._simulate(knobs, rank, load=load, boundary=boundary)
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

        _, simulation = self._simulate(_without_single_layers(knobs), 0, change=shorten_if_possible)
        return replace(summarize(simulation.recording, names), num_experts=num_experts), left_out

    def summarize_pipeline_rank(self, knobs: Knobs, rank: int, boundary: Boundary | None) -> RankSummary:
        """Simulate a pipeline rank with few micro-batches.

        Call this in a separate process, since it changes the trainer and the module. The rank keeps the activations of
        as many micro-batches as with all of them.
        """
        number = _get_few_micro_batches(knobs)
        few = knobs.divide(number, knobs.batch_size // knobs.micro_batches)
        experts: list[int] = []

        def count_experts(module: nn.Module) -> None:
            experts.append(math.gcd(*(found.num_experts for found in find_experts(module.modules()))))

        batch, simulation = self._simulate(few, rank, boundary=boundary, change=count_experts)
        actions, rest = group_operations(simulation.recording)
        left_out = knobs.micro_batches - number
        return RankSummary(
            peak_bytes=summarize(simulation.recording).peak_bytes + left_out * _get_bytes_of_micro_batch(batch, number),
            reserved=estimate_reserved(simulation.recording),
            actions=[replace(action, operations=count_equal(action.operations)) for action in actions],
            rest=count_equal(rest),
            layers=simulation.layers,
            boundary=simulation.boundary,
            num_experts=experts[0],
        )

    def describe_model(self) -> str:
        """Build the module and describe it in a string. Call this in a separate process, since the module changes."""
        return describe_model(self.trainer, self.module, world_size=self.world_size, num_nodes=self.nodes)

    def _simulate(self, knobs: Knobs, rank: int, **options: Any) -> tuple[Any, Simulation]:
        torch.set_num_threads(1)
        # hide Lightning's info messages, which would only make sense in a real run
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        # a simulation compiles nothing, whatever the config says, and a note of the plan tells whether float8 pays
        logging.getLogger("lightning_fsdp2.recipes.fsdp2").addFilter(
            lambda record: not record.getMessage().startswith("float8 without enable_compile")
        )
        batch = apply_knobs(knobs, self.trainer, self.module, self.batch)
        simulation = simulate(
            self.trainer, self.module, batch, world_size=self.world_size, num_nodes=self.nodes, rank=rank, **options
        )
        if getattr(knobs.config, "offload_policy", None) is not None:
            simulation = replace(simulation, recording=without_offloaded(simulation.recording))
        return batch, simulation

    def _get_facts(self, description: Description, model_flops: float | None, knobs: Knobs) -> dict[str, Any]:
        compute, get_peak = getattr(torch, description.precision["compute"]), self.device.get_peak_flops
        length = get_sequence_length(self.batch)
        if model_flops is None or length is None:
            peak = get_peak(compute)
        else:
            flops_per_token = model_flops / (length * knobs.samples)
            peak = get_peak_flops_of_model(self.module, flops_per_token, compute, get_peak)
        return {
            "model": description.model,
            "strategy": description.strategy,
            "mesh": description.mesh,
            "expert_mesh": description.expert_mesh,
            "precision": description.precision,
            "placements": _group_placements(description),
            "peak_flops": peak,
            "float8": description.float8,
        }


def _without_single_layers(knobs: Knobs) -> Knobs:
    """Return settings without those patterns of ``float8.skip`` that name one layer, which a short model may lack."""
    float8 = getattr(knobs.config, "float8", None)
    if float8 is None or not float8.skip:
        return knobs
    skip = [pattern for pattern in float8.skip if not re.search(r"\.\d+(\.|$)", pattern)]
    return replace(knobs, config=replace(cast(FSDP2Config, knobs.config), float8=replace(float8, skip=skip)))


def _get_few_micro_batches(knobs: Knobs) -> int:
    """Return a number of micro-batches from which on further ones add only their own data to a rank's memory.

    With this number, each rank of a pipeline has as many micro-batches in flight as with all of them, and receives one
    while it computes another.
    """
    interleaved = cast(FSDP2Config, knobs.config).stages_per_rank > 1
    few = 3 * knobs.pp if interleaved else knobs.pp + 1
    return few if knobs.micro_batches % knobs.pp == 0 and few < knobs.micro_batches else knobs.micro_batches


def _get_bytes_of_micro_batch(batch: Any, micro_batches: int) -> int:
    """Return the bytes that a micro-batch adds to a step's memory: its part of the batch, and its loss in float32."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in tensors) // micro_batches + torch.float32.itemsize


def describe_pipeline(knobs: Knobs, layers: Sequence[int]) -> Pipeline:
    """Return the pipeline of a run whose stages have these numbers of layers."""
    config, number = cast(FSDP2Config, knobs.config), knobs.micro_batches
    return Pipeline(
        schedule=config.pp_schedule,
        ranks=knobs.pp,
        stages_per_rank=config.stages_per_rank,
        micro_batches=number,
        rows=math.ceil(knobs.batch_size / number),
        layers=tuple(layers),
    )


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
