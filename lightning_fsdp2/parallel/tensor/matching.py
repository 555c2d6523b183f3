"""Matching of a tensor parallel plan's entries with the modules and parameters of a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fsdp2.modules.experts import get_optional_expert_mesh
from lightning_fsdp2.modules.structure import ModelParts
from lightning_fsdp2.parallel.tensor.parameters import Layout, Slot, get_slots
from lightning_fsdp2.parallel.tensor.styles import (
    ColumnWise,
    FeatureEmbedding,
    RowWise,
    Style,
    SummedResult,
    VocabularyEmbedding,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Style that a plan assigns to a module, or to one parameter of the module."""

    module: nn.Module
    parameter: str | None
    style: Style


@dataclass(kw_only=True)
class MatchedModel:
    """Model with the styles that its tensor parallel plan assigns to its modules and parameters."""

    parts: ModelParts
    entries: dict[str, Entry]
    """This package's styles for modules and parameters, by the name of the module or parameter."""

    foreign: dict[str, ParallelStyle]
    """Styles that are not this package's own, by module name. They handle DTensors and collectives themselves."""

    is_given: bool
    """Whether a user gave the plan. If so, every entry must match something."""

    matched: list[str]
    """Patterns of the plan that match a module or parameter."""

    unmatched: list[str]
    """Patterns of the plan that match nothing."""

    @property
    def module(self) -> nn.Module:
        """Model to which the plan applies."""
        return self.parts.module

    @property
    def matched_layers(self) -> list[str]:
        """Patterns that match modules or parameters inside the layers."""
        return [pattern for pattern in self.matched if "*" in pattern or any(map(str.isdigit, pattern.split(".")))]

    @property
    def styles(self) -> dict[nn.Module, Style]:
        return {entry.module: entry.style for entry in self.entries.values() if entry.parameter is None}

    def get_stacks(self) -> list[list[nn.Module]]:
        """Return the model's lists of layers in which at least one entry matches a module or parameter."""
        styled = {entry.module for entry in self.entries.values()} | set(map(self.module.get_submodule, self.foreign))
        return [
            layers
            for layers in self.parts.layer_lists
            if any(module in styled for layer in layers for module in layer.modules())
        ]

    def get_text_stacks(self) -> list[list[nn.Module]]:
        """Return the lists of layers from :meth:`get_stacks`, except those of vision and audio towers.

        The hidden states in a tower are not sequences of the batch's tokens, so sequence parallelism cannot shard them.
        If all lists belong to towers, all of them are returned.
        """
        stacks = [layers for layers in self.get_stacks() if layers[0] not in self.parts.towers]
        return stacks or self.get_stacks()

    def get_optional_head(self) -> str | None:
        """Return the name of the output head if its vocabulary is sharded, and None otherwise."""
        head = self.parts.head
        names = [name for name, entry in self.entries.items() if entry.module is head and entry.parameter is None]
        return next((name for name in names if isinstance(self.entries[name].style, ColumnWise)), None)

    def get_layouts(self, ranks: int) -> dict[Slot, Layout]:
        """Return the layouts of all parameters that the plan's entries shard or replicate.

        Raises:
            TypeError: If a style does not fit its module.
            ValueError: If a sharded size, such as the number of heads, is not divisible by the number of ranks.
        """
        layouts: dict[Slot, Layout] = {}
        # an entry for a parameter overrides an entry for its module
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].parameter is not None):
            try:
                if entry.parameter is None:
                    layouts |= entry.style.get_layouts(entry.module, ranks)
                else:
                    parameter = entry.module.get_parameter(entry.parameter)
                    layouts[entry.module, entry.parameter] = entry.style.get_parameter_layout(parameter)
            except TypeError as error:
                raise TypeError(f"tp_plan: {type(entry.style).__name__} does not fit {name}: {error}") from None
        return layouts


def match_plan(parts: ModelParts, plan: Mapping[str, ParallelStyle], *, is_given: bool = False) -> MatchedModel:
    """Find the modules and parameters of a model that the entries of a plan match.

    If several entries match the same module or parameter, the last one applies.

    Args:
        parts: Parts of the model.
        plan: Styles by pattern.
        is_given: Whether a user gave the plan.

    Raises:
        TypeError: If an entry assigns one of torch's styles to a parameter; these styles work only for modules.
    """
    modules = dict(parts.module.named_modules(remove_duplicate=False))
    parameters = dict(parts.module.named_parameters(remove_duplicate=False))
    result = MatchedModel(parts=parts, entries={}, foreign={}, is_given=is_given, matched=[], unmatched=[])
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        names = [name for name in {**modules, **parameters} if expression.fullmatch(name)]
        (result.matched if names else result.unmatched).append(pattern)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            if not isinstance(style, Style):
                if name not in modules:
                    raise TypeError(
                        f"tp_plan: {name} is a parameter, but the style {type(style).__name__} is for modules. Assign"
                        f" the style to the module {owner}, or use the name of a style for parameters ('colwise',"
                        " 'rowwise', ...)."
                    )
                result.foreign[name] = style
            elif name in modules:
                for suffix, module in _unwrap(modules[name]):
                    adapted = _adapt_to_embedding(style, module)
                    result.entries[name + suffix] = Entry(module=module, parameter=None, style=adapted)
            else:
                result.entries[name] = Entry(module=modules[owner], parameter=attribute, style=style)
    _match_experts(result)
    return result


def _match_experts(model: MatchedModel) -> None:
    """Replace the entries for an experts module with a single one, if expert parallelism distributes the experts.

    The new entry shards no parameters, because expert parallelism keeps each expert whole. The entry only sums the
    module's results over the tensor parallel ranks, because each of these ranks returns the results of its own tokens,
    and zeros for all other tokens.
    """
    for name, module in model.module.named_modules():
        if get_optional_expert_mesh(module) is not None:
            model.entries = {key: entry for key, entry in model.entries.items() if entry.module is not module}
            model.entries[name] = Entry(module=module, parameter=None, style=SummedResult())


def _unwrap(module: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules to which an entry for ``module`` applies, each with a suffix to append to the entry's name.

    If peft has wrapped the module for ``modules_to_save``, these are the original module and its copies. Otherwise, the
    list contains only the module itself.
    """
    if not (hasattr(module, "original_module") and hasattr(module, "modules_to_save")):
        return [("", module)]
    saved = [(f".modules_to_save.{name}", copy) for name, copy in module.modules_to_save.items()]
    return [(".original_module", module.original_module), *saved]


def _adapt_to_embedding(style: Style, module: nn.Module) -> Style:
    """Replace a style for linear layers with the corresponding style for embeddings if ``module`` is an embedding.

    torch has the same style classes for linear layers and embeddings, but they mean something different for each. The
    embedding styles of this package always return whole results.
    """
    if isinstance(module, nn.Embedding):
        if style == RowWise(split_input=True):
            return VocabularyEmbedding()
        if style == ColumnWise(gather_output=True):
            return FeatureEmbedding()
    return style


def agree_on_tied(models: list[MatchedModel], layouts: dict[Slot, Layout]) -> None:
    """Replicate each tied parameter for which the plan gives different placements in the modules that share it."""
    holders: dict[nn.Parameter, list[Slot]] = {}
    for module, name in layouts:
        holders.setdefault(module.get_parameter(name), []).append((module, name))
    for slots in holders.values():
        if len({layouts[slot].placement for slot in slots}) > 1:
            tied = {module for module, _ in slots}
            for model in models:
                model.entries = {name: entry for name, entry in model.entries.items() if entry.module not in tied}
            layouts.update(dict.fromkeys(get_slots(tied), Layout()))
