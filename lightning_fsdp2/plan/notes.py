"""Notes below a plan: what its numbers count, what they leave out, and what would make better use of the devices."""

from collections.abc import Sequence
from typing import Any

from lightning_fsdp2.plan.knobs import Knobs
from lightning_fsdp2.plan.rank import Run
from lightning_fsdp2.plan.result import Plan
from lightning_fsdp2.plan.sharding_table import format_bytes
from lightning_fsdp2.plan.simulation.recorder import ACTIVATIONS, UNSHARDED_GRADIENTS

LOAD = 2
"""Number of tokens that a rank's experts get at uneven routing, as a multiple of the number at even routing."""

_UNUSED = (
    "More than half of the memory is unused. A larger batch_size with fewer accumulated batches gathers the weights"
    " less often. A search (--search) tries such layouts."
)
_MEMORY = (
    "Allocated is exact; what the process holds is a range. The lower end counts no unused parts of segments. The upper"
    " end counts torch's whole segments, plus a tenth, and the largest amounts that CUDA, cuBLAS, NCCL and attention"
    " were measured to take."
)
_TIMES = (
    "The bound assumes the rates of the data sheet, one kernel for each operation, rings over the slowest link without"
    " latency, and all possible overlap. The estimate assumes the published rates of kernels and NCCL, and no overlap."
)
_COMPILED = (
    "Planned without torch.compile, which fuses operations and reuses memory. A compiled step needs less time and"
    " memory."
)
_OFFLOADED = (
    "Weights, gradients and optimizer states are in host memory, and the optimizer steps there. The time for this step"
    " and for copies is not modelled."
)
_BY_HAND = (
    "The module optimizes by hand: the plan assumes that it does with every batch what it does with the first ones."
)
_EXPERTS = (
    "Routing is assumed to be even: in each layer, the experts of all ranks get the same number of tokens. The memory"
    f" at {LOAD} times the load is that of a rank whose experts get {LOAD} times as many tokens in every layer."
)
_CHANGE_STEPS = (
    "EMAWeightAveraging",
    "ExponentialMovingAverage",
    "GradientAccumulationScheduler",
    "StochasticWeightAveraging",
    "WeightAveraging",
)
"""Callbacks of Lightning and this package that keep extra weights, or change the number of micro-batches in a step."""

_ALIKE = "All ranks hold the same amount, so only rank 0 is shown."
_ALIKE_IN_STAGES = (
    "The ranks of a stage hold the same amount, so the first rank of each pipeline rank shown stands for it."
)
_PIPELINE = (
    "The times include waiting of the pipeline's ranks for each other, from the times of the stages shown. Stages that"
    " are not shown are assumed to take as long as those, by their numbers of layers. Placements are those of rank 0."
)


def get_notes(run: Run, knobs: Knobs, plan: Plan, *, is_even: bool) -> list[str]:
    """Return the notes of a plan. ``is_even`` is whether the ranks that are not shown need as much as those shown."""
    config = run.trainer.strategy.config
    notes = [_UNUSED] if _leaves_memory_unused(plan, knobs) else _name_remedies(plan, config)
    if is_even:
        notes.append(_ALIKE if knobs.pp == 1 else _ALIKE_IN_STAGES)
    if knobs.pp > 1:
        notes.append(_PIPELINE)
    if knobs.ep > 1:
        notes.append(_EXPERTS)
    if not run.module.automatic_optimization:
        notes.append(_BY_HAND)
    if getattr(config, "offload_policy", None) is not None:
        notes.append(_OFFLOADED)
    if getattr(config, "enable_compile", False):
        notes.append(_COMPILED)
    return [*notes, _MEMORY, _TIMES, *get_notes_on_extras([_get_path(type(one)) for one in run.trainer.callbacks])]


def _leaves_memory_unused(plan: Plan, knobs: Knobs) -> bool:
    return knobs.accumulation > 1 and knobs.dp > knobs.dp_replicate and 2 * plan.reserved.most < plan.device.memory


def _name_remedies(plan: Plan, config: Any) -> list[str]:
    """Return what flags do about the largest parts of the memory, if the run may not fit."""
    if plan.verdict == "fits":
        return []
    peak = max(plan.ranks, key=lambda rank: rank.peak_bytes).peak
    remedies = []
    if getattr(config, "defer_fsdp_grad_sync", False):
        remedies.append((UNSHARDED_GRADIENTS, "defer_fsdp_grad_sync=False shards them after every micro-batch"))
    if not config.activation_checkpointing:
        remedies.append((ACTIVATIONS, "activation_checkpointing recomputes them"))
    return [
        f"{format_bytes(peak[part])} of the memory are {part}: {remedy}."
        for part, remedy in remedies
        if peak[part] > sum(peak.values()) // 4
    ]


def get_notes_on_extras(paths: Sequence[str]) -> list[str]:
    """Return notes on the callbacks and plugins, given by class path, whose memory and time a plan does not include."""
    stock = ("lightning.", "pytorch_lightning.", "lightning_fsdp2.")
    counted = [path for path in paths if not path.startswith(stock) or path.rpartition(".")[2] in _CHANGE_STEPS]
    return [f"Not taken into account: {', '.join(counted)}."] if counted else []


def _get_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
