"""Trace of a model's forward, which finds out what can be divided into pipeline stages.

A copy of the model without weights runs once on two tokens. The trace shows which modules run before and after the
layers, whatever their names are. It also shows every way into a layer: the hidden states that a layer gets are cut from
their history, and all weights require gradients, so a layer's output must depend on nothing but these hidden states and
the layer's own weights. A stage could not compute any other model, because only hidden states pass between stages.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fsdp2.compat.torch import tree_leaves
from lightning_fsdp2.compat.transformers import assume_unpacked_sequences, use_plain_functions
from lightning_fsdp2.modules.structure import ModelParts, get_class_name
from lightning_fsdp2.modules.stubs import LayerCall, build_skeleton, copy_structure

_WRITABLE = (Tensor, MutableMapping, MutableSequence)


class Phase(Enum):
    """Time at which a module runs, relative to the layers."""

    BEFORE = "before the first layer"
    BETWEEN = "between two layers"
    AFTER = "after the last layer"


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Facts about a model that one forward shows."""

    calls: list[LayerCall]
    """How the model calls each layer."""

    phases: dict[str, set[Phase]]
    """When the modules outside the layers run, by name. Only modules that directly own parameters are listed.

    A module that never runs, such as the original of a head that peft trains a copy of, has the phases of the modules
    beside it. It has none if there are no such modules, as in a vision model.
    """


def find_text_layers(parts: ModelParts) -> list[nn.Module]:
    """Return the longest list of layers of a model's text model.

    Raises:
        ValueError: If the model has no list of layers outside its towers.
    """
    lists = [layers for layers in parts.layer_lists if parts.towers.isdisjoint(layers)]
    if not lists:
        raise make_refusal(parts.module, "its text model has no list of layers")
    return max(lists, key=len)


def trace_model(model: nn.Module, layers: Sequence[nn.Module]) -> Trace:
    """Run a copy of ``model`` once, and check that ``layers`` can be divided into stages.

    The model itself is not changed. The copy is on the meta device. If the model's code reads values, the copy is on
    the CPU instead, and has zeros that take no memory.

    Args:
        model: A Hugging Face model, on any device, neither sharded nor changed by tensor parallelism.
        layers: Result of :func:`find_text_layers`.

    Raises:
        ValueError: If a stage could not compute its layers from the hidden states of the previous stage alone, or if
            the forward fails.
    """
    names = {module: name for name, module in model.named_modules()}
    paths = [names[layer] for layer in layers]
    try:
        # in bfloat16, because grouped matrix products of experts take no other dtype on the meta device
        recorder = _run(build_skeleton(model, torch.bfloat16), paths)
    except Exception:  # any error is possible, because meta tensors have no values
        try:
            recorder = _run(copy_structure(model, _make_zeros), paths)
        except Exception as error:
            raise make_refusal(model, f"its forward on two tokens could not be traced ({error})") from error
    if (reason := recorder.find_obstacle()) is not None:
        raise make_refusal(model, reason)
    return Trace(calls=recorder.get_calls(), phases=recorder.get_phases())


def make_refusal(model: nn.Module, reason: str) -> ValueError:
    """Build the error for a model that cannot be divided into stages."""
    return ValueError(
        f"{get_class_name(model)} cannot be divided into pipeline stages: {reason}. Use pp_size=1, and shard the model"
        " with dp_size, tp_size or cp_size instead."
    )


@dataclass(eq=False, kw_only=True)
class _Visit:
    """One call of a layer."""

    index: int

    argument: int | str | None
    """Position or keyword of the hidden states. None if no argument is a tensor that depends on weights."""

    hidden: Tensor | None
    """The hidden states, cut from their history."""

    others: list[int | str]
    """Positions and keywords of other arguments that depend on weights."""

    is_passed_on: bool
    """Whether the hidden states are exactly what the previous layer returned."""

    arguments: dict[int | str, Any]
    """All arguments, by position or keyword."""

    states: dict[int | str, Any]
    """States of the arguments that a layer could write to, before the call."""

    written: list[int | str] = field(default_factory=list)
    """Positions and keywords of the arguments that the layer wrote to."""

    output: Any = None


class _Recorder:
    """Hooks that record one forward of a copy of a model.

    Args:
        model: Copy without weights. It is changed.
        paths: Names of the layers.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self._paths = paths
        self._layers = [model.get_submodule(path) for path in paths]
        self._index = {layer: index for index, layer in enumerate(self._layers)}
        self._parameters: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        inside = {module for layer in self._layers for module in layer.modules()}
        self._names = {
            module: name
            for name, module in model.named_modules()
            if module not in inside and any(parameter is not None for parameter in module._parameters.values())
        }
        self._owners: dict[Tensor, list[nn.Module]] = {}
        for module in self._names:
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter, []).append(module)
        self._phases: dict[str, set[Phase]] = {name: set() for name in self._names.values()}
        self._visits: list[_Visit] = []
        self._running: list[nn.Module] = []
        self._is_in_layer = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what runs inside the block."""
        for layer in self._layers:
            layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
            layer.register_forward_hook(self._leave_layer)
        for module in self._names:
            if self._index.keys().isdisjoint(module.modules()):  # a module around the layers runs all the time
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)
        with _Uses(self._use):
            yield

    def get_calls(self) -> list[LayerCall]:
        return [
            LayerCall(argument=visit.argument, results=len(visit.output) if isinstance(visit.output, tuple) else None)
            for visit in self._visits
            if visit.argument is not None
        ]

    def get_phases(self) -> dict[str, set[Phase]]:
        return {name: phases or self._get_phases_beside(name) for name, phases in self._phases.items()}

    def find_obstacle(self) -> str | None:
        """Return why the layers cannot be divided into stages, or None if they can."""
        checks = (
            self._check_order,
            self._check_results,
            self._check_arguments,
            self._check_written,
            self._check_between,
            self._check_histories,
        )
        return next((reason for check in checks if (reason := check()) is not None), None)

    # ------------------------------------------------------------------ hooks

    def _enter_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        weighted = [key for key, value in arguments.items() if _has_gradient(value)]
        passed_on = _get_hidden(self._visits[-1].output) if self._visits else None
        same = [key for key in weighted if arguments[key] is passed_on]
        argument = next((key for key in (*same, *weighted) if isinstance(arguments[key], Tensor)), None)
        if argument is not None:
            arguments[argument] = arguments[argument].detach().requires_grad_()
        states = {key: _get_state(value) for key, value in arguments.items() if isinstance(value, _WRITABLE)}
        self._visits.append(
            _Visit(
                index=self._index[layer],
                argument=argument,
                hidden=None if argument is None else arguments[argument],
                others=[key for key in weighted if key != argument],
                is_passed_on=bool(same) or len(self._visits) == 0,
                arguments=arguments,
                states=states,
            )
        )
        self._is_in_layer = True
        return tuple(arguments[key] for key in range(len(args))), {key: arguments[key] for key in kwargs}

    def _leave_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        visit = self._visits[-1]
        visit.output = output
        visit.written = [k for k, state in visit.states.items() if _get_state(visit.arguments[k]) != state]
        self._is_in_layer = False

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)
        self._mark(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _use(self, tensor: Tensor) -> None:
        """Note that an operation reads a weight. A module need not be called for that, as a tied embedding shows."""
        owners = self._owners.get(tensor)
        if owners is not None and not any(owner in self._running for owner in owners):
            self._mark(owners[0])

    def _mark(self, module: nn.Module) -> None:
        if self._is_in_layer:  # `_check_histories` finds what a layer uses
            return
        is_after = len(self._visits) >= len(self._layers)
        phase = Phase.AFTER if is_after else Phase.BETWEEN if self._visits else Phase.BEFORE
        self._phases[self._names[module]].add(phase)

    def _get_phases_beside(self, name: str) -> set[Phase]:
        """Return when modules of the innermost module around ``name`` run, if this module contains no layers."""
        while name := name.rpartition(".")[0]:
            inside = f"{name}."
            if any(path.startswith(inside) for path in self._paths):
                break
            if phases := set().union(*(found for other, found in self._phases.items() if other.startswith(inside))):
                return phases
        return set()

    # ------------------------------------------------------------------ checks

    def _check_order(self) -> str | None:
        order = [visit.index for visit in self._visits]
        if order == list(range(len(self._layers))):
            return None
        counts = Counter(order)
        repeated = next((index for index in range(len(self._layers)) if counts[index] != 1), None)
        if repeated is not None:
            return f"its layer {self._paths[repeated]} runs {counts[repeated]} times in one forward, not once"
        index = next(index for index, visited in enumerate(order) if visited != index)
        return f"its layers do not run in the order of their list: {self._paths[order[index]]} runs as number {index}"

    def _check_results(self) -> str | None:
        for visit, path in zip(self._visits, self._paths, strict=True):
            if not isinstance(_get_hidden(visit.output), Tensor):
                kind = type(visit.output).__name__
                return f"its layer {path} returns a {kind} that does not begin with its hidden states"
        for visit, following, path in zip(self._visits, self._visits[1:], self._paths, strict=False):
            rest = visit.output[1:] if isinstance(visit.output, tuple) else ()
            given = {id(value) for value in following.arguments.values() if value is not None}
            if any(id(value) in given for value in rest):
                return f"its layer {path} returns, besides its hidden states, a value that the next layer gets"
        return None

    def _check_arguments(self) -> str | None:
        for visit, path in zip(self._visits, self._paths, strict=True):
            if visit.argument is None:
                return f"its layer {path} gets no hidden states as an argument"
            if visit.others:
                name = self._get_argument_name(visit, visit.others[0])
                return (
                    f"its layer {path} gets, besides its hidden states, the argument {name}, which is computed from"
                    " weights of other modules, so its gradient would not reach them"
                )
        return None

    def _check_between(self) -> str | None:
        path = next((self._paths[visit.index] for visit in self._visits if not visit.is_passed_on), None)
        return path and f"the hidden states that its layer {path} gets are not what the previous layer returned"

    def _check_written(self) -> str | None:
        users = Counter(id(value) for visit in self._visits for value in visit.arguments.values())
        for visit, path in zip(self._visits, self._paths, strict=True):
            for key in visit.written:
                if users[id(visit.arguments[key])] > 1:
                    name = self._get_argument_name(visit, key)
                    return f"its layer {path} writes to the argument {name}, which other layers get too"
        return None

    def _check_histories(self) -> str | None:
        """Find a weight, or the input of another layer, on which a layer's output depends."""
        inputs: dict[Tensor | None, str] = {
            visit.hidden: path for visit, path in zip(self._visits, self._paths, strict=True)
        }
        for visit, layer, path in zip(self._visits, self._layers, self._paths, strict=True):
            allowed = {visit.hidden, *layer.parameters()}
            for leaf in _iterate_leaves(_get_hidden(visit.output)):
                if leaf not in allowed:
                    source = self._parameters.get(leaf) or f"the input of {inputs.get(leaf, 'another module')}"
                    return f"its layer {path} depends on {source} in a way other than its hidden states"
        return None

    def _get_argument_name(self, visit: _Visit, key: int | str) -> str:
        if isinstance(key, str):
            return f"`{key}`"
        names = list(inspect.signature(self._layers[visit.index].forward).parameters)
        return f"`{names[key]}`" if key < len(names) else f"number {key}"


class _Uses(TorchFunctionMode):
    """Mode that calls ``note`` with each tensor that an operation on tensors reads."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list):  # not a shape, dtype or device
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, Tensor):
                    self._note(value)
        return result


def _run(model: Any, paths: Sequence[str]) -> _Recorder:
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    device = next(model.parameters()).device
    use_plain_functions(model, attention=True, experts=device.type != "meta")
    recorder = _Recorder(model, paths)
    with torch.random.fork_rng(devices=()), torch.enable_grad(), assume_unpacked_sequences(), recorder.record():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)
    return recorder


def _make_zeros(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    # code may write to buffers, use them as indices, and divide by them
    return (
        torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        if tensor.is_meta
        else tensor.detach().to("cpu", copy=True)
    )


def _has_gradient(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


def _get_hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _get_state(value: Any) -> Any:
    """Return what changes when a tensor, a mapping or a sequence is written to."""
    if isinstance(value, Tensor):
        return value._version
    items = value.items() if isinstance(value, MutableMapping) else enumerate(value)
    return {key: id(item) for key, item in items}


def _iterate_leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the autograd graph of ``tensor``."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [parent for parent, _ in node.next_functions]
