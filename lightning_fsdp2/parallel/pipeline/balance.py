"""Division of a list of layers into ranges whose most expensive one is as cheap as possible."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_fsdp2.parallel.pipeline.trace import Phase

_NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def build_ranges(
    model: Any,
    layers: Sequence[nn.Module],
    phases: dict[str, set[Phase]],
    num_stages: int,
    layers_per_stage: Sequence[int] | None = None,
) -> list[range]:
    """Return the indices of the layers of each stage.

    The cost of a module is the number of floating-point operations of its matrix products per token. What runs before
    the layers adds to the cost of the first stage, and what runs after them to that of the last.

    Args:
        model: The Hugging Face model.
        layers: Its layers.
        phases: When the modules outside the layers run, by name.
        num_stages: Number of stages, at most the number of layers.
        layers_per_stage: Number of layers of each stage, to be used instead of the costs.
    """
    if layers_per_stage is None:
        active = _get_active_fraction(model)
        before = sum(_count_own(model.get_submodule(n), active) for n, found in phases.items() if Phase.BEFORE in found)
        after = sum(_count_own(model.get_submodule(n), active) for n, found in phases.items() if Phase.AFTER in found)
        costs = [sum(_count_own(module, active) for module in layer.modules()) for layer in layers]
        layers_per_stage = balance(costs, num_stages, before=before, after=after)
    ends = list(itertools.accumulate(layers_per_stage))
    return [range(end - count, end) for end, count in zip(ends, layers_per_stage, strict=True)]


def balance(costs: Sequence[float], num_stages: int, *, before: float = 0, after: float = 0) -> list[int]:
    """Divide layers into stages so that the largest cost of a stage is as small as possible.

    Among the best divisions, the one with the most even costs is returned, which has the least sum of squares.

    Args:
        costs: Cost of each layer.
        num_stages: Number of stages, at most the number of layers.
        before: Cost that the first stage has in addition to its layers.
        after: Cost that the last stage has in addition to its layers.

    Returns:
        Number of layers of each stage, at least 1.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    total = len(costs)

    def get_cost(stage: int, start: int, stop: int) -> float:
        extra = before * (stage == 0) + after * (stage == num_stages - 1)
        return sums[stop] - sums[start] + extra

    def divide(limit: float) -> dict[tuple[int, int], tuple[float, float, int]]:
        """Find the best (largest cost, sum of squares, start of the last stage) for each stage and end."""
        best = {(-1, 0): (0.0, 0.0, 0)}
        for stage, stop in itertools.product(range(num_stages), range(1, total + 1)):
            options = []
            for start in range(stage, stop):
                if (stage - 1, start) in best and (cost := get_cost(stage, start, stop)) <= limit:
                    largest, squares, _ = best[stage - 1, start]
                    options.append((max(largest, cost), squares + cost**2, start))
            if options:
                key = (lambda option: option[:1]) if limit == float("inf") else (lambda option: option[1:2])
                best[stage, stop] = min(options, key=key)
        return best

    smallest, _, _ = divide(float("inf"))[num_stages - 1, total]
    best, stop = divide(smallest), total
    counts: list[int] = []
    for stage in reversed(range(num_stages)):
        start = best[stage, stop][2]
        counts.insert(0, stop - start)
        stop = start
    return counts


def _get_active_fraction(model: Any) -> float:
    """Return the fraction of its experts that a mixture of experts uses for a token."""
    config = model.config.get_text_config()
    number = next((n for name in _NUMBERS_OF_EXPERTS if (n := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    return min(1.0, active / number) if isinstance(number, int) and isinstance(active, int) else 1.0


def _count_own(module: nn.Module, active: float) -> float:
    """Count the operations per token of the module's own matrices. Looking up an embedding takes none."""
    if isinstance(module, nn.Embedding):
        return 0.0
    matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim >= 2]
    return sum(2 * matrix.numel() * (active if matrix.ndim == 3 else 1.0) for matrix in matrices)
