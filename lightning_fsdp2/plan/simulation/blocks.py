"""Extrapolation from a few of a model's layers to the whole model, since each further layer has the same cost.

A model with many layers repeats a few kinds of blocks. Such a model is simulated twice: with a few repetitions, and
with one more. The difference between the two results is the contribution of one repetition, which gives the result for
any number of repetitions.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_fsdp2.modules.structure import find_structure, get_layer_lists
from lightning_fsdp2.plan.simulation.recorder import Operation, Recording
from lightning_fsdp2.plan.simulation.reserved import Reserved, estimate_reserved, extrapolate_reserved

_NUMBERS = ("layer_idx", "layer_id")
"""Names of the attributes in which blocks keep their index."""


@dataclass(frozen=True)
class Repetition:
    """Group of consecutive blocks that repeats until the end of a list of layers."""

    first: int
    """Number of blocks before the first repetition."""

    period: int
    """Number of blocks in a repetition."""

    times: int


@dataclass(frozen=True)
class Summary:
    """Summary of a recording: its operations without their order, and its memory peaks."""

    operations: list[Operation]
    peaks: dict[str, int]
    """Largest number of bytes in use in each part of the step."""

    reserved: Reserved
    num_experts: int = 0
    """Number of experts of each mixture, or the largest number that divides all of them; 0 for dense models."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes over all parts of the step."""
        return max(self.peaks.values())


def get_few(config: Any) -> int:
    """Return the number of repetitions in the shorter simulation, for the config of a strategy.

    Repetitions at the ends of the model may use memory differently from those in the middle. The number of such
    repetitions at each end is assumed to be FSDP2's prefetch depth (the larger of forward and backward), but at least
    two.
    """
    names = ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth")  # DDP gathers nothing
    return 2 * max(2, *(getattr(config, name, 0) for name in names))


def get_optional_repetition(module: nn.Module, few: int) -> Repetition | None:
    """Return how the blocks of ``module`` repeat.

    Return None if the module does not have exactly one list of blocks, or if no group of blocks repeats at least
    ``few + 2`` times.
    """
    structure = find_structure(module)
    if len(structure.layer_lists) != 1:
        return None
    kinds = [_get_kind(block) for block in structure.layers]
    for parts in structure.models:
        types = _get_layer_types(parts.module)
        if len(types) == len(kinds):
            kinds = list(zip(kinds, types, strict=True))
    for first in range(len(kinds)):
        for period in range(1, (len(kinds) - first) // (few + 2) + 1):
            repeated, rest = divmod(len(kinds) - first, period)
            if rest == 0 and kinds[first:] == kinds[first : first + period] * repeated:
                return Repetition(first, period, repeated)
    return None


def _get_layer_types(model: Any) -> list[str]:
    """Return the type of each layer of ``model``, which some models state only in their config."""
    return getattr(model.config.get_text_config(), "layer_types", None) or []


def shorten(module: nn.Module, repetition: Repetition, times: int) -> list[list[str]]:
    """Remove all but the first ``times`` repetitions of the model's blocks, in place.

    Returns:
        For each remaining repetition, the names of its blocks.
    """
    (blocks,) = get_layer_lists(module)
    kept = blocks[: repetition.first + times * repetition.period]
    left_out = set(blocks[len(kept) :])
    for container in module.modules():
        for name, child in [*container.named_children()]:
            if child in left_out:
                delattr(container, name)
    names = {block: name for name, block in module.named_modules()}
    starts = range(repetition.first, len(kept), repetition.period)
    return [[names[block] for block in kept[start : start + repetition.period]] for start in starts]


def summarize(recording: Recording, repetitions: Sequence[Sequence[str]] = ()) -> Summary:
    """Count equal operations, and find the peak memory of each part of the step.

    Args:
        recording: Recording of a step.
        repetitions: Names of the blocks of each repetition. In the summary, the parts of the step in these blocks are
            named by their distance from the first or the last repetition. Such names fit models of any length, as
            :func:`extrapolate` needs.
    """
    places = _get_places(repetitions)
    peaks: Counter[str] = Counter()
    current = 0
    changes = iter(recording.changes)
    change = next(changes, None)
    ends = [*(begin for begin, _ in recording.marks[1:]), len(recording.operations) + 1]
    for end, (_, part) in zip(ends, recording.marks, strict=True):
        highest = current
        while change is not None and change.moment < end:
            current += change.bytes
            highest = max(highest, current)
            change = next(changes, None)
        what, _, block = part.rpartition(" ")
        for name in [f"{what} {place}" for place in places[block]] if block in places else [part]:
            peaks[name] = max(peaks[name], highest)
    return Summary(count_equal(recording.operations), dict(peaks), estimate_reserved(recording))


def count_equal(operations: Iterable[Operation]) -> list[Operation]:
    """Return each kind of operation once, with the number of times that it runs."""
    counts: Counter[Operation] = Counter()
    for operation in operations:
        counts[replace(operation, times=1)] += operation.times
    return [replace(operation, times=count) for operation, count in counts.items()]


def _get_places(repetitions: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Return the places of each block, by block name. A place is a distance from the first or the last repetition."""
    places = defaultdict(list)
    for end, ordered in (("first", repetitions), ("last", repetitions[::-1])):
        for number, blocks in enumerate(ordered[: len(repetitions) // 2]):
            for position, block in enumerate(blocks):
                places[block].append(f"block {position}, {number} from the {end}")
    return places


def extrapolate(few: Summary, more: Summary, steps: int) -> Summary:
    """Extrapolate from the summaries of two short models to a longer model.

    The model of ``more`` has one more repetition of the blocks than the model of ``few``. The longer model has
    ``steps`` more repetitions than the model of ``few``.

    The memory in use grows or shrinks by the same amount from each block to the next. The peak is therefore near the
    first or the last block.

    The count of each operation becomes ``few + steps * (more - few)``. An operation on all parameters at once has a
    different size in each summary, so it is counted as two operations. The operation of ``few`` gets a negative count,
    and that of ``more`` a positive count, so that their bytes and FLOPs add up to the extrapolated amount.
    """
    counts: Counter[Operation] = Counter()
    for summary, factor in ((few, 1 - steps), (more, steps)):
        for operation in summary.operations:
            counts[replace(operation, times=1)] += operation.times * factor
    peaks = {part: peak + (more.peaks[part] - peak) * steps for part, peak in few.peaks.items()}
    reserved = extrapolate_reserved(few.reserved, more.reserved, steps)
    operations = [replace(operation, times=count) for operation, count in counts.items() if count]
    return replace(few, operations=operations, peaks=peaks, reserved=reserved)


def _get_kind(block: nn.Module) -> Any:
    """Return a key that is the same for all blocks with the same computation."""
    return [(name, type(inner), _get_parameters(inner), _get_marks(inner)) for name, inner in block.named_modules()]


def _get_parameters(module: nn.Module) -> list[Any]:
    own = module.named_parameters(recurse=False)
    return [(name, parameter.shape, parameter.dtype, parameter.requires_grad) for name, parameter in own]


def _get_marks(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that distinguish kinds of blocks, such as the size of an attention window."""
    marks = {name: value for name, value in vars(module).items() if isinstance(value, str | bool | int | float)}
    return {name: value for name, value in marks.items() if name not in _NUMBERS}
