"""What decides how a family's files are read into shards: families that have it in common are read alike."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from helpers.families import make_family_config
from lightning_fsdp2.modules.experts import find_experts
from lightning_fsdp2.modules.structure import ModelParts, find_parts
from lightning_fsdp2.parallel.tensor.matching import match_plan
from lightning_fsdp2.parallel.tensor.plans import get_plan


@dataclass(frozen=True)
class Kind:
    """How the tensors of a family's files become shards."""

    conversions: frozenset[str]
    """What transformers does with tensors of the files; "none" if they are those of the model."""

    styles: frozenset[str]
    """How tensor parallelism shards weights; empty if it does not."""

    has_experts: bool
    """Whether expert parallelism finds any."""

    def describe(self, mesh: str, axes: Collection[str]) -> dict[str, object]:
        """Return the features of a cell of the matrix, whose mesh has these axes."""
        styles = self.styles if "tp_size" in axes else ()
        return {"mesh": mesh, **dict.fromkeys((*self.conversions, *styles), True)}


def get_kind(family: str) -> Kind:
    """Return the kind of a family, of which only a model without weights is built."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_family_config(family))
    converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
    styles: frozenset[str] = frozenset()
    with suppress(ValueError):  # some have no plan, some are refused
        styles = _get_styles(find_parts(model))
    conversions = frozenset(map(_describe, converters)) or frozenset({"none"})
    return Kind(conversions, styles, has_experts=bool(find_experts(model.modules())))


def _describe(converter: WeightConverter) -> str:
    return ", ".join(f"{type(step).__name__}({getattr(step, 'dim', '')})" for step in converter.operations)


def _get_styles(parts: ModelParts) -> frozenset[str]:
    plan = get_plan(parts)
    unmatched = match_plan(parts, plan).unmatched
    shapes = [
        (type(style).__name__, getattr(style, "sections", None), getattr(style, "dim", None))
        for name, style in plan.items()
        if name not in unmatched
    ]
    return frozenset(map(str, shapes))
