"""Convert optimizer states between parameter numbers and the names in checkpoints, and check optimizers."""

import warnings
from collections.abc import Mapping, Sequence, Set
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.stages import list_names_elsewhere, unite_groups
from lightning_fsdp2.checkpoint.stored_shards import is_unusual
from lightning_fsdp2.compat.torch import get_shard, tree_leaves, tree_map_only
from lightning_fsdp2.compat.torch_simulation import FakeTensor
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.ranks.coordination import gather_objects, get_rank
from lightning_fsdp2.ranks.failures import list_names
from lightning_fsdp2.ranks.pieces import is_uneven
from lightning_fsdp2.ranks.whole_tensors import gather, reshard_like

_NO_OPTIONS = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys of a parameter group that are not options of its optimizer. Most belong to torch's schedulers."""

_IMPLEMENTATIONS = {"foreach", "fused"}
"""Options that select the implementation of a torch optimizer's step, but do not change its result."""


def get_optimizer_state(
    model: nn.Module, optimizer: Optimizer, own_state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return an optimizer's state with parameter names instead of numbers. Sharded tensors stay sharded.

    The layout is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``. Unlike torch's function,
    this function does not run an optimizer step to create missing states.

    Args:
        model: Model whose parameter names are used.
        optimizer: Optimizer of parameters of ``model``.
        own_state: Result of ``optimizer.state_dict()``. If it is None, this function calls that method.

    Raises:
        ValueError: When the optimizer holds parameters that ``model`` does not have, or keeps states in tensor
            subclasses other than DTensor.
    """
    names = _names_by_number(model, optimizer)
    check_optimizer_states(model, optimizer)
    # if `configure_optimizers` returns None, Lightning uses a mock optimizer, whose state dict lacks these two keys
    own_state = {"state": {}, "param_groups": [], **(optimizer.state_dict() if own_state is None else own_state)}
    # convert numpy numbers, which a schedule may set, because they could not be loaded with weights_only=True
    state: dict[str, Any] = tree_map_only(np.generic, lambda number: number.item(), own_state)
    groups = _name_groups(model, names, state["param_groups"])
    # some optimizers have entries that do not belong to a parameter: these entries keep their keys
    values = {names.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}


def set_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], weights: Mapping[str, Any] | None = None
) -> None:
    """Load a state from :func:`get_optimizer_state` or ``optimizer.state_dict()`` into ``optimizer``.

    If the state has parameter names, the optimizer may have its parameters in a different order. Whole tensors are
    sharded like their parameters. The options ``foreach`` and ``fused`` are not loaded, since the state may have been
    saved on a different kind of device.

    Args:
        model: Model whose parameter names are used.
        optimizer: Optimizer of parameters of ``model``.
        state: State to load.
        weights: Weights that were saved with the state. If a weight has a different shape than the parameter of its
            name, ``optimizer`` keeps no state for this parameter, as before its first step.

    Raises:
        ValueError: When the state has different parameters or parameter groups, or comes from a different kind of
            optimizer.
    """
    names = _names_by_number(model, optimizer)
    parameters = dict(model.named_parameters())
    elsewhere = list_names_elsewhere(model)
    current = _number_groups(optimizer)
    named = _name_groups(model, names, current)
    state = _name_parameters(state, named, parameters.keys() | elsewhere)
    saved = state["param_groups"]
    _check_groups(optimizer, named, saved)
    _warn_of_other_options(optimizer, named, saved)
    # leave out the saved `param_names`, because this run's optimizer may list its parameters in a different order
    hyper_parameters = [{key: value for key, value in group.items() if key != "param_names"} for group in saved]
    groups = [
        {**own, "params": group["params"], **{key: group[key] for key in _IMPLEMENTATIONS & group.keys()}}
        for group, own in zip(current, hyper_parameters, strict=True)
    ]
    saved_state = dict(state.get("state", {}))
    for name in find_misfits(parameters, weights or {}):
        saved_state.pop(name, None)
    own_state = {number: saved_state.pop(name) for number, name in names.items() if name in saved_state}
    flat = {(number, key): value for number, entry in own_state.items() for key, value in entry.items()}
    sharded = shard_all_like(flat, {path: parameters[names[path[0]]] for path in flat})
    values: dict[Any, Any] = {
        number: {key: sharded[number, key] for key in entry} for number, entry in own_state.items()
    }
    values |= {key: value for key, value in saved_state.items() if key not in parameters and key not in elsewhere}
    optimizer.load_state_dict({**state, "state": values, "param_groups": groups})


def find_misfits(own: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors in ``values`` whose shape differs from that of the same name in ``own``."""
    return [
        name
        for name, value in values.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and value.shape != own[name].shape
    ]


def _name_groups(model: nn.Module, names: Mapping[int, str], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups with the names of their parameters in all pipeline stages instead of numbers."""
    united = unite_groups(model, [[names[number] for number in group["params"]] for group in groups])
    if get_optional_stages(model) is not None:
        # the optimizer has names for the parameters of this stage only
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    return [{**group, "params": params} for group, params in zip(groups, united, strict=True)]


def _number_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups with numbers in place of parameters, as in ``Optimizer.state_dict``.

    The method ``state_dict`` itself is not called, since ``ZeroRedundancyOptimizer`` supports it on one rank only.
    """
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


def number_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Return the result of :func:`get_optimizer_state` with parameter numbers instead of names, for a single file."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        numbers.update({name: len(numbers) + index for index, name in enumerate(group["params"])})
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    values = {numbers.get(name, name): value for name, value in state.get("state", {}).items()}
    return {**state, "state": values, "param_groups": groups}


def shard_all_like(values: Mapping[Any, Any], own: Mapping[Any, Any]) -> dict[Any, Any]:
    """Shard each value like the tensor with the same key in ``own``, as :func:`shard_like` does.

    A value whose key has no tensor in ``own`` is returned unchanged. Every rank must call this function.

    A value may have been read under another name and renamed later. If its shards are uneven, they may then hold
    different rows than the shards of the tensor in ``own``, even if mesh and placements are equal. Such a value is
    gathered before it is sharded again.
    """
    uneven = [key for key, value in values.items() if is_uneven(value) and is_uneven(own.get(key))]
    rows = [(values[key].to_local().size(0), own[key].to_local().size(0)) for key in uneven]
    everywhere = gather_objects(rows) if uneven else []
    moved = {
        key for key, *pairs in zip(uneven, *everywhere, strict=True) if any(theirs != ours for theirs, ours in pairs)
    }
    return {key: shard_like(gather(value) if key in moved else value, own.get(key)) for key, value in values.items()}


def shard_like(value: Any, own: Any) -> Any:
    """Return ``value`` sharded like the tensor ``own``. ``value`` may be whole, or sharded in another way."""
    if not (isinstance(own, Tensor) and isinstance(value, Tensor) and value.shape == own.shape):
        return value
    if not isinstance(own, DTensor):
        return gather(value)
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) == (own.device_mesh, own.placements):
            return value
        value = gather(value)
    # every rank has the whole tensor and keeps only its own shard
    if is_unusual(own):
        return reshard_like(value, own)
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def check_optimizer_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that was built from parameters the model no longer has.

    Raises:
        ValueError: When the optimizer has such parameters. Its steps would not change the model.
    """
    current = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stale = sum(id(parameter) not in current for parameter in parameters)
    if stale:
        raise ValueError(
            f"{stale} of the {len(parameters)} parameters of {type(optimizer).__name__} are not parameters of the"
            " sharded module: the optimizer was built before the module was sharded, or for another module. Build the"
            " optimizer in `configure_optimizers` from `self.parameters()`."
        )


def check_optimizer_states(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps states in tensor subclasses other than DTensor, such as quantised tensors.

    A checkpoint could not restore such states, and a resumed run would continue with wrong values.

    Raises:
        ValueError: When a state, or the local tensor of a DTensor state, is an instance of such a tensor subclass.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if kind := next(filter(None, map(_get_optional_foreign_class, tree_leaves(value))), None):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} of {names.get(id(parameter), 'a parameter')} as"
                    f" {kind.__module__}.{kind.__qualname__}: optimizer states in such a tensor subclass are not"
                    " supported, since a resumed run would continue with wrong values. Use an optimizer whose states"
                    " are plain tensors, such as torch.optim.AdamW."
                )


def _get_optional_foreign_class(value: Any) -> type[Tensor] | None:
    if isinstance(value, DTensor):
        value = get_shard(value)
    is_foreign = isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter, FakeTensor)
    return type(value) if is_foreign else None


def _name_parameters(state: dict[str, Any], current: list[dict[str, Any]], known: Set[str]) -> dict[str, Any]:
    """Replace parameter numbers in a single file's optimizer state with names.

    The names come from the file if it has usable ones, and otherwise from the model.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers):
        return state
    ordered = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    # Use the file's names only if the module has parameters with these names. Names that come from
    # `module.submodule.named_parameters()` lack the prefix of the submodule, so the module has no such parameters.
    if len(ordered) != len(numbers) or not known >= set(ordered):
        ordered = [name for group in current for name in group["params"]]
    by_number = dict(zip(numbers, ordered, strict=False))
    groups = [
        {**group, "params": [by_number.get(number, number) for number in group["params"]]}
        for group in state["param_groups"]
    ]
    values = {by_number.get(number, number): value for number, value in state.get("state", {}).items()}
    return {**state, "state": values, "param_groups": groups}


def _check_groups(optimizer: Optimizer, current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if [len(group["params"]) for group in current] != [len(group["params"]) for group in saved] or any(
        set(group["params"]) != set(other["params"]) for group, other in zip(current, saved, strict=True)
    ):
        raise ValueError(
            f"The parameter groups of {type(optimizer).__name__} are not those of the checkpoint: their number, sizes"
            f" or parameters differ ({_sizes(saved)} parameters in the checkpoint, {_sizes(current)} in this run)."
            " Resume with the optimizer of the checkpoint, or load only the weights."
        )
    for group, other in zip(current, saved, strict=True):
        # The options of an optimizer vary with the version of torch. So raise an error only if the checkpoint and this
        # run each have options that the other lacks.
        unknown = other.keys() - group.keys() - _NO_OPTIONS
        missing = optimizer.defaults.keys() - other.keys()
        if unknown and missing:
            raise ValueError(
                f"The checkpoint holds the state of a different optimizer than {type(optimizer).__name__}: the saved"
                f" state has {list_names(unknown)}, but {type(optimizer).__name__} has {list_names(missing)}. Resume"
                " with the optimizer of the checkpoint, or load only the weights."
            )


def _warn_of_other_options(optimizer: Optimizer, current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Warn on rank 0 if the checkpoint's options replace other options with which this run has built ``optimizer``.

    An optimizer that has made steps goes back to an earlier state, as after Lightning's search for a learning rate, and
    its options have changed since it was built.
    """
    if optimizer.state:
        return
    differences: dict[str, tuple[Any, Any]] = {}
    for group, other in zip(current, saved, strict=True):
        own, loaded = _get_options(group), _get_options(other)
        differences |= {key: (loaded[key], own[key]) for key in own.keys() & loaded.keys() if own[key] != loaded[key]}
    if differences and get_rank() == 0:
        theirs, ours = (list_names([f"{key}={pair[index]}" for key, pair in differences.items()]) for index in (0, 1))
        warnings.warn(
            f"{type(optimizer).__name__} goes on with {theirs} of the checkpoint, not with {ours} of this run. To train"
            " on with other options, export the checkpoint and start a new run from the exported weights (`pretrained`"
            " of CausalLM), or set the options in `optimizer.param_groups` in `on_train_start` (learning rates of a"
            " schedule: in its `base_lrs`, which it uses from the second step on).",
            stacklevel=5,
        )


def _get_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options with which a parameter group was built, without those that schedules and callbacks change.

    A learning rate is among them only if a schedule has kept the rate that the group was built with.
    """
    changed = {"betas", "momentum"} if "max_momentum" in group else set()
    options = {key: value for key, value in group.items() if key not in _NO_OPTIONS | _IMPLEMENTATIONS | changed}
    options.pop("lr", None)
    if "initial_lr" in group:
        options["lr"] = float(group["initial_lr"])
    options = tree_map_only(Tensor, lambda tensor: tensor.tolist(), options)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _names_by_number(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Return the name of each parameter by its number in ``Optimizer.state_dict``."""
    check_optimizer_parameters(model, optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: names[id(parameter)] for number, parameter in enumerate(parameters)}


def _sizes(groups: list[dict[str, Any]]) -> str:
    return " + ".join(str(len(group["params"])) for group in groups)
