"""The units of a model: the modules of each unit, the order of units, and whether they stay gathered after forward.

A *unit* is a group of modules that are passed to one call of ``torch.distributed.fsdp.fully_shard``. Its parameters are
communicated in one all-gather, and its gradients in one reduce-scatter.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.mesh import get_shard_size
from lightning_fsdp2.modules.experts import get_optional_expert_mesh, get_shared_modules
from lightning_fsdp2.modules.structure import (
    ModelParts,
    ModelStructure,
    get_float32_tensors,
    get_layer_lists,
    get_modules,
    get_parameter_names,
    get_parameter_owners,
    has_forward,
    is_hf_model,
    is_lightning_module,
    is_metric,
)
from lightning_fsdp2.parallel.data.checks import check_no_hooks, check_shardable


@dataclass(kw_only=True, eq=False)
class Unit:
    """The modules of one ``fully_shard`` call, and the options of that call."""

    modules: list[nn.Module]
    """Modules in the order in which forward runs them."""

    mesh: DeviceMesh | None = None
    """Mesh that the weights are sharded over: 1-D (shard) or 2-D (replicate x shard). Units may have different meshes.
    None in a plan that is not applied."""

    reshard_after_forward: bool | int = True
    """Whether the weights are resharded after forward.

    False keeps them gathered for backward; an int reshards to that many ranks.
    """

    casts_output: bool = False
    """Whether ``MixedPrecisionPolicy.output_dtype`` applies. Only whole models cast their output; blocks do not."""

    is_container: bool = False
    """Whether this unit is the LightningModule itself, which computes in its own dtype and does not cast the batch."""

    keeps_dtype: bool = False
    """Whether the unit computes in the dtype of its weights, and not in ``MixedPrecisionPolicy.param_dtype``.

    This is so for weights that a Hugging Face class keeps in float32 while other weights are in bfloat16.
    """

    reader: nn.Module | None = None
    """Module around this unit that also gathers the weights when it runs.

    It may read the weights without calling the unit's module, as the layers do that hand the weights of a convolution
    to a fused kernel.
    """

    unshard_in_backward: bool = True
    """Whether backward gathers the weights. False for an untied embedding, whose gradient does not need them."""

    gradient_divisor: int | None = None
    """Number by which the sum of the ranks' gradients is divided. None for the number of ranks of the mesh, which gives
    their mean. Experts under expert parallelism need another one, since their mesh does not have all data ranks."""

    inner: list["Unit"] = field(default_factory=list)
    """Units for experts inside this unit's modules, and for modules that they share, if there is expert parallelism."""

    @property
    def is_experts(self) -> bool:
        """Whether this is a unit of experts under expert parallelism."""
        return self.gradient_divisor is not None

    @property
    def gathered_modules(self) -> list[nn.Module]:
        """The modules to prefetch for this unit: the first module of this unit and of each unit in ``inner``.

        All modules of a unit are gathered together, so prefetching the first one is enough.
        """
        return [unit.modules[0] for unit in (self, *self.inner)]


@dataclass(kw_only=True)
class UnitPlan:
    """All units of a model, inner units before the units around them, and the model's chains of units.

    A chain lists units in the order in which forward runs them, so that each unit can prefetch the weights of the next.
    """

    units: list[Unit]
    chains: list[list[Unit]]


def build_unit_plan(
    structure: ModelStructure,
    reshard_after_forward: bool | int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> UnitPlan:
    """Decide how to group a model's modules into units, without changing the model.

    A unit is a group of modules that one call of ``fully_shard`` shards together.

    Args:
        structure: Structure of a LightningModule, a Hugging Face model or any other module.
        reshard_after_forward: None reshards all blocks except the last block of each list; this block and the head stay
            gathered for backward. True reshards them too. False keeps every block gathered. An int reshards blocks to
            that many ranks.
        mesh: Mesh of every unit; see :attr:`Unit.mesh`.
        expert_mesh: Mesh to use instead for the units of experts, if the model has expert parallelism.

    Raises:
        ValueError: If parameters are tied, or have mixed dtypes, in a way that no grouping of modules can handle.
    """
    model, layer_lists = structure.root, structure.layer_lists
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"A {type(model).__name__} has no forward, so its weights would never be gathered; put it into a module"
            " that has a forward, and pass that module."
        )
    check_shardable(model, "FSDP2")
    check_no_hooks(model, remedy="Register hooks after sharding, such as in `configure_optimizers`, or change")
    owners = get_parameter_owners(model)
    _check_layers_own_their_parameters(model, layer_lists, owners)
    layers = [_build_layer_units(blocks, reshard_after_forward) for blocks in layer_lists]
    taken = {module for blocks in layer_lists for block in blocks for module in get_modules(block)}
    units = [unit for units_of_list in layers for unit in units_of_list]
    chains = list(layers)
    for parts in structure.models:
        embedding, head = _build_end_units(parts, taken, owners, reshard_after_forward)
        ends = [unit for unit in (embedding, head) if unit is not None]
        units.extend(ends)
        taken.update(module for unit in ends for top in unit.modules for module in get_modules(top))
        _extend_chain(chains, parts.module, embedding, head)
    units.extend(_build_child_units(structure, taken, owners, reshard_after_forward))
    units.append(_build_root_unit(model))
    units = _set_mesh(_split_by_dtype(structure, units), mesh)
    if mesh is not None and expert_mesh is not None:
        units = _add_expert_units(units, mesh, expert_mesh)
    return UnitPlan(units=units, chains=[chain for chain in chains if len(chain) > 1])


def build_layer_units(structure: ModelStructure, *, mesh: DeviceMesh) -> list[Unit]:
    """Build units for only the blocks of a model. All units are on ``mesh``.

    Raises:
        ValueError: See :func:`build_unit_plan`.
    """
    model, layer_lists = structure.root, structure.layer_lists
    _check_layers_own_their_parameters(model, layer_lists, get_parameter_owners(model))
    units = [unit for blocks in layer_lists for unit in _build_layer_units(blocks, None)]
    return _set_mesh(_split_by_dtype(structure, units), mesh)


def _set_mesh(units: list[Unit], mesh: DeviceMesh | None) -> list[Unit]:
    for unit in units:
        unit.mesh = mesh
    return units


def _add_expert_units(units: list[Unit], mesh: DeviceMesh, expert_mesh: DeviceMesh) -> list[Unit]:
    """Insert, before each unit, units for the experts inside it and for the modules that these experts share.

    A module that experts share, such as a norm, is sharded over ``mesh``. Each rank applies it to the tokens of its own
    experts, so its gradient is the sum over all ranks.
    """
    ranks = get_shard_size(expert_mesh)
    result: list[Unit] = []
    for unit in units:
        # an int means resharding to fewer ranks, which is impossible on a single rank, so replace it with True
        reshard = unit.reshard_after_forward if ranks > 1 else bool(unit.reshard_after_forward)
        taken = {module for other in result for module in other.modules}
        inside = [module for top in unit.modules for module in get_modules(top) if module not in taken]
        experts = [module for module in inside if get_optional_expert_mesh(module) is not None]
        shared = [m for m in get_shared_modules(experts) if m not in taken and _owns_parameters_directly(m)]
        unit.inner = [
            *(Unit(modules=[module], mesh=mesh, reshard_after_forward=unit.reshard_after_forward) for module in shared),
            *(
                Unit(modules=[module], mesh=expert_mesh, reshard_after_forward=reshard, gradient_divisor=mesh.size())
                for module in experts
            ),
        ]
        result += [*unit.inner, unit]
    return result


def _build_layer_units(blocks: list[nn.Module], reshard_after_forward: bool | int | None) -> list[Unit]:
    units = [
        Unit(modules=[block], reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward)
        for block in blocks
    ]
    # keep the last block gathered: backward begins with it, so after resharding it would be gathered again at once
    if reshard_after_forward is None and _is_trainable(blocks):
        units[-1].reshard_after_forward = False
    return units


def _build_end_units(
    parts: ModelParts,
    taken: set[nn.Module],
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]],
    reshard_after_forward: bool | int | None,
) -> tuple[Unit | None, Unit | None]:
    """Build a unit for the embedding and a unit for ``[norm, head]``, or one unit for all if the weights are tied."""
    ends = (parts.embedding, parts.head, parts.final_norm)
    embedding, head, norm = (module if module not in taken else None for module in ends)
    keep = reshard_after_forward is not True and _is_trainable([parts.module])
    tail = [module for module in (norm, head) if module is not None]
    if embedding is not None and head is not None and any(p in set(head.parameters()) for p in embedding.parameters()):
        tied = Unit(modules=[embedding, *tail], reshard_after_forward=not keep)
        return None, tied if _owns_all([embedding, *tail], owners) else None
    embedding_unit = head_unit = None
    if embedding is not None and _owns_all([embedding], owners):
        # backward of an embedding lookup reads no weights, but backward of a norm inside the embedding module does
        embedding_unit = Unit(modules=[embedding], unshard_in_backward=len(list(embedding.parameters())) > 1)
    if head is not None and _owns_all(tail, owners):
        head_unit = Unit(modules=tail, reshard_after_forward=not keep)
    return embedding_unit, head_unit


def _build_child_units(
    structure: ModelStructure,
    taken: set[nn.Module],
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]],
    reshard_after_forward: bool | int | None,
) -> list[Unit]:
    """Build units for the models inside the root, and for the root's children with parameters not yet in a unit."""
    model = structure.root
    if is_hf_model(model):
        return []
    tops = [parts.module for parts in structure.models]
    inside = taken | {module for top in tops for module in get_modules(top)}
    for child in (module for module in model.children() if not is_metric(module)):
        leftover = any(_owns_parameters_directly(module) for module in get_modules(child) if module not in inside)
        # a model in a LightningModule needs a unit of its own, which casts the model's inputs and outputs, even if
        # other units hold all of its parameters
        if leftover or (is_lightning_module(model) and child not in inside):
            tops += [top for top in _expand_containers(child) if top not in inside]
            inside.update(get_modules(child))
    groups = [group for group in _group_tied(tops, owners) if _owns_all(group, owners)]
    layer_lists = {parts.module: parts.layer_lists for parts in structure.models}
    return [
        _build_model_unit(
            group,
            reshard_after_forward,
            has_layers=any(layer_lists[top] if top in layer_lists else get_layer_lists(top) for top in group),
            casts_output=is_lightning_module(model),
        )
        for group in groups
    ]


def _group_tied(
    tops: list[nn.Module], owners: dict[nn.Parameter, list[tuple[nn.Module, str]]]
) -> list[list[nn.Module]]:
    """Put modules that share a parameter into one group, since a parameter can belong to only one unit."""
    top_of = {module: top for top in reversed(tops) for module in get_modules(top)}
    group_of = {top: [top] for top in tops}
    for holders in owners.values():
        tied = list(dict.fromkeys(top_of[module] for module, _ in holders if module in top_of))
        for first, other in itertools.pairwise(tied):
            if group_of[other] is not group_of[first]:
                group_of[first].extend(group_of[other])
                for top in group_of[other]:
                    group_of[top] = group_of[first]
    unique = {id(group): group for group in group_of.values()}
    return [sorted(group, key=tops.index) for group in unique.values()]


def _build_model_unit(
    modules: list[nn.Module], reshard_after_forward: bool | int | None, *, has_layers: bool, casts_output: bool
) -> Unit:
    if not isinstance(reshard_after_forward, bool):
        # This unit holds a model's weights outside its layers, such as the final norm and the head. If a module has
        # several models and this one runs last, backward begins with these weights, so keep them gathered.
        keep = has_layers and _is_trainable(modules)
        reshard_after_forward = False if keep else reshard_after_forward or True
    return Unit(modules=modules, reshard_after_forward=reshard_after_forward, casts_output=casts_output)


def _build_root_unit(model: nn.Module) -> Unit:
    is_container = is_lightning_module(model)
    return Unit(modules=[model], reshard_after_forward=False, casts_output=not is_container, is_container=is_container)


def _expand_containers(module: nn.Module) -> list[nn.Module]:
    """Return ``[module]`` if it has a forward, and otherwise the outermost modules inside it that have one.

    Weights can be gathered only in the forward of a module. If a module without a forward holds parameters directly,
    they belong to the unit of its parent, which uses them. Modules without parameters are left out.
    """
    if not has_forward(module):
        return [top for child in module.children() for top in _expand_containers(child)]
    return [module] if any(_owns_parameters_directly(inner) for inner in get_modules(module)) else []


def _extend_chain(chains: list[list[Unit]], model: nn.Module, embedding: Unit | None, head: Unit | None) -> None:
    """Put the model's embedding at the start of its chain of blocks, and its head at the end.

    A model with several chains is left alone, because the order in which forward runs them is unknown.
    """
    modules = set(get_modules(model))
    own = [index for index, chain in enumerate(chains) if chain[0].modules[0] in modules]
    if len(own) == 1:
        before = [embedding] if embedding is not None else []
        after = [head] if head is not None else []
        chains[own[0]] = [*before, *chains[own[0]], *after]


def _split_by_dtype(structure: ModelStructure, units: list[Unit]) -> list[Unit]:
    """Give modules whose dtype is not that of their unit units of their own.

    torch requires that all trainable parameters of a unit have the same dtype.

    Experts under expert parallelism are left out, because they have their own units in any case.
    """
    model = structure.root
    names, kept = get_parameter_names(model), _get_kept_owners(structure)
    experts = {module for module in get_modules(model) if get_optional_expert_mesh(module) is not None}
    _group_by_dtype(experts, names, kept)  # raises an error if the experts of a layer have several dtypes
    result: list[Unit] = []
    for unit, modules in _assign_modules(units, experts):
        by_dtype = _group_by_dtype(modules, names, kept)
        if len(by_dtype) > 1:
            result.extend(_take_out_other_dtypes(unit, by_dtype, names))
        result.append(unit)
    for unit, modules in _assign_modules(result, experts):
        unit.keeps_dtype = not kept.isdisjoint(modules)
    return result


def _assign_modules(units: list[Unit], others: set[nn.Module]) -> Iterator[tuple[Unit, list[nn.Module]]]:
    """Yield each unit with the modules whose parameters it gathers. The units are in order, inner ones first.

    ``others`` have units elsewhere.
    """
    claimed = set(others)
    for unit in units:
        modules = [module for top in unit.modules for module in get_modules(top) if module not in claimed]
        claimed.update(modules)
        yield unit, modules


def _take_out_other_dtypes(
    unit: Unit, by_dtype: dict[torch.dtype, list[nn.Module]], names: dict[nn.Parameter, str]
) -> list[Unit]:
    """Return units for the modules whose dtype is not that of the module around them, inner units first.

    ``fully_shard`` gives a module's unit all parameters below the module that have no unit yet. So the modules below a
    module of another dtype need units too. Of modules that hold parameters of one dtype alone, the outermost has the
    unit, because it may read the weights of a module inside it without calling it, as wrappers of convolutions do.

    Raises:
        ValueError: If a module without a forward has parameters of another dtype than the module around it.
    """
    own = {module: dtype for dtype, group in by_dtype.items() for module in group}
    main = max(by_dtype, key=lambda dtype: sum(p.numel() for m in by_dtype[dtype] for p in m.parameters(False)))
    if len(unit.modules) == 1:
        main = own.get(unit.modules[0], main)
    units: list[Unit] = []
    seen: set[nn.Module] = set()

    def get_dtype(module: nn.Module, around: torch.dtype) -> torch.dtype:
        if module in own or not has_forward(module):
            return own.get(module, around)
        inside = {own[inner] for inner in get_modules(module) if inner in own}
        return inside.pop() if len(inside) == 1 else around

    def visit(module: nn.Module, around: torch.dtype, reader: nn.Module | None) -> None:
        seen.add(module)
        dtype = get_dtype(module, around)
        for child in module.children():
            if child not in seen:
                visit(child, dtype, module if has_forward(module) else reader)
        if dtype != around:
            if not has_forward(module):
                parameters = [names[parameter] for parameter in module.parameters(recurse=False)]
                raise ValueError(
                    f"The parameters {', '.join(parameters)} ({dtype}) are in a {type(module).__name__}, which has no"
                    f" forward, inside a module of {around}, and FSDP2 gathers the two dtypes separately. Cast them to"
                    " one dtype, or put the parameters directly into a module that has a forward."
                )
            units.append(Unit(modules=[module], reshard_after_forward=unit.reshard_after_forward, reader=reader))

    for top in unit.modules:
        visit(top, main, None)
    unit.modules = [top for top in unit.modules if get_dtype(top, main) == main]
    return units


def _get_kept_owners(structure: ModelStructure) -> set[nn.Module]:
    """Return the modules whose parameters a Hugging Face class keeps in float32, if other weights are in bfloat16."""
    return {
        module
        for hf_model in structure.hf_models
        if any(parameter.dtype is torch.bfloat16 for parameter in hf_model.parameters())
        for module, name, tensor in get_float32_tensors(hf_model, torch.bfloat16)
        if name in module._parameters and tensor.dtype is torch.float32
    }


def _group_by_dtype(
    modules: Iterable[nn.Module], names: dict[nn.Parameter, str], kept: set[nn.Module]
) -> dict[torch.dtype, list[nn.Module]]:
    """Group modules by the dtype of their own trainable parameters, and those in ``kept`` also if they are frozen."""
    groups: dict[torch.dtype, list[nn.Module]] = {}
    for module in modules:
        trainable = [p for p in module.parameters(recurse=False) if p.requires_grad or module in kept]
        dtypes = {p.dtype for p in trainable}
        if len(dtypes) > 1:
            raise ValueError(
                "FSDP2 needs one dtype for all trainable parameters of a module, but"
                f" {', '.join(f'{names[p]} ({p.dtype})' for p in trainable)} are in one {type(module).__name__}."
                " Cast them to one dtype, or freeze the parameters of the other dtypes."
            )
        for dtype in dtypes:
            groups.setdefault(dtype, []).append(module)
    return groups


def _check_layers_own_their_parameters(
    model: nn.Module,
    layer_lists: list[list[nn.Module]],
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]],
) -> None:
    """Refuse a parameter that a block shares with modules outside the block.

    The parameter would belong to two units, which torch refuses at the first forward.
    """
    block_of = {module: block for blocks in layer_lists for block in blocks for module in get_modules(block)}
    names = {module: name for name, module in model.named_modules()}
    for holders in owners.values():
        if len({block_of.get(module) for module, _ in holders}) > 1 and any(
            module in block_of for module, _ in holders
        ):
            shared = sorted(f"{names[module]}.{attribute}" for module, attribute in holders)
            raise ValueError(
                f"The parameters {', '.join(shared)} are tied, but belong to different blocks, and FSDP2 shards each"
                " block separately. Share the module that holds the parameters instead, or tie only weights outside the"
                " blocks."
            )


def _owns_all(modules: Sequence[nn.Module], owners: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> bool:
    """Return whether ``modules`` do not share any of their parameters with other modules."""
    inside = {module for top in modules for module in get_modules(top)}
    parameters = [parameter for module in inside for parameter in module.parameters(recurse=False)]
    return all(holder in inside for parameter in parameters for holder, _ in owners[parameter])


def _owns_parameters_directly(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_trainable(modules: Iterable[nn.Module]) -> bool:
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())
