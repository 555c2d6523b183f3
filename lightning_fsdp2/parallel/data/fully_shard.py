"""FSDP2 applied to the units of a model: sharding, prefetching, and temporarily gathering a whole model."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.compat.fsdp import drop_changes_in_place, end_forward, keep_unsharded_after_forward
from lightning_fsdp2.mesh import get_shard_size
from lightning_fsdp2.modules.experts import get_optional_shard_dim
from lightning_fsdp2.modules.sharder import find_optional_call_sharder
from lightning_fsdp2.modules.structure import get_class, get_modules, get_parameter_owners
from lightning_fsdp2.parallel.data.units import Unit, UnitPlan
from lightning_fsdp2.ranks.failures import list_names
from lightning_fsdp2.ranks.pieces import get_packed_placements

logger = logging.getLogger(__name__)

_UNSHARDED_ATTRIBUTE = "_lightning_fsdp2_unsharded"


def apply_fully_shard(
    units: Iterable[Unit],
    model: nn.Module,
    *,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Shard a model unit by unit, each unit over its own mesh.

    A unit is a group of modules whose weights are gathered together.

    Args:
        units: Units with meshes, inner ones first; see :func:`~lightning_fsdp2.parallel.data.units.build_unit_plan`.
        model: Model that holds the units; changed in place.
        mp_policy: Dtypes of compute, gradient reduction and the model's output.
        offload_policy: Policy that decides where shards are stored between uses.

    Raises:
        TypeError: If a module's class cannot be combined with FSDP2's.
        ValueError: If dim 0 of a weight packs several projections, and its dim 1 is not divisible by the number of
            ranks. Also if no dim of an expert's weight is divisible by the number of ranks that shard it.
    """
    owners = get_parameter_owners(model)
    ignored = set(model.parameters()) - set(owners)  # parameters that metrics hold
    # FSDP2 shards contiguous weights only, not those of a convolution in `torch.channels_last`, for one
    rearranged = [p for p in owners if not isinstance(p, DTensor) and not p.is_contiguous()]
    if rearranged:
        logger.info(
            "%d weights become contiguous, because FSDP2 shards no others; `torch.channels_last` is lost.",
            len(rearranged),
        )
    for parameter in rearranged:
        parameter.data = parameter.data.contiguous()
    units = list(units)
    for module in (module for unit in units for module in unit.modules):
        _check_class(type(module))
    for unit in units:
        _shard_unit(unit, mp_policy, offload_policy, ignored)


def check_reshard_after_forward(
    reshard_after_forward: bool | int | None, ranks: int, sharded: str = "parameters"
) -> None:
    """Refuse a ``reshard_after_forward`` that does not divide ``ranks``, the number of ranks that hold shards.

    Args:
        reshard_after_forward: Flag of the config.
        ranks: Number of ranks that hold shards.
        sharded: Name for the sharded weights in the message, such as "experts".

    Raises:
        ValueError: If ``reshard_after_forward`` does not divide ``ranks``. The message lists the divisors of ``ranks``.
    """
    if isinstance(reshard_after_forward, int) and ranks % int(reshard_after_forward or 1):
        divisors = [str(size) for size in range(2, ranks) if ranks % size == 0]
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} does not divide the {ranks} ranks that {sharded} are"
            f" sharded over; use {', '.join([*divisors, 'True or False'])}."
        )


def apply_prefetch(plan: UnitPlan, *, forward_depth: int, backward_depth: int) -> None:
    """Make every unit start the all-gathers of the next units in its chain in advance.

    A chain is a list of units in the order in which forward runs them.

    Args:
        plan: Units and chains of a model, after :func:`apply_fully_shard`.
        forward_depth: Number of units gathered ahead in forward; 0 leaves prefetching to torch.
        backward_depth: Number of units gathered ahead in backward; 0 leaves prefetching to torch, which gathers one
            unit ahead.
    """
    for chain in plan.chains:
        for index, unit in enumerate(chain):
            module: Any = unit.modules[0]
            ahead = [m for later in chain[index + 1 : index + 1 + forward_depth] for m in later.gathered_modules]
            earlier = [u for u in chain[max(0, index - backward_depth) : index][::-1] if u.unshard_in_backward]
            behind = [m for unit in earlier for m in unit.gathered_modules]
            if ahead:
                module.set_modules_to_forward_prefetch(ahead)
            if backward_depth > 0:
                # With an empty list, torch would choose what to prefetch, perhaps an embedding that backward does not
                # need. So prefetch the root instead. This costs nothing, because the root is already gathered.
                module.set_modules_to_backward_prefetch(behind or [plan.units[-1].modules[0]])


@contextmanager
def unshard_model(model: nn.Module) -> Iterator[None]:
    """Gather all weights of ``model`` for the duration of the block, and shard them again at its end.

    Inside the block every submodule can be called and every parameter read in full, without further communication,
    on one rank or on all. Writes to the parameters are lost. All ranks must enter and leave the block. Every rank holds
    the whole model at once, in the dtype in which the model computes (bfloat16 under bf16-mixed).

    Tensor, context and expert parallelism stay active. Their ranks must call the model together, as outside the block,
    and each rank holds only its own part of the parameters that tensor or expert parallelism distributes.

    Raises:
        ValueError: If Megatron-FSDP shards the model, since it gathers weights only during a module's own calls.
        RuntimeError: If ``state_dict`` is called inside the block: a state dict is made of shards, and building it
            would shard the model again. Another RuntimeError is raised if a backward after the block needs weights
            that were gathered for the block.
    """
    if (sharder := find_optional_call_sharder(model)) is not None:
        raise ValueError(
            f"unshard_fsdp2_model: {sharder.name} gathers weights only while a module is called, so they cannot stay"
            " gathered. Call the module on all ranks, or read a parameter on all ranks with"
            " lightning_fsdp2.ranks.whole_tensors.gather(parameter)."
        )
    # skip modules that an outer `unshard_fsdp2_model` block has gathered, so that they stay gathered after this block
    marked = [module for module in model.modules() if not is_unsharded_by_user(module)]
    modules = [module for module in marked if isinstance(module, FSDPModule)]
    handles = [module.register_state_dict_pre_hook(_refuse_state_dict) for module in marked]
    with keep_unsharded_after_forward(modules):
        try:
            for module in modules:
                module.unshard()
            for inside in marked:
                inside.__dict__[_UNSHARDED_ATTRIBUTE] = True
            with _guard_saved_weights(model), drop_changes_in_place(modules) as lost:
                yield
            if lost:
                logger.warning(
                    "Changes of %s inside an `unshard_fsdp2_model` block are lost. Change parameters outside the block,"
                    " under `torch.no_grad()`.",
                    list_names(lost),
                )
        finally:
            for inside in marked:
                inside.__dict__.pop(_UNSHARDED_ATTRIBUTE, None)
            for handle in handles:
                handle.remove()
            _reshard_units(modules)


def is_unsharded_by_user(module: nn.Module) -> bool:
    """Return whether ``module`` is inside an :func:`unshard_model` block."""
    return module.__dict__.get(_UNSHARDED_ATTRIBUTE, False)


def reshard(model: nn.Module) -> None:
    """Reshard every unit of ``model`` that is still gathered after a forward without a backward.

    A gathered copy would be stale after the next optimizer step or the next load of a checkpoint, and hides the sharded
    parameter from ``named_parameters()``. If no unit is gathered, this function costs nothing. Do not call it while a
    forward is running.
    """
    _reshard_units(get_fsdp_modules(model))


def get_fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return all modules of ``model`` that ``fully_shard`` was applied to, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def _guard_saved_weights(model: nn.Module) -> Iterator[None]:
    """Make backward raise an error if it runs after the block and needs weights that were gathered for the block.

    These weights are freed at the end of the block. Without the error, backward would crash.
    """
    weights = {_get_address(parameter) for parameter in model.parameters()} - {0}
    is_over = False

    def pack(tensor: Tensor) -> Tensor | tuple[Tensor]:
        return (tensor,) if _get_address(tensor) in weights else tensor

    def unpack(saved: Tensor | tuple[Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if is_over:
            raise RuntimeError(
                "Backward needs weights that an `unshard_fsdp2_model` block gathered, but the block has ended and the"
                " weights have been freed. Inside the block, read weights under `torch.no_grad()`. If the loss depends"
                " on weights, use them in the forward of their own module. For a penalty on weights, use the"
                " optimizer's `weight_decay`, or add the gradient of the penalty to each `p.grad` in"
                " `on_before_optimizer_step`."
            )
        return saved[0]

    with saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            is_over = True


def _get_address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _refuse_state_dict(module: nn.Module, *args: Any) -> None:
    raise RuntimeError(
        f"{type(module).__name__}.state_dict() was called inside an `unshard_fsdp2_model` block. A state dict consists"
        " of shards, so building it would shard the model again. Call `state_dict()` outside the block and gather its"
        " tensors (`tensor.full_tensor()`), or read `named_parameters()` inside the block."
    )


def _reshard_units(modules: Iterable[FSDPModule]) -> None:
    for module in modules:
        end_forward(module)
        module.reshard()


class _Unregistered(FSDPModule):
    """Variant of ``FSDPModule`` whose ``__init_subclass__`` does nothing.

    :func:`_check_class` combines this variant with a user's class. Python then does not call the ``__init_subclass__``
    of the user's class.
    """

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _check_class(cls: type[nn.Module]) -> None:
    """Refuse a class that FSDP2 cannot combine with its own class, before anything is sharded.

    Raises:
        TypeError: If Python cannot combine the instance layouts of the two classes.
    """
    if issubclass(cls, FSDPModule):
        return
    try:
        # bypass any `__new__` and `__setattr__` that the user's class defines
        object.__setattr__(object.__new__(cls), "__class__", type(cls.__name__, (_Unregistered, cls), {}))
    except TypeError as error:
        bases = [base.__name__ for base in cls.__bases__]
        raise TypeError(
            f"class {cls.__name__}({', '.join(bases)}): FSDP2 changes the class of each module that it shards, which"
            f" Python does not allow here ({error}). Change the order of the bases: {bases[-1]} before {bases[0]}."
        ) from error


def _shard_unit(
    unit: Unit,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    ignored_params: set[nn.Parameter],
) -> None:
    if unit.is_container:
        mp_policy = MixedPrecisionPolicy(reduce_dtype=mp_policy.reduce_dtype, cast_forward_inputs=False)
    elif not unit.casts_output:
        mp_policy = replace(mp_policy, output_dtype=None)
    if unit.keeps_dtype:
        mp_policy = replace(mp_policy, param_dtype=None, cast_forward_inputs=False)
    if unit.is_experts:
        # do not cast the inputs: the layer around the experts has already cast the hidden states, and the routing
        # weights keep the router's dtype
        mp_policy = replace(mp_policy, cast_forward_inputs=False)
    mesh = unit.mesh
    if mesh is None:
        raise ValueError("A unit has no mesh over which to shard its weights; pass a mesh to `build_unit_plan`.")
    get_placement = _get_expert_placement if unit.is_experts else _get_placement
    attributes = _get_parameter_attributes(unit.modules)
    fully_shard(
        unit.modules if len(unit.modules) > 1 else unit.modules[0],
        mesh=mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy or OffloadPolicy(),
        ignored_params=ignored_params,
        shard_placement_fn=partial(get_placement, ranks=get_shard_size(mesh)),
    )
    if unit.reader is not None:
        unit.reader.register_forward_pre_hook(partial(_gather, unit.modules[0]))
    for module in unit.modules:
        _keep_class_name(module)
    for (module, name), values in attributes.items():
        module._parameters[name].__dict__.update(values)
    if not unit.unshard_in_backward:
        cast(FSDPModule, unit.modules[0]).set_unshard_in_backward(False)
    if unit.gradient_divisor is not None:
        _set_gradient_divisor(cast(FSDPModule, unit.modules[0]), unit.gradient_divisor, get_shard_size(mesh))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather(unit: Any, *_: Any) -> None:
    unit.unshard()


def _set_gradient_divisor(module: FSDPModule, divisor: int, ranks: int) -> None:
    """Make FSDP2 divide the sum of the ranks' gradients by ``divisor``, which need not be the number of ranks."""
    module.set_gradient_divide_factor(float(divisor))
    if ranks > 1:
        # Sum first and divide afterwards, because Gloo cannot scale in a reduction, and NCCL's scaled reduction is
        # wrong in bfloat16 up to torch 2.13 (pytorch#190747). Do not set this flag on a single rank: there is no
        # reduction, and torch would divide twice.
        module.set_force_sum_reduction_for_comms(True)


def _keep_class_name(module: nn.Module) -> None:
    """Restore the class name that the user chose, so that messages and model summaries do not show ``FSDP...``."""
    cls, own = type(module), get_class(module)
    cls.__name__, cls.__qualname__ = own.__name__, own.__qualname__


def _get_placement(parameter: nn.Parameter, *, ranks: int) -> Shard | None:
    """Return the placement with which FSDP2 shards ``parameter``.

    The result is ``Shard(1)`` if dim 0 is packed. Otherwise it is None, and FSDP2 shards dim 0. A dim is packed if it
    concatenates several projections. A tensor parallel shard then holds a part of each projection, and DTensor cannot
    shard such parts further along the same dim.
    """
    packed = get_packed_placements(parameter) if isinstance(parameter, DTensor) else {}
    if not any(placement.dim == 0 for placement in packed.values()):
        return None
    if parameter.size(1) % ranks:
        raise ValueError(
            f"A weight of shape {tuple(parameter.shape)} packs several projections along dim 0, so dim 1 is sharded"
            f" instead. Its size {parameter.size(1)} is not divisible by the {ranks} data parallel ranks. Use a number"
            " of ranks that divides it, or more replicas (dp_replicate_size)."
        )
    return Shard(1)


def _get_expert_placement(parameter: nn.Parameter, *, ranks: int) -> Shard:
    """Return the dim along which FSDP2 shards this rank's experts."""
    sizes = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    # the result is never None: `check_experts` has checked that some dim is divisible by `ranks`
    return Shard(cast(int, get_optional_shard_dim(sizes, ranks)))


def _get_parameter_attributes(modules: list[nn.Module]) -> dict[tuple[nn.Module, str], dict[str, Any]]:
    """Return the attributes that users set on parameters, such as ``_no_weight_decay``; sharding would drop them."""
    return {
        (module, name): dict(parameter.__dict__)
        for top in modules
        for module in get_modules(top)
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor) and parameter.__dict__
    }
