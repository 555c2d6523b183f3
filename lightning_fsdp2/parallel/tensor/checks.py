"""Checks of tensor parallel plans and of the sizes to shard, which run before the model is changed."""

import itertools
import logging
import math
import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from lightning_fsdp2.modules.experts import get_optional_expert_mesh
from lightning_fsdp2.modules.structure import find_layer_drop, get_called_children, get_parameter_owners
from lightning_fsdp2.parallel.tensor.matching import MatchedModel
from lightning_fsdp2.parallel.tensor.parameters import Layout, Slot, get_slots
from lightning_fsdp2.parallel.tensor.plans import get_layer_traits, is_registered
from lightning_fsdp2.parallel.tensor.styles import ColumnWise, LatentKeyValue, RowWise, SummedResult

logger = logging.getLogger(__name__)


def check_plans(models: list[MatchedModel], ranks: int, *, sequence_parallel: bool) -> None:
    """Check plans against their models, as far as this is possible without the layouts of the parameters.

    Raises:
        ValueError: If an entry matches nothing, if attention heads cannot be sharded evenly, if two layers share
            modules, if models that share modules have different entries for them, or if one of torch's own styles
            cannot be used.
    """
    _check_all_matched(models)
    _check_shared(models)
    for model in models:
        _check_heads(model, ranks)
        _check_foreign_styles(model, sequence_parallel)


def check_layouts(
    root: nn.Module,
    models: list[MatchedModel],
    layouts: dict[Slot, Layout],
    ranks: int,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Check the parameter layouts that result from the plans.

    Raises:
        ValueError: If a parameter cannot be sharded evenly, if results are not summed over the ranks as needed, or if a
            model does not support sequence parallelism or a loss with a sharded vocabulary.
    """
    _check_divisible(root, layouts, ranks)
    _check_experts(root, models)
    for model in models:
        _check_summands(model, layouts)
        _check_results(model)
        if sequence_parallel:
            _check_layers(model)
    if loss_parallel:
        _check_loss(models)


def warn_of_replicated(root: nn.Module, layouts: dict[Slot, Layout]) -> None:
    """Log a warning that names the largest replicated parameters if more than half of all parameters are replicated.

    Only global rank 0 logs it.
    """
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
        "Tensor parallelism shards only %.0f %% of the parameters; every rank holds the whole of %s. To shard these"
        " parameters, add entries for them to tp_plan.",
        100 * (1 - sum(whole.values()) / sum(sizes.values())),
        ", ".join(largest),
    )


def warn_of_packed(models: list[MatchedModel]) -> None:
    """Log a warning about each entry of a user's plan that seems to split queries, keys and values in the wrong places.

    Nothing else would show this mistake: the model that the ranks compute is another one, but it trains. Only global
    rank 0 logs the warning.
    """
    patterns = {
        re.sub(r"\.\d+\.", ".*.", name)
        for model in models
        if model.is_given or is_registered(model.module)
        for name, entry in model.entries.items()
        if isinstance(entry.style, ColumnWise) and entry.style.sections is None and not entry.style.gather_output
        if isinstance(entry.module, nn.Linear) and entry.module.out_features == 3 * entry.module.in_features
        if re.search("attn|attention|qkv", name)  # and not an MLP
    }
    for pattern in sorted(patterns) if dist.get_rank() == 0 else ():
        logger.warning(
            "tp_plan[%r]: this layer writes three times as many features as it reads. If these are queries, keys and"
            " values, each rank needs its part of each of the three: use 'qkv_colwise' instead of 'colwise'.",
            pattern,
        )


def _check_all_matched(models: list[MatchedModel]) -> None:
    """Check that the entries of plans match modules or parameters.

    A default plan may name modules that some models of the family lack, but at least one of its entries must match
    something in the layers. In a plan from the user, every entry must match something in at least one of the models.
    """
    for model in models:
        if model.unmatched and not model.matched_layers and not model.is_given:
            raise ValueError(
                f"tp_size: the tensor parallel plan of {type(model.module).__name__} shards nothing in the model's"
                f" layers. For example, the plan names {model.unmatched[0]!r}, which the model does not have. Pass a"
                " plan that matches the model in the config, as tp_plan={...}, or use tp_size=1."
            )
    given = [model for model in models if model.is_given]
    found = {pattern for model in given for pattern in model.matched}
    for model in given:
        for pattern in model.unmatched:
            if pattern not in found:
                names = " or ".join(type(model.module).__name__ for model in given)
                some = [name for name, _ in model.module.named_modules() if "0" in name][:3]
                raise ValueError(
                    f"tp_plan[{pattern!r}] matches no module and no parameter of {names}. Names are relative to the"
                    f" model, and * stands for the number of a layer. Examples of existing names are {', '.join(some)}."
                )


def _check_shared(models: list[MatchedModel]) -> None:
    """Check that no two layers share a module with parameters, and that models agree on the modules that they share.

    Each layer shards and gathers only its own modules. If two models share a module, as an actor and a critic may, only
    the plan of the first model is applied to this module, so the second model's plan must not differ.
    """
    layer_of: dict[nn.Module, nn.Module] = {}
    for model in models:
        names = {module: name for name, module in model.module.named_modules()}
        for layer in (layer for layers in model.get_stacks() for layer in layers):
            for module in layer.modules():
                other = layer_of.setdefault(module, layer)
                if other is not layer and get_slots([module]):
                    raise ValueError(
                        f"tp_size: {names[module]} is part of both {names[layer]} and"
                        f" {names.get(other, 'a layer of another model')}, but each layer shards and gathers only its"
                        " own modules. Give each layer its own modules (their parameters may be tied), or use"
                        " tp_size=1."
                    )
    for first, second in itertools.combinations(models, 2):
        _check_shared_entries(first, second)


def _check_shared_entries(first: MatchedModel, second: MatchedModel) -> None:
    shared = set(first.module.modules()) & set(second.module.modules())
    plans = [
        {(e.module, e.parameter): e.style for e in model.entries.values() if e.module in shared}
        for model in (first, second)
    ]
    if plans[0] != plans[1]:
        module, _ = next(key for key in {**plans[0], **plans[1]} if plans[0].get(key) != plans[1].get(key))
        name = next(name for name, candidate in second.module.named_modules() if candidate is module)
        raise ValueError(
            f"tp_plan: {type(first.module).__name__} and {type(second.module).__name__} share {name}, but their plans"
            " for it differ. Use tp_plan or register_tp_plan to give both models the same entries for shared modules."
        )


def _check_foreign_styles(model: MatchedModel, sequence_parallel: bool) -> None:
    """Check that torch's own styles are not used with sequence parallelism or for tied weights.

    Sequence parallelism works only with this package's styles, because their layouts are known. torch's styles do not
    keep weights tied.
    """
    if model.foreign and sequence_parallel:
        name, style = next(iter(model.foreign.items()))
        raise ValueError(
            f"sequence_parallel=True cannot be derived from a plan with custom layouts: {name} has {style}. Use the"
            " names of styles ('colwise', 'rowwise', ...), or set sequence_parallel=False and shard the sequence with"
            " the styles in the plan."
        )
    owned = {module for name in model.foreign for module in model.module.get_submodule(name).modules()}
    for owners in get_parameter_owners(model.module).values():
        if len(owners) > 1 and any(module in owned for module, _ in owners):
            names = {module: name for name, module in model.module.named_modules()}
            tied = " and ".join(f"{names[module]}.{parameter}" for module, parameter in owners)
            raise ValueError(
                f"tp_plan: {tied} are one tied parameter, but a torch style with custom layouts would replace the"
                " parameter in only one of these modules. Use the names of styles for both modules"
                " ('embedding_rowwise', 'colwise_gather_output'), or untie the weights (tie_word_embeddings=False)."
            )


def _check_summands(model: MatchedModel, layouts: dict[Slot, Layout]) -> None:
    """Check that modules whose results are summed over the ranks have sharded parameters.

    With replicated parameters, every rank would compute the whole result, and the sum would be too large.
    """
    for name, entry in model.entries.items():
        # under expert parallelism, each rank computes only its own part of the tokens
        has_own_tokens = get_optional_expert_mesh(entry.module) is not None
        if isinstance(entry.style, SummedResult) and entry.parameter is None and not has_own_tokens:
            slots = get_slots(entry.module.modules())
            if all(isinstance(layouts[slot].placement, Replicate) for slot in slots):
                raise ValueError(
                    f"tp_plan: the results of {name} ({type(entry.module).__name__}) would be summed over the ranks,"
                    " but no entry shards the parameters of this module. Add entries for these parameters. Adapters"
                    " that replace the parameters of experts are not supported with tensor parallelism."
                )


def _check_experts(root: nn.Module, models: list[MatchedModel]) -> None:
    """Check that a plan sums the results of experts over the tensor parallel ranks if expert parallelism is used.

    The sum is needed because each of these ranks computes results only for its own tokens.
    """
    entries = [entry for model in models for entry in model.entries.values()]
    summed = {entry.module for entry in entries if isinstance(entry.style, SummedResult)}
    for name, module in root.named_modules():
        if get_optional_expert_mesh(module) is not None and module not in summed:
            raise ValueError(
                f"ep_size: the experts {name} are outside of the models that tensor parallelism shards, so nothing"
                " would sum their results over the tensor parallel ranks. Use tp_size=1 or ep_size=1."
            )


def _check_results(model: MatchedModel) -> None:
    """Check that each child of a layer sums its results over the ranks if it contains column-wise projections.

    All projections that are direct children of the layer are checked as a single group.
    """
    if model.foreign:  # skip plans with torch's own styles, because these styles may sum the results themselves
        return
    names = {module: name for name, module in model.module.named_modules()}
    styles = model.styles
    for layer in (layer for layers in model.get_stacks() for layer in layers):
        children = get_called_children(layer)
        own = [child for child in children if child in styles]
        for modules in (own, *(list(child.modules()) for child in children if child not in styles)):
            found = {module: styles[module] for module in modules if module in styles}
            sharded = [m for m, style in found.items() if isinstance(style, ColumnWise) and not style.gather_output]
            if sharded and not any(isinstance(style, RowWise | SummedResult) for style in found.values()):
                raise ValueError(
                    f"tp_plan: the outputs of {names[sharded[0]]} are sharded ('colwise'), so the results computed"
                    " from these outputs must be summed over the ranks, but no entry sums them. Add a 'rowwise' entry"
                    " for the projection that reads the outputs, or gather the outputs with 'colwise_gather_output'."
                )


def _check_heads(model: MatchedModel, ranks: int) -> None:
    """Check that every rank gets the same number of attention heads."""
    styles = model.styles
    for name, attention in model.module.named_modules():
        children = [styles.get(child) for child in attention.children()]
        is_sharded = any(isinstance(style, ColumnWise) and not style.gather_output for style in children)
        if not is_sharded or "attention" not in type(attention).__name__.lower():
            continue
        is_latent = any(isinstance(style, LatentKeyValue) for style in children)
        config = getattr(attention, "config", None) or getattr(model.module, "config", None)
        fields = ("num_attention_heads",) if is_latent else ("num_attention_heads", "num_key_value_heads")
        heads = {field: value for field in fields if isinstance(value := _get_optional_field(config, field), int)}
        for field, value in heads.items():
            if value % ranks:
                raise ValueError(
                    f"tp_size={ranks} does not divide {field}={value} of {type(config).__name__};"
                    f" use {_list_divisors(heads.values())} (at {name})."
                )


def _check_loss(models: list[MatchedModel]) -> None:
    """Check that at least one model has a sharded output head, and that its loss is supported.

    Each model with such a head must use the causal language model loss. This package cannot compute any other loss with
    a sharded vocabulary.
    """
    with_head = [model for model in models if model.get_optional_head() is not None]
    if not with_head:
        names = " and ".join(type(model.module).__name__ for model in models)
        raise ValueError(
            f"loss_parallel=True: the plan shards no output head of {names}. Add the head to tp_plan as"
            " 'colwise_gather_output' (and a tied embedding as 'embedding_rowwise'), or use loss_parallel=False."
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    for model in with_head:
        module: Any = model.module
        if module.loss_function is not ForCausalLMLoss:
            raise ValueError(
                f"loss_parallel=True supports only the loss of causal language models, but {type(module).__name__} uses"
                f" {getattr(module.loss_function, '__name__', module.loss_function)}; use loss_parallel=False."
            )


def _check_layers(model: MatchedModel) -> None:
    """Check that a model's layers support sequence parallelism.

    The model must run every layer in every step, and the layers' own code must process each position independently.
    """
    traits = get_layer_traits(model.parts)
    if found := find_layer_drop(model.module):
        raise ValueError(
            f"sequence_parallel=True needs every layer in every step, but {type(model.module).__name__} drops layers"
            f" at random (layerdrop={found[1]}); set layerdrop=0, or use sequence_parallel=False."
        )
    if traits.refused:
        raise ValueError(
            f"sequence_parallel=True is not possible for {type(model.module).__name__}: {traits.refused}; use"
            " sequence_parallel=False."
        )
    names = {module: name for name, module in model.module.named_modules()}
    for layer in (layer for layers in model.get_text_stacks() for layer in layers):
        known = {*model.styles, *(getattr(layer, name, None) for name in traits.pointwise)}
        for child in get_called_children(layer):
            if isinstance(child, nn.Linear) and child not in known:
                raise ValueError(
                    f"sequence_parallel=True: {names[child]} is a linear layer that the code of {type(layer).__name__}"
                    " calls directly. It is not known whether this linear layer processes each position independently"
                    " or is part of an attention mechanism. Shard the linear layer in tp_plan, name it in"
                    " LayerTraits(pointwise=...), or use sequence_parallel=False."
                )


def _check_divisible(root: nn.Module, layouts: dict[Slot, Layout], ranks: int) -> None:
    """Check that all ranks get equal parts of each sharded parameter, unless its layout allows uneven parts."""
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


def _get_optional_field(config: Any, field: str) -> Any:
    try:
        return getattr(config, field, None)
    except Exception:  # raised if the field differs between layers; `_check_divisible` still checks the weights
        return None


def _list_divisors(values: Any) -> str:
    number = math.gcd(*values)
    *first, last = [str(size) for size in range(1, number + 1) if number % size == 0]
    return f"{', '.join(first)} or {last}" if first else last
