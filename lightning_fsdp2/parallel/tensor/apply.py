"""Entry point of tensor and sequence parallelism, which finds each model's plan, checks it, and shards the model."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from lightning_fsdp2.modules.experts import get_shared_modules
from lightning_fsdp2.modules.structure import (
    ModelParts,
    ModelStructure,
    find_parts,
    get_called_children,
    get_entrances,
    has_forward,
)
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.loss.cross_entropy import causal_lm_loss
from lightning_fsdp2.parallel.tensor.checks import check_layouts, check_plans, warn_of_packed, warn_of_replicated
from lightning_fsdp2.parallel.tensor.matching import MatchedModel, agree_on_tied, match_plan
from lightning_fsdp2.parallel.tensor.parameters import (
    REPLICATE,
    Layout,
    Slot,
    compute_with_local_parameters,
    get_slots,
    shard_parameters,
)
from lightning_fsdp2.parallel.tensor.plans import LayerTraits, PlanOption, get_layer_traits, get_plan, is_registered
from lightning_fsdp2.parallel.tensor.scopes import (
    EmbeddingScope,
    LayerScope,
    PointwiseScope,
    RegionScope,
    Scope,
    sum_gradients_on_shards,
)
from lightning_fsdp2.parallel.tensor.stacks import Stack, StackedLayer
from lightning_fsdp2.parallel.tensor.styles import (
    ColumnWise,
    Style,
    SummedResult,
    VocabularyHead,
)
from lightning_fsdp2.parallel.tensor.verification import LayerVerification
from lightning_fsdp2.ranks.collectives import Kind
from lightning_fsdp2.ranks.layer_random import LayerRandom, draws_random_numbers
from lightning_fsdp2.ranks.random_state import share_random_state

_STACK_ATTRIBUTE = "_lightning_fsdp2_stack"


def get_optional_stack(layers: Sequence[nn.Module]) -> Stack | None:
    """Return the sequence parallel stack of ``layers``, or None if their activations are not sharded."""
    stack: Stack | None = layers[0].__dict__.get(_STACK_ATTRIBUTE)
    return stack


def apply_tensor_parallel(
    structure: ModelStructure,
    mesh: DeviceMesh,
    *,
    plan: PlanOption = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> None:
    """Shard the Hugging Face models in a module over the tensor parallel ranks.

    All parameters of the module become DTensors on ``mesh``. Parameters that no plan shards are replicated. Gradient
    clipping and fused optimizers therefore find all parameters on the same mesh. The modules still compute with plain
    tensors.

    Args:
        structure: Structure of a module that contains Hugging Face models. If it contains none, ``plan`` must name
            submodules of the module itself. The module is changed in place.
        mesh: 1-D mesh of the tensor parallel ranks.
        plan: Plan for all models; see :func:`~lightning_fsdp2.parallel.tensor.plans.get_plan`.
        sequence_parallel: Whether to shard activations along the sequence where they would otherwise be replicated.
        loss_parallel: Whether output heads return logits with a sharded vocabulary, and models compute their loss from
            these logits without gathering them.

    Raises:
        TypeError: If a style does not fit its module.
        ValueError: If there is no plan, if an entry matches nothing, if a sharded size is not divisible by the number
            of ranks, or if a model does not support the requested options.
    """
    root = structure.root
    models = _match_plans(structure, plan)
    check_plans(models, mesh.size(), sequence_parallel=sequence_parallel)
    layouts = _get_layouts(structure, models, mesh.size())
    check_layouts(root, models, layouts, mesh.size(), sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    # all checks have passed; the code below changes the model
    for model in models:
        if model.foreign:
            parallelize_module(model.module, mesh, model.foreign)
        _shard_logits(model, mesh, loss_parallel)
    for module, name in layouts:
        parameter = module._parameters[name]
        if isinstance(parameter, DTensor):
            layouts[module, name] = Layout(placement=parameter.placements[0], foreign_shape=parameter.shape)
    installed: set[nn.Module] = set()
    for model in models:
        _install(model, layouts, mesh, sequence_parallel, installed)
        installed.update(model.module.modules())
    layers = list(dict.fromkeys(layer for m in models for layers in m.parts.layer_lists for layer in layers))
    inside = {module for layer in layers for module in layer.modules()}
    others = [module for module in structure.modules if module not in inside]
    warn_of_replicated(root, layouts)
    warn_of_packed(models)
    shard_parameters(layouts, mesh)
    _compute_layers_with_local_parameters(structure, layers, layouts, mesh)
    read = {parent: child for m in models for parent, child in _iterate_readable(m.parts, layers, layouts)}
    for module in others:
        # torch's attention also needs local parameters in its submodules: it reads the weights of its output projection
        # without calling the projection
        held = module.modules() if isinstance(module, nn.MultiheadAttention) else [module, *read.get(module, [])]
        methods = get_entrances(module)
        compute_with_local_parameters(module, layouts, mesh, modules=held, methods=methods)
    share_random_state(mesh.get_group(), torch.device(mesh.device_type))


def get_shard_shapes(
    structure: ModelStructure, ranks: int, plan: PlanOption = None
) -> dict[nn.Module, list[torch.Size]]:
    """Return the shapes of the parts of weights with which the ranks will compute, without changing the module.

    Args:
        structure: Structure of a module that tensor parallelism has not changed yet.
        ranks: Number of tensor parallel ranks.
        plan: See :func:`apply_tensor_parallel`.

    Returns:
        For each module whose ``weight`` is sharded, the shape on each rank. A module with one of torch's own styles,
        which computes with DTensors, has no shapes.
    """
    models = _match_plans(structure, plan)
    shapes: dict[nn.Module, list[torch.Size]] = {}
    for (module, name), layout in _get_layouts(structure, models, ranks).items():
        if name == "weight" and layout.placement != REPLICATE:
            whole = torch.empty_like(module.get_parameter(name), device="meta")
            shapes[module] = [layout.get_shard(whole, rank, ranks).shape for rank in range(ranks)]
    for model in models:
        for name in model.foreign:
            shapes |= {module: [] for module in model.module.get_submodule(name).modules()}
    return shapes


def _get_layouts(structure: ModelStructure, models: list[MatchedModel], ranks: int) -> dict[Slot, Layout]:
    """Return the layout of every parameter. Entries that disagree about tied parameters are removed from ``models``."""
    layouts = dict.fromkeys(get_slots(structure.modules), Layout())
    layouts |= dict.fromkeys(get_slots(get_shared_modules(structure.modules)), Layout(is_partial=True))
    for model in models:
        layouts |= model.get_layouts(ranks)
    agree_on_tied(models, layouts)
    return layouts


def _match_plans(structure: ModelStructure, plan: PlanOption) -> list[MatchedModel]:
    return [
        match_plan(parts, get_plan(parts, plan), is_given=plan not in (None, "hf") or is_registered(parts.module))
        for parts in structure.models or [find_parts(structure.root)]
    ]


def _compute_layers_with_local_parameters(
    structure: ModelStructure, layers: list[nn.Module], layouts: dict[Slot, Layout], mesh: DeviceMesh
) -> None:
    """Make layers compute with this rank's parts of their parameters.

    Modules that all experts of a layer share, such as a norm, are wrapped separately, because FSDP2 gathers their
    parameters only after the layer's forward has begun.
    """
    shared = get_shared_modules(structure.modules)
    for layer in layers:
        own = [module for module in layer.modules() if module not in shared]
        compute_with_local_parameters(layer, layouts, mesh, modules=own)
    for module in shared:
        compute_with_local_parameters(module, layouts, mesh, modules=[module])


def _iterate_readable(
    parts: ModelParts, layers: list[nn.Module], layouts: dict[Slot, Layout]
) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Find child modules, such as position embeddings, whose weights the parent may read without calling the child.

    These are children with replicated weights, which FSDP2 gathers together with the parent's weights. Layers, the
    embedding, the final norm and the head are left out, because FSDP2 gathers each of them separately. FSDP2 would also
    gather modules with a different dtype separately, so nothing is yielded for a model with several dtypes.

    Yields:
        A parent module, and the list of its children whose weights it may read.
    """
    model = parts.module
    if not parts.hf_models or len({parameter.dtype for parameter in model.parameters()}) > 1:
        return
    apart = {*layers, parts.embedding, parts.head, parts.final_norm}
    for module in model.modules():
        leaves = [child for child in module.children() if child not in apart and not any(child.children())]
        slots = {child: get_slots([child]) for child in leaves}
        whole = [child for child in leaves if slots[child] and all(layouts.get(s) == Layout() for s in slots[child])]
        if whole and has_forward(module):
            yield module, whole


def _shard_logits(model: MatchedModel, mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Make the output head return logits with a sharded vocabulary.

    With ``loss_parallel``, or if the plan asks for sharded logits, the head always does so. Otherwise, it does so only
    inside :func:`~lightning_fsdp2.parallel.loss.cross_entropy.keep_logits_sharded`.
    """
    name = model.get_optional_head()
    if name is None:
        return
    shards_logits = loss_parallel or isinstance(model.entries[name].style, VocabularyHead)
    if shards_logits or model.entries[name].style == ColumnWise(gather_output=True):
        style = VocabularyHead(mesh=mesh, shards_logits=shards_logits)
        model.entries[name] = replace(model.entries[name], style=style)
    if shards_logits:
        model.module.loss_function = causal_lm_loss  # type: ignore[assignment]


# ---------------------------------------------------------------------- installation


def _install(
    model: MatchedModel,
    layouts: dict[Slot, Layout],
    mesh: DeviceMesh,
    sequence_parallel: bool,
    installed: set[nn.Module],
) -> None:
    """Install the styles that a model's plan assigns to its modules, and update ``layouts`` for sequence parallelism.

    Modules in ``installed`` are skipped. A model that was processed earlier contains them too, so they already have
    their styles.
    """
    styles = {module: style for module, style in model.styles.items() if module not in installed}
    stacks = [layers for layers in model.get_stacks() if not installed.intersection(layers)]
    names = {module: name for name, module in model.module.named_modules()}
    with_sequences = model.get_text_stacks() if sequence_parallel else []
    sequences = []
    for layers in stacks:
        if layers in with_sequences:
            sequences.append(_install_stack(model, layers, styles, layouts, mesh))
        else:
            returns = Kind.EITHER if model.foreign else Kind.EQUAL
            for layer in layers:
                verification = LayerVerification(layer, names[layer], returns=returns, is_given=model.is_given)
                _install_layer(layer, styles, verification, mesh)
    inside = {module for layers in model.get_stacks() for layer in layers for module in layer.modules()}
    for module, style in styles.items():
        if module not in inside:
            is_taken = bool(sequences) and module is model.parts.embedding
            group = mesh.get_group()
            style.install(module, EmbeddingScope(group, sequences, module) if is_taken else Scope(group))


def _install_layer(
    layer: nn.Module, styles: dict[nn.Module, Style], verification: LayerVerification, mesh: DeviceMesh
) -> None:
    scope = LayerScope(mesh.get_group(), _get_random(layer, mesh), verification)
    for module in layer.modules():
        if module in styles:
            styles[module].install(module, scope)
    wrap_method(layer, scope.run)


def _install_stack(
    model: MatchedModel,
    layers: list[nn.Module],
    styles: dict[nn.Module, Style],
    layouts: dict[Slot, Layout],
    mesh: DeviceMesh,
) -> Stack:
    names = {module: name for name, module in model.module.named_modules()}
    traits = get_layer_traits(model.parts)
    stack = Stack(mesh.get_group(), stream_dim=traits.sequence_dim)
    for layer in layers:
        pointwise = [getattr(layer, name, None) for name in traits.pointwise]
        random = _get_random(layer, mesh)
        shared = get_slots([layer])
        for child in get_called_children(layer):
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
            LayerVerification(layer, names[layer], returns=Kind.OWN, is_given=model.is_given),
            name=names[layer],
            is_last=layer is layers[-1],
            per_position=_locate_arguments(layer, traits.per_position),
        )
        wrap_method(layer, stacked.run)
    wrap_method(layers[0], stack.run_first, "__call__")
    layers[0].__dict__[_STACK_ATTRIBUTE] = stack
    around = [hf_model for hf_model in model.parts.hf_models if layers[0] in set(hf_model.modules())]
    wrap_method(around[-1] if around else model.module, stack.run_model)
    return stack


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
    for module, style in inside.items():
        style.install(module, scope)
    if reduces_once:
        for module in _iterate_unnamed(region, styles, layouts):
            sum_gradients_on_shards(module, scope)
    wrap_method(region, scope.run)


def _iterate_unnamed(
    region: nn.Module, styles: dict[nn.Module, Style], layouts: dict[Slot, Layout]
) -> Iterator[nn.Module]:
    """Yield the modules in ``region`` that hold replicated parameters and are not covered by an entry of the plan.

    A region is a child of a layer that works on whole sequences, such as attention or MLP.
    """
    covered = {region}
    for module in region.modules():
        if module in styles and styles[module].is_boundary:
            covered.update(module.modules())
        slots = get_slots([module])
        if slots and module not in covered and module not in styles and all(layouts[s] == Layout() for s in slots):
            yield module


def _reduces_once(region: nn.Module, styles: dict[nn.Module, Style], layouts: dict[Slot, Layout]) -> bool:
    """Return whether a region's result comes from exactly one row-wise projection, which can then reduce-scatter it.

    A region is a child of a layer that works on whole sequences, such as attention or MLP. Also return False if a
    module that encloses the projection holds a replicated parameter of its own, because it is not known whether the
    module uses this parameter before the projection, on whole sequences, or after it, on parts of sequences. Whenever
    this function returns False, each rank slices its part from the region's whole result instead.
    """
    reducing = [module for module, style in styles.items() if style.reduces]
    if len(reducing) != 1 or isinstance(styles[reducing[0]], SummedResult):
        return False
    around = [module for module in region.modules() if module is not reducing[0] and reducing[0] in module.modules()]
    # Require that no module around the projection has other children with parameters. The module may add the results of
    # such children to the projection's result, as an MoE layer adds a shared expert's result to the routed experts'.
    is_alone = all(sum(bool(get_slots(child.modules())) for child in outer.children()) == 1 for outer in around[:-1])
    return is_alone and all(layouts[slot] != Layout() for slot in get_slots(around))


def _locate_arguments(layer: nn.Module, names: tuple[str, ...]) -> tuple[int | str, ...]:
    """Return the given argument names, followed by their positional indices in the layer's forward."""
    parameters = list(inspect.signature(layer.forward).parameters)
    return (*names, *(parameters.index(name) for name in names if name in parameters))


def _is_pointwise(module: nn.Module) -> bool:
    """Return whether a child of a layer is assumed to process each position of a sequence independently.

    Norms and modules without parameters are assumed to do so.
    """
    parameters = list(module.parameters())
    return not parameters or ("norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in parameters))


def _get_random(layer: nn.Module, mesh: DeviceMesh) -> LayerRandom | None:
    if not draws_random_numbers(layer):
        return None
    return LayerRandom(layer, mesh.get_group(), torch.device(mesh.device_type))
