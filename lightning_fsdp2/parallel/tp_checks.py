"""What is refused before anything is touched: plans that do not fit, and sizes that the ranks do not divide."""

import logging
import math
import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from lightning_fsdp2.parallel.structure import iterate_children
from lightning_fsdp2.parallel.tp_matching import MatchedModel
from lightning_fsdp2.parallel.tp_parameters import Layout, Slot, get_slots
from lightning_fsdp2.parallel.tp_plans import PlanOption, get_layer_traits
from lightning_fsdp2.parallel.tp_styles import ColumnWise, Experts, LatentKeyValue, RowWise

logger = logging.getLogger(__name__)


def check_all_matched(models: list[MatchedModel], plan: PlanOption) -> None:
    """The models' own plans name what some of their configurations lack, but a given one means what it says."""
    if plan is None or plan == "hf":
        return
    for pattern in models[0].unmatched:
        if all(pattern in model.unmatched for model in models):
            names = " or ".join(type(model.module).__name__ for model in models)
            some = [name for name, _ in models[0].module.named_modules() if "0" in name][:3]
            raise ValueError(
                f"tp_plan[{pattern!r}] matches no module and no parameter of {names}. Names are relative to the model,"
                f" with * for the number of a layer; there are for example {', '.join(some)}."
            )


def check_foreign_styles(model: MatchedModel, sequence_parallel: bool) -> None:
    """Sequence parallelism is derived from styles whose layouts are known."""
    if model.foreign and sequence_parallel:
        name, style = next(iter(model.foreign.items()))
        raise ValueError(
            f"sequence_parallel=True cannot be derived from a plan with styles of its own layouts: {name} has"
            f" {style}. Use the names of styles ('colwise', 'rowwise', ...), or leave sequence_parallel False and let"
            " the plan shard the sequence."
        )


def check_experts(model: MatchedModel, layouts: dict[Slot, Layout]) -> None:
    """Experts whose results are summed over the ranks must be sharded."""
    for name, entry in model.entries.items():
        if isinstance(entry.style, Experts) and entry.parameter is None:
            slots = get_slots(entry.module.modules())
            if all(isinstance(layouts[slot].placement, Replicate) for slot in slots):
                raise ValueError(
                    f"tp_plan: the results of {name} ({type(entry.module).__name__}) are to be summed over the ranks,"
                    " but no entry shards its parameters; name them too (adapters that replace an experts' parameters"
                    " are not supported under tensor parallelism)."
                )


def check_results(model: MatchedModel) -> None:
    """What a rank computes for itself in a part of a layer must be added up there."""
    if model.foreign:  # one of them may do it
        return
    names = {module: name for name, module in model.module.named_modules()}
    styles = model.styles
    for layer in (layer for layers in model.get_stacks() for layer in layers):
        children = list(iterate_children(layer))
        own = [child for child in children if child in styles]
        for modules in (own, *(list(child.modules()) for child in children if child not in styles)):
            found = {module: styles[module] for module in modules if module in styles}
            sharded = [m for m, style in found.items() if isinstance(style, ColumnWise) and not style.gather_output]
            if sharded and not any(isinstance(style, RowWise | Experts) for style in found.values()):
                raise ValueError(
                    f"tp_plan: the outputs of {names[sharded[0]]} are sharded ('colwise'), but no entry adds up what is"
                    " computed with them; add the projection that reads them as 'rowwise', or gather the outputs with"
                    " 'colwise_gather_output'."
                )


def check_heads(model: MatchedModel, ranks: int) -> None:
    """Every rank needs as many heads as any other."""
    styles = model.styles
    for name, attention in model.module.named_modules():
        children = [styles.get(child) for child in attention.children()]
        is_sharded = any(isinstance(style, ColumnWise) and not style.gather_output for style in children)
        if not is_sharded or "attention" not in type(attention).__name__.lower():
            continue
        is_latent = any(isinstance(style, LatentKeyValue) for style in children)
        config = getattr(attention, "config", None) or getattr(model.module, "config", None)
        fields = ("num_attention_heads",) if is_latent else ("num_attention_heads", "num_key_value_heads")
        heads = {field: value for field in fields if isinstance(value := _get_optional(config, field), int)}
        for field, value in heads.items():
            if value % ranks:
                raise ValueError(
                    f"tp_size={ranks} does not divide {field}={value} of {type(config).__name__};"
                    f" use {_list_divisors(heads.values())} (at {name})."
                )


def check_loss(model: MatchedModel) -> None:
    """The loss on a sharded vocabulary is that of causal language models, and needs a head to shard."""
    module: Any = model.module
    if model.get_optional_head() is None:
        raise ValueError(
            f"loss_parallel=True: {type(module).__name__} has no head whose outputs the plan shards; add it to tp_plan"
            " as 'colwise_gather_output' (and a tied embedding as 'embedding_rowwise'), or use loss_parallel=False."
        )
    if module.loss_function.__name__ != "ForCausalLMLoss":
        raise ValueError(
            f"loss_parallel=True computes the loss of causal language models, but {type(module).__name__} has"
            f" {module.loss_function.__name__}; use loss_parallel=False."
        )


def check_layers(model: MatchedModel) -> None:
    """Under sequence parallelism a layer's own code may only treat positions one by one."""
    traits = get_layer_traits(model.module)
    if traits.refused:
        raise ValueError(
            f"sequence_parallel=True is not possible for {type(model.module).__name__}: {traits.refused}; use"
            " sequence_parallel=False."
        )
    names = {module: name for name, module in model.module.named_modules()}
    for layer in (layer for layers in model.get_stacks() for layer in layers):
        known = {*model.styles, *(getattr(layer, name, None) for name in traits.pointwise)}
        for child in iterate_children(layer):
            if isinstance(child, nn.Linear) and child not in known:
                raise ValueError(
                    f"sequence_parallel=True: {names[child]} is a linear layer that {type(layer).__name__} itself uses,"
                    " and whether it does so position by position (or in an attention of its own) cannot be seen. Shard"
                    " it in tp_plan, name it in LayerTraits(pointwise=...), or use sequence_parallel=False."
                )


def check_divisible(root: nn.Module, layouts: dict[Slot, Layout], ranks: int) -> None:
    """What ranks compute with side by side has equal parts."""
    names = {module: name for name, module in root.named_modules()}
    for (module, name), layout in layouts.items():
        parameter = module.get_parameter(name)
        if layout.is_uneven or (isinstance(layout.placement, Replicate) and layout.sections is None):
            continue
        parts = layout.get_parts(parameter)
        if any(part % ranks for part in parts):
            raise ValueError(
                f"tp_size={ranks} does not divide the sharded size {' + '.join(map(str, parts))} of"
                f" {names[module]}.{name}; use {_list_divisors(parts)}."
            )


def warn_of_replicated(root: nn.Module, layouts: dict[Slot, Layout]) -> None:
    """Name the largest parameters that every rank holds, if these are more than half of all."""
    names = {module: name for name, module in root.named_modules()}
    sizes = {slot: slot[0].get_parameter(slot[1]).numel() for slot in layouts}
    whole = {slot: size for slot, size in sizes.items() if isinstance(layouts[slot].placement, Replicate)}
    if 2 * sum(whole.values()) <= sum(sizes.values()) or dist.get_rank() > 0:
        return
    patterns: dict[str, int] = {}
    for (module, name), size in whole.items():
        pattern = re.sub(r"\.\d+\.", ".*.", f"{names[module]}.{name}")
        patterns[pattern] = patterns.get(pattern, 0) + size
    largest = sorted(patterns, key=lambda pattern: -patterns[pattern])[:10]
    logger.warning(
        "Tensor parallelism shards %.0f %% of the parameters only; every rank holds all of %s. A tp_plan that names"
        " them shards them.",
        100 * (1 - sum(whole.values()) / sum(sizes.values())),
        ", ".join(largest),
    )


def _get_optional(config: Any, field: str) -> Any:
    try:
        return getattr(config, field, None)
    except Exception:  # a field that differs by layer refuses to be read; the size of the weights is checked anyway
        return None


def _list_divisors(values: Any) -> str:
    number = math.gcd(*values)
    *first, last = [str(size) for size in range(1, number + 1) if number % size == 0]
    return f"{', '.join(first)} or {last}" if first else last
