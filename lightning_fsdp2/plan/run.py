"""Plan a run: simulate ranks of it, and look for what would help if it does not fit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fsdp2.callbacks.model_flops import get_flops_per_token
from lightning_fsdp2.config import DDPConfig
from lightning_fsdp2.data.module import SequenceDataModule
from lightning_fsdp2.describe import Description
from lightning_fsdp2.mesh import DATA_PARALLEL, DP_REPLICATE, DP_SHARD, TENSOR_PARALLEL
from lightning_fsdp2.plan.devices import Device, get_device
from lightning_fsdp2.plan.result import Batch, Change, Plan, RankPlan, build_rank_plan, without_offloaded
from lightning_fsdp2.plan.knobs import Knobs, apply_knobs, build_config, get_differences, list_remedies, read_knobs
from lightning_fsdp2.plan.simulate import check_strategy, simulate
from lightning_fsdp2.plan.workers import run_in_processes

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

SHARE_OF_MEMORY = 0.9
"""What a peak may take of a device's memory, since some of what needs memory is not modelled."""

_SUGGESTIONS = 3

_NOT_MODELLED = (
    "Not modelled, and what the memory beyond the budget is for: fragmentation, the buffers of NCCL, workspaces of"
    " kernels, what CUDA needs for itself."
)
_TIMES = (
    "Times are bounds, not forecasts: operations at the peak rates of the data sheet, one kernel each; collectives as rings"
    " over the slowest link, without latency."
)
_COMPILED = "Planned without torch.compile, which fuses operations and reuses memory: compiled, a step needs less of both."
_OFFLOADED = (
    "Weights, gradients and optimizer states are in host memory, and so is the optimizer's step; the time of that step, and"
    " that of copying, are not modelled."
)
_ALIKE = "All ranks hold as much: rank 0 stands for them."


def plan_run(
    trainer: "Trainer",
    module: "LightningModule",
    batch: Any = None,
    *,
    datamodule: "LightningDataModule | None" = None,
    world_size: int,
    device: str | Device = "h100",
    ranks: Sequence[int] | None = None,
    suggest: bool = True,
    processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Compute memory, traffic and the bounds of a step's time of a run that does not take place.

    The module is sharded by the recipe and trained for two steps by the Trainer's loop, as a rank of ``world_size``: in a
    process of its own, with fake tensors and a fake process group. ``trainer`` and ``module`` stay as they are.

    Args:
        trainer: Of :class:`~lightning_fsdp2.FSDP2Strategy` or :class:`~lightning_fsdp2.DDPStrategy`. Its precision,
            clipping and accumulation count; its devices, callbacks and loggers do not.
        module: Built on the meta device, or building its model there in ``configure_model``.
        batch: A micro-batch of one data parallel rank, of tensors on any device. None takes it from ``datamodule``.
        datamodule: Of the run. One of this package is asked for the shapes of its batches and reads nothing; of any
            other one, the first batch is read.
        world_size: Number of ranks.
        device: What each rank is: a name of :data:`~lightning_fsdp2.plan.devices.DEVICES`, or a
            :class:`~lightning_fsdp2.plan.devices.Device`.
        ranks: Which of them to plan. None for the first and the last, or for the first alone if all hold as much.
        suggest: Whether to look for what would help if the run does not fit: each is planned, too.
        processes: How many plans are computed at once; None for as many as there are CPUs.
        on_progress: Called with how many plans are done, and how many there will be as far as is known.

    Returns:
        The plan.

    Raises:
        TypeError: When the strategy is another one.
        ValueError: For a device that is not known, a rank that does not exist, and what the strategy would raise for
            these sizes and this model; when there is no batch, or the step depends on values.
    """
    target = get_device(device) if isinstance(device, str) else device
    nodes = _get_nodes(world_size, target)
    check_strategy(trainer.strategy)
    batch = get_batch(trainer, datamodule) if batch is None else batch
    accumulation = _get_accumulation(trainer, datamodule, world_size, nodes)
    knobs = read_knobs(
        trainer, module, batch, world_size=world_size, num_nodes=nodes, accumulation=accumulation
    )
    run = _Run(trainer, module, batch, world_size, nodes, target)
    wanted = _check_ranks(ranks, world_size)
    planned = dict(run_in_processes([partial(run.plan_rank, knobs, rank) for rank in wanted], processes=processes))
    if ranks is None and not planned[0].is_even:
        planned[1] = next(run_in_processes([partial(run.plan_rank, knobs, world_size - 1)]))[1]
    first, strategy = planned[0], trainer.strategy
    plan = Plan(
        **first.facts,
        device=target,
        nodes=nodes,
        batch=_describe_batch(batch, knobs),
        ranks=[planned[number].rank for number in sorted(planned)],
        budget=int(SHARE_OF_MEMORY * target.memory),
        changes=[],
        notes=_get_notes(strategy.config, is_even=ranks is None and first.is_even),
    )
    if plan.fits or not suggest:
        return plan
    names_batch = isinstance(datamodule, SequenceDataModule)
    describe_config = partial(
        build_config,
        knobs,
        strategy=f"lightning_fsdp2.{type(strategy).__name__}",
        names_batch_size=names_batch,
        has_global_batch=names_batch and datamodule.global_batch_size is not None,
    )
    return replace(plan, changes=_find_changes(run, knobs, plan, describe_config, processes, on_progress))


def get_batch(trainer: "Trainer", datamodule: "LightningDataModule | None") -> Any:
    """A micro-batch of one data parallel rank.

    Raises:
        ValueError: When there is no data module, or it has no batch.
    """
    if datamodule is None:
        raise ValueError(
            "A plan needs the shapes of a batch: give batch={'input_ids': torch.zeros(batch_size, sequence_length,"
            " dtype=torch.long)}, or the run's datamodule."
        )
    if isinstance(datamodule, SequenceDataModule):
        return datamodule.build_example_batch()
    datamodule.prepare_data()
    datamodule.setup("fit")
    for batch in datamodule.train_dataloader():
        return batch
    raise ValueError(f"{type(datamodule).__name__}.train_dataloader() has no batch; a plan needs the shapes of one.")


@dataclass(frozen=True)
class _Planned:
    """What a process sends back."""

    rank: RankPlan
    facts: dict[str, Any]
    """Fields of the plan."""

    is_even: bool


@dataclass(frozen=True)
class _Run:
    """What is simulated."""

    trainer: Any
    module: Any
    batch: Any
    world_size: int
    nodes: int
    device: Device

    def plan_rank(self, knobs: Knobs, rank: int) -> _Planned:
        """Simulate a rank of it; changes trainer and module, so that it is for a process of its own."""
        torch.set_num_threads(1)
        batch = apply_knobs(knobs, self.trainer, self.module, self.batch)
        strategy = self.trainer.strategy
        simulation = simulate(
            self.trainer, self.module, batch, world_size=self.world_size, num_nodes=self.nodes, rank=rank
        )
        overlapped = _get_overlapped_axes(strategy.config)
        recording = without_offloaded(simulation.recording) if knobs.offload_policy else simulation.recording
        return _Planned(
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


def _find_changes(
    run: _Run,
    knobs: Knobs,
    plan: Plan,
    describe_config: Callable[[Knobs], dict[str, Any]],
    processes: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[Change]:
    """Plan what might help; return those that help most: what fits, the fastest first, and then what needs least."""
    remedies = [
        other for other in dict.fromkeys(list_remedies(knobs, world_size=run.world_size, per_node=run.device.per_node))
        if get_differences(knobs, other)
    ]
    changes = []
    tasks = [partial(_try, run, remedy) for remedy in remedies]
    for done, (number, planned) in enumerate(run_in_processes(tasks, processes=processes), start=1):
        if on_progress is not None:
            on_progress(done, len(tasks))
        if planned is None or planned.rank.peak_bytes >= plan.peak_bytes:
            continue
        remedy, share = remedies[number], knobs.samples / remedies[number].samples
        changes.append(
            Change(
                name=", ".join(f"{name}={value!r}" for name, value in get_differences(knobs, remedy).items()),
                config=describe_config(remedy),
                peak_bytes=planned.rank.peak_bytes,
                shortest=planned.rank.time.shortest * share,
                longest=planned.rank.time.longest * share,
            )
        )
    fitting = sorted((c for c in changes if c.peak_bytes <= plan.budget), key=lambda change: change.longest)
    others = sorted((c for c in changes if c.peak_bytes > plan.budget), key=lambda change: change.peak_bytes)
    return [*fitting, *others][:_SUGGESTIONS]


def _try(run: _Run, knobs: Knobs) -> _Planned | None:
    """None for what the strategy or the model refuses."""
    try:
        return run.plan_rank(knobs, 0)
    except ValueError:
        return None


def _get_nodes(world_size: int, device: Device) -> int:
    if world_size < 1:
        raise ValueError(f"world_size={world_size} is not a number of ranks; use an integer >= 1.")
    if world_size > device.per_node and world_size % device.per_node:
        raise ValueError(
            f"world_size={world_size} is no multiple of the {device.per_node} devices of a node; use"
            f" {world_size // device.per_node * device.per_node}, or say how many a node has (per_node)."
        )
    return max(1, world_size // device.per_node)


def _get_accumulation(trainer: Any, datamodule: Any, world_size: int, nodes: int) -> int:
    if not isinstance(datamodule, SequenceDataModule) or datamodule.global_batch_size is None:
        return int(trainer.accumulate_grad_batches)
    dp = trainer.strategy.get_sizes(world_size=world_size, num_nodes=nodes).dp
    return datamodule.get_accumulation(dp)


def _check_ranks(ranks: Sequence[int] | None, world_size: int) -> list[int]:
    if ranks is None:
        return [0]
    missing = [rank for rank in ranks if not 0 <= rank < world_size]
    if missing or not ranks:
        raise ValueError(f"ranks={list(ranks)}: choose among 0 to {world_size - 1}.")
    return sorted(set(ranks))


def _get_overlapped_axes(config: Any) -> tuple[str, ...]:
    """Axes whose collectives run beside operations, apart from those of FSDP2's units."""
    if isinstance(config, DDPConfig):
        return (DP_REPLICATE, DP_SHARD, DATA_PARALLEL)
    return (DP_REPLICATE, TENSOR_PARALLEL) if config.enable_async_tensor_parallel else (DP_REPLICATE,)


def _describe_batch(batch: Any, knobs: Knobs) -> Batch:
    named = batch.items() if isinstance(batch, dict) else enumerate(tree_leaves(batch))
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    return Batch(
        shapes={str(name): tuple(value.shape) for name, value in named if isinstance(value, Tensor)},
        accumulation=knobs.accumulation,
        samples=knobs.samples,
        tokens=None if tokens is None else tokens.numel() // knobs.batch_size * knobs.samples,
    )


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


def _get_notes(config: Any, *, is_even: bool) -> list[str]:
    notes = [_ALIKE] if is_even else []
    if getattr(config, "offload_policy", None) is not None:
        notes.append(_OFFLOADED)
    if getattr(config, "enable_compile", False):
        notes.append(_COMPILED)
    return [*notes, _NOT_MODELLED, _TIMES]
