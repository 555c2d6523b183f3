"""Features of a family that decide how its files are read into shards."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
    styles: frozenset[str] = frozenset()
    with suppress(ValueError):  # some have no plan, some are refused
        styles = _get_styles(find_parts(model))
    return Kind(get_conversions(family), styles, has_experts=bool(find_experts(model.modules())))


def get_conversions(family: str) -> frozenset[str]:
    """Return what transformers does with tensors of a family's files; no model is built."""
    return frozenset(", ".join(map(_describe, converter.operations)) for converter in _iterate_converters(family)) or (
        frozenset({"none"})
    )


def _iterate_converters(family: str) -> Iterator[WeightConverter]:
    text = getattr(make_family_config(family), "text_config", None)
    names = (family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], getattr(text, "model_type", family))
    for name in dict.fromkeys(names):
        conversions = get_checkpoint_conversion_mapping(name) or ()
        yield from (conversion for conversion in conversions if isinstance(conversion, WeightConverter))


def _describe(operation: object) -> str:
    return f"{type(operation).__name__}({getattr(operation, 'dim', '')})"


def _get_styles(parts: ModelParts) -> frozenset[str]:
    plan = get_plan(parts)
    unmatched = match_plan(parts, plan).unmatched
    shapes = [
        (type(style).__name__, getattr(style, "sections", None), getattr(style, "dim", None))
        for name, style in plan.items()
        if name not in unmatched
    ]
    return frozenset(map(str, shapes))
