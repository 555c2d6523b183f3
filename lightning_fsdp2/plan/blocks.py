"""Plan a model by a few of its layers: what they take grows by the same amount with each of them.

A model of many layers is a few kinds of blocks over and over. Simulated with two and with three repetitions, the third
one's part is known, and so is any number of them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_fsdp2.parallel.structure import get_hf_models, get_layer_lists
from lightning_fsdp2.plan.recorder import CATEGORIES, Operation, Recording

_NUMBERS = ("layer_idx", "layer_id")
"""Under which names blocks know their own number."""

FEW, MORE = 2, 3
"""Repetitions that are simulated: the first and the last block may differ from those between."""


@dataclass(frozen=True)
class Repetition:
    """Blocks of a list that come again and again."""

    first: int
    """Blocks before them."""

    period: int
    """Blocks of a repetition."""

    times: int


@dataclass(frozen=True)
class Summary:
    """A recording, without the order."""

    operations: list[Operation]
    peaks: dict[str, dict[str, float]]
    """Bytes by category when the most are in use, by phase."""

    @property
    def peak_bytes(self) -> int:
        """Of the phase that needs most."""
        return int(max(sum(peak.values()) for peak in self.peaks.values()))


def get_optional_repetition(module: nn.Module) -> Repetition | None:
    """What repeats in the only list of blocks of ``module``; None where a short one would not tell of a long one."""
    lists = get_layer_lists(module)
    if len(lists) != 1:
        return None
    kinds = [_get_kind(block) for block in lists[0]]
    for model in get_hf_models(module):
        types = _get_layer_types(model)
        if len(types) == len(kinds):
            kinds = list(zip(kinds, types, strict=True))
    for first in range(len(kinds)):
        for period in range(1, (len(kinds) - first) // (MORE + 1) + 1):
            repeated, rest = divmod(len(kinds) - first, period)
            if rest == 0 and kinds[first:] == kinds[first : first + period] * repeated:
                return Repetition(first, period, repeated)
    return None


def _get_layer_types(model: Any) -> list[str]:
    """What some models keep in their config alone."""
    return getattr(model.config.get_text_config(), "layer_types", None) or []


def shorten(module: nn.Module, repetition: Repetition, times: int) -> None:
    """Leave out all but ``times`` repetitions, in place."""
    (blocks,) = get_layer_lists(module)
    del blocks[repetition.first + times * repetition.period :]


def summarize(recording: Recording) -> Summary:
    """Add up equal operations, and find the peak of each phase."""
    counts: Counter[Operation] = Counter()
    for operation in recording.operations:
        counts[replace(operation, times=1)] += operation.times
    ends = [*(begin for begin, _ in recording.phases[1:]), len(recording.operations) + 1]
    phases = iter([*zip(ends, (name for _, name in recording.phases), strict=True)])
    current: Counter[str] = Counter()
    peaks: dict[str, dict[str, float]] = {}
    end, phase = next(phases)
    for moment, category, change in recording.changes:
        while moment >= end:
            end, phase = next(phases)
        current[category] += change
        if phase not in peaks or current.total() > sum(peaks[phase].values()):
            peaks[phase] = {name: current[name] for name in CATEGORIES}
    return Summary([replace(operation, times=count) for operation, count in counts.items()], peaks)


def extrapolate(few: Summary, more: Summary, times: int) -> Summary:
    """Tell of ``times`` repetitions from :data:`FEW` and :data:`MORE`.

    An operation on all parameters at once has another size with each number of layers. It comes out as a negative count
    of one size and a positive of the other, whose sum is right.
    """
    steps = times - FEW
    counts: Counter[Operation] = Counter()
    for summary, factor in ((few, 1 - steps), (more, steps)):
        for operation in summary.operations:
            counts[replace(operation, times=1)] += operation.times * factor
    peaks = {
        phase: {name: few.peaks[phase][name] * (1 - steps) + peak[name] * steps for name in CATEGORIES}
        for phase, peak in more.peaks.items()
    }
    return Summary([replace(operation, times=count) for operation, count in counts.items() if count], peaks)


def _get_kind(block: nn.Module) -> Any:
    """Equal for blocks that do the same."""
    return [(name, type(inner), _get_parameters(inner), _get_marks(inner)) for name, inner in block.named_modules()]


def _get_parameters(module: nn.Module) -> list[Any]:
    own = module.named_parameters(recurse=False)
    return [(name, parameter.shape, parameter.dtype, parameter.requires_grad) for name, parameter in own]


def _get_marks(module: nn.Module) -> dict[str, Any]:
    """What else tells blocks apart, such as the window of their attention."""
    marks = {name: value for name, value in vars(module).items() if isinstance(value, str | bool | int | float)}
    return {name: value for name, value in marks.items() if name not in _NUMBERS}
