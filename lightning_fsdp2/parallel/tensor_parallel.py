"""Tensor and sequence parallelism: match a plan with each model, check it, apply it."""

import inspect
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_fsdp2.parallel.loss import causal_lm_loss
from lightning_fsdp2.parallel.random_state import share_random_state
from lightning_fsdp2.parallel.sequence_parallel import (
    LayerScope,
    PointwiseScope,
    RegionScope,
    Scope,
    Stack,
    StackedLayer,
    refuse_own_parts,
    sum_gradients_on_shards,
)
from lightning_fsdp2.parallel.structure import (
    get_embedding_and_head,
    get_hf_models,
    get_layer_lists,
    get_modules,
    is_hf_model,
    is_lightning_module,
)
from lightning_fsdp2.parallel.tp_parameters import (
    Layout,
    Slot,
    compute_with_local_parameters,
    get_slots,
    shard_parameters,
    wrap_method,
)
from lightning_fsdp2.parallel.tp_plans import LayerTraits, PlanOption, get_layer_traits, get_plan
from lightning_fsdp2.parallel.tp_random import LayerRandom, draws_random_numbers
from lightning_fsdp2.parallel.tp_styles import (
    ColumnWise,
    Experts,
    FeatureEmbedding,
    LatentKeyValue,
    RowWise,
    Style,
    VocabularyEmbedding,
    VocabularyHead,
)

logger = logging.getLogger(__name__)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def apply_tensor_parallel(
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: PlanOption = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> None:
    """Shard the Hugging Face models in ``root`` over the tensor parallel ranks.

    All parameters of ``root`` become DTensors on ``mesh``, those that no plan shards replicated ones, so that clipping
    and fused optimizers find them on one mesh. Their modules compute with plain tensors nevertheless.

    Args:
        root: Changed in place; any module with models in it, or one module for which ``plan`` has the names.
        mesh: 1-D.
        plan: As for :func:`~lightning_fsdp2.parallel.tp_plans.get_plan`; for all models in ``root``.
        sequence_parallel: Whether to shard activations over the sequence where the plan leaves them whole.
        loss_parallel: Whether heads return logits of a sharded vocabulary, and models compute their loss on them.

    Raises:
        TypeError: When a style does not fit its module.
        ValueError: When there is no plan, an entry matches nothing, or the ranks do not divide what they share.
    """
    models = [_match(model, get_plan(model, plan)) for model in get_hf_models(root) or [root]]
    _check_all_matched(models, plan)
    layouts = dict.fromkeys(get_slots(get_modules(root)), Layout())
    for model in models:
        _check_heads(model, mesh.size())
        _check_foreign_styles(model, sequence_parallel)
        layouts |= _get_layouts(model, mesh.size())
    _agree_on_tied(models, layouts)
    _check_divisible(root, layouts, mesh.size())
    for model in models:
        _check_experts(model, layouts)
        if sequence_parallel:
            _check_layers(model)
        if loss_parallel:
            _check_loss(model)
    # from here on the model is changed
    for model in models:
        if model.foreign:
            parallelize_module(model.module, mesh, model.foreign)
        if loss_parallel:
            _shard_loss(model, mesh)
    layouts = {
        slot: layout for slot, layout in layouts.items() if not isinstance(slot[0]._parameters[slot[1]], DTensor)
    }
    for model in models:
        _install(model, layouts, mesh, sequence_parallel)
    layers = [layer for model in models for layers in get_layer_lists(model.module) for layer in layers]
    inside = {module for layer in layers for module in layer.modules()}
    others = [module for module in get_modules(root) if module not in inside]
    _warn_of_replicated(root, layouts)
    shard_parameters(layouts, mesh)
    for layer in layers:
        compute_with_local_parameters(layer, layouts, mesh.get_group())
    for module in others:
        compute_with_local_parameters(module, layouts, mesh.get_group(), recurse=False, methods=_get_entrances(module))
    share_random_state(mesh.get_group(), torch.device(mesh.device_type))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A style, and the module it is for or the module and its parameter."""

    module: nn.Module
    parameter: str | None
    style: Style


@dataclass(kw_only=True)
class _Model:
    """A model and what its plan means for it."""

    module: nn.Module
    entries: dict[str, _Entry]
    """By the name of the module or parameter."""

    foreign: dict[str, ParallelStyle]
    """Styles of others, which handle DTensors and collectives themselves."""

    unmatched: list[str]
    """Patterns for which there is nothing."""

    @property
    def styles(self) -> dict[nn.Module, Style]:
        return {entry.module: entry.style for entry in self.entries.values() if entry.parameter is None}


# ---------------------------------------------------------------------- plan


def _match(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> _Model:
    """Find what the entries of a plan stand for in ``model``; a later entry wins over an earlier one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    result = _Model(module=model, entries={}, foreign={}, unmatched=[])
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        names = [name for name in {**modules, **parameters} if expression.fullmatch(name)]
        if not names:
            result.unmatched.append(pattern)
        for name in names:
            if not isinstance(style, Style):
                result.foreign[name] = style
            elif name in modules:
                for suffix, module in _unwrap(modules[name]):
                    adapted = _adapt_to_embedding(style, module)
                    result.entries[name + suffix] = _Entry(module=module, parameter=None, style=adapted)
            else:
                owner, _, attribute = name.rpartition(".")
                result.entries[name] = _Entry(module=modules[owner], parameter=attribute, style=style)
    return result


def _unwrap(module: Any) -> list[tuple[str, nn.Module]]:
    """A module, or those that peft's ``modules_to_save`` keeps in its place, with the ends of their names."""
    if not (hasattr(module, "original_module") and hasattr(module, "modules_to_save")):
        return [("", module)]
    saved = [(f".modules_to_save.{name}", copy) for name, copy in module.modules_to_save.items()]
    return [(".original_module", module.original_module), *saved]


def _adapt_to_embedding(style: Style, module: nn.Module) -> Style:
    """Torch's styles for linear layers mean something else for an embedding, whose result is always whole here."""
    if isinstance(module, nn.Embedding):
        if style == RowWise(split_input=True):
            return VocabularyEmbedding()
        if style == ColumnWise(gather_output=True):
            return FeatureEmbedding()
    return style


def _get_layouts(model: _Model, ranks: int) -> dict[Slot, Layout]:
    layouts: dict[Slot, Layout] = {}
    # what is said of a parameter wins over what is said of its module
    for name, entry in sorted(model.entries.items(), key=lambda item: item[1].parameter is not None):
        try:
            if entry.parameter is None:
                layouts |= entry.style.get_layouts(entry.module, ranks)
            else:
                parameter = entry.module.get_parameter(entry.parameter)
                layouts[entry.module, entry.parameter] = entry.style.get_parameter_layout(parameter)
        except TypeError as error:
            raise TypeError(f"tp_plan: {type(entry.style).__name__} does not fit {name}: {error}") from None
    return layouts


def _agree_on_tied(models: list[_Model], layouts: dict[Slot, Layout]) -> None:
    """Keep a parameter that several modules hold whole on every rank, where they would shard it differently."""
    holders: dict[nn.Parameter, list[Slot]] = {}
    for module, name in layouts:
        holders.setdefault(module.get_parameter(name), []).append((module, name))
    for slots in holders.values():
        if len({layouts[slot].placement for slot in slots}) > 1:
            tied = {module for module, _ in slots}
            for model in models:
                model.entries = {name: entry for name, entry in model.entries.items() if entry.module not in tied}
            layouts.update(dict.fromkeys(get_slots(tied), Layout()))


def _shard_loss(model: _Model, mesh: DeviceMesh) -> None:
    name = _get_optional_head(model)
    if name is not None:
        model.entries[name] = replace(model.entries[name], style=VocabularyHead(mesh=mesh))
        model.module.loss_function = causal_lm_loss  # type: ignore[assignment]


def _get_optional_head(model: _Model) -> str | None:
    """The name of the head if its outputs are sharded."""
    _, head = get_embedding_and_head(model.module)
    names = [name for name, entry in model.entries.items() if entry.module is head and entry.parameter is None]
    return next((name for name in names if isinstance(model.entries[name].style, ColumnWise)), None)


# ---------------------------------------------------------------------- installation


def _install(model: _Model, layouts: dict[Slot, Layout], mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Install the styles of a model, and say in ``layouts`` what follows from them."""
    styles = model.styles
    stacks = _get_stacks(model)
    names = {module: name for name, module in model.module.named_modules()}
    for layers in stacks:
        if sequence_parallel:
            _install_stack(model, layers, styles, layouts, mesh)
        else:
            for layer in layers:
                _install_layer(layer, styles, layouts, names, mesh)
    inside = {module for layers in stacks for layer in layers for module in layer.modules()}
    for module, style in styles.items():
        if module not in inside:
            style.install(module, Scope(mesh.get_group()))


def _get_stacks(model: _Model) -> list[list[nn.Module]]:
    """The lists of layers in which anything is sharded."""
    styled = {entry.module for entry in model.entries.values()}
    lists = get_layer_lists(model.module)
    return [layers for layers in lists if any(module in styled for layer in layers for module in layer.modules())]


def _install_layer(
    layer: nn.Module,
    styles: dict[nn.Module, Style],
    layouts: dict[Slot, Layout],
    names: dict[nn.Module, str],
    mesh: DeviceMesh,
) -> None:
    scope = LayerScope(mesh.get_group(), _get_random(layer, mesh))
    for module in _iterate_own(layer, styles, layouts):
        if module in styles:
            styles[module].install(module, scope)
        else:
            refuse_own_parts(module, scope, names[module])
    wrap_method(layer, scope.run)


def _iterate_own(top: nn.Module, styles: dict[nn.Module, Style], layouts: dict[Slot, Layout]) -> Iterator[nn.Module]:
    """The modules in ``top`` that have a style, or parameters of which no entry of the plan says anything."""
    covered: set[nn.Module] = set()
    for module in top.modules():
        if module in styles and styles[module].is_boundary:
            covered.update(inner for inner in module.modules() if inner is not module)
        slots = get_slots([module])
        is_unnamed = module is not top and module not in covered and all(layouts[slot] == Layout() for slot in slots)
        if module in styles or (slots and is_unnamed):
            yield module


def _install_stack(
    model: _Model,
    layers: list[nn.Module],
    styles: dict[nn.Module, Style],
    layouts: dict[Slot, Layout],
    mesh: DeviceMesh,
) -> None:
    names = {module: name for name, module in model.module.named_modules()}
    traits = get_layer_traits(model.module)
    stack = Stack(mesh.get_group(), stream_dim=traits.sequence_dim)
    for layer in layers:
        pointwise = [getattr(layer, name, None) for name in traits.pointwise]
        random = _get_random(layer, mesh)
        shared = get_slots([layer])
        for child in _iterate_children(layer):
            if child in styles and styles[child].is_boundary:
                styles[child].install(child, PointwiseScope(stack, random))
            elif child in pointwise or _is_pointwise(child):
                shared += get_slots(child.modules())
            else:
                _install_region(child, styles, layouts, stack, random, traits, names)
        layouts.update(dict.fromkeys(shared, Layout(is_partial=True)))
        stacked = StackedLayer(
            stack,
            random,
            name=names[layer],
            is_first=layer is layers[0],
            is_last=layer is layers[-1],
            per_position=_locate_arguments(layer, traits.per_position),
        )
        wrap_method(layer, stacked.run)
    around = [module for module in model.module.modules() if is_hf_model(module) and layers[0] in set(module.modules())]
    wrap_method(around[-1] if around else model.module, stack.run_model)


def _install_region(
    region: nn.Module,
    styles: dict[nn.Module, Style],
    layouts: dict[Slot, Layout],
    stack: Stack,
    random: LayerRandom | None,
    traits: LayerTraits,
    names: dict[nn.Module, str],
) -> None:
    inside = {module: styles[module] for module in region.modules() if module in styles}
    reduces_once = _reduces_once(region, inside, layouts)
    scope = RegionScope(
        stack, random, reduces_once=reduces_once, takes_residual=traits.regions_take_residual, name=names[region]
    )
    for module in _iterate_own(region, styles, layouts):
        if module in styles:
            styles[module].install(module, scope)
        else:
            refuse_own_parts(module, scope, names[module])
            if reduces_once:
                sum_gradients_on_shards(module, scope)
    wrap_method(region, scope.run)


def _reduces_once(region: nn.Module, styles: dict[nn.Module, Style], layouts: dict[Slot, Layout]) -> bool:
    """Whether a region's result is that of one row-wise projection, and is scattered there.

    A parameter that a module around the projection holds itself may be used before it or after, on whole sequences or
    on parts, and nobody could tell which; so there the result is sliced at the region's end.
    """
    reducing = [module for module, style in styles.items() if style.reduces]
    if len(reducing) != 1 or isinstance(styles[reducing[0]], Experts):
        return False
    around = [module for module in region.modules() if module is not reducing[0] and reducing[0] in module.modules()]
    # what stands beside the module that ends with the projection (experts beside a shared one) adds to its result
    is_alone = all(sum(bool(get_slots(child.modules())) for child in outer.children()) == 1 for outer in around[:-1])
    return is_alone and all(layouts[slot] != Layout() for slot in get_slots(around))


def _locate_arguments(layer: nn.Module, names: tuple[str, ...]) -> tuple[int | str, ...]:
    """The names, and the positions at which the arguments may be given instead."""
    parameters = list(inspect.signature(layer.forward).parameters)
    return (*names, *(parameters.index(name) for name in names if name in parameters))


def _iterate_children(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that the forward of ``module`` calls: its children, and the items of containers among them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _iterate_children(child)
        else:
            yield child


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a child of a layer is taken to treat the positions of a sequence one by one: norms, and functions."""
    parameters = list(module.parameters())
    return not parameters or ("norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in parameters))


def _get_random(layer: nn.Module, mesh: DeviceMesh) -> LayerRandom | None:
    if not draws_random_numbers(layer):
        return None
    return LayerRandom(layer, mesh.get_group(), torch.device(mesh.device_type))


def _get_entrances(module: nn.Module) -> tuple[str, ...]:
    """The methods in which a module uses its own parameters."""
    return (*_STEPS, "forward") if is_lightning_module(module) else ("forward",)


# ---------------------------------------------------------------------- checks


def _check_all_matched(models: list[_Model], plan: PlanOption) -> None:
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


def _check_foreign_styles(model: _Model, sequence_parallel: bool) -> None:
    if model.foreign and sequence_parallel:
        name, style = next(iter(model.foreign.items()))
        raise ValueError(
            f"sequence_parallel=True cannot be derived from a plan with styles of its own layouts: {name} has"
            f" {style}. Use the names of styles ('colwise', 'rowwise', ...), or leave sequence_parallel False and let"
            " the plan shard the sequence."
        )


def _check_experts(model: _Model, layouts: dict[Slot, Layout]) -> None:
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


def _check_heads(model: _Model, ranks: int) -> None:
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


def _check_loss(model: _Model) -> None:
    module: Any = model.module
    if _get_optional_head(model) is None:
        raise ValueError(
            f"loss_parallel=True: {type(module).__name__} has no head whose outputs the plan shards; add it to tp_plan"
            " as 'colwise_gather_output' (and a tied embedding as 'embedding_rowwise'), or use loss_parallel=False."
        )
    if module.loss_function.__name__ != "ForCausalLMLoss":
        raise ValueError(
            f"loss_parallel=True computes the loss of causal language models, but {type(module).__name__} has"
            f" {module.loss_function.__name__}; use loss_parallel=False."
        )


def _check_layers(model: _Model) -> None:
    traits = get_layer_traits(model.module)
    if traits.refused:
        raise ValueError(
            f"sequence_parallel=True is not possible for {type(model.module).__name__}: {traits.refused}; use"
            " sequence_parallel=False."
        )
    names = {module: name for name, module in model.module.named_modules()}
    for layer in (layer for layers in _get_stacks(model) for layer in layers):
        known = {*model.styles, *(getattr(layer, name, None) for name in traits.pointwise)}
        for child in _iterate_children(layer):
            if isinstance(child, nn.Linear) and child not in known:
                raise ValueError(
                    f"sequence_parallel=True: {names[child]} is a linear layer that {type(layer).__name__} itself uses,"
                    " and whether it does so position by position (or in an attention of its own) cannot be seen. Shard"
                    " it in tp_plan, name it in LayerTraits(pointwise=...), or use sequence_parallel=False."
                )


def _check_divisible(root: nn.Module, layouts: dict[Slot, Layout], ranks: int) -> None:
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


def _warn_of_replicated(root: nn.Module, layouts: dict[Slot, Layout]) -> None:
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
