"""Stand-ins for the modules of a model that other pipeline stages hold.

A stand-in takes the slot of the original module, so names and indices of all other modules stay the same, and the
model's own forward runs on every stage. Only the hidden states that leave one stage and enter the next are real. What a
stand-in returns has the right shape, dtype and device, but takes no memory and no time.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fsdp2.compat.torch import get_hooks, tree_leaves, tree_map_only
from lightning_fsdp2.compat.transformers import use_plain_functions
from lightning_fsdp2.modules.structure import has_forward


@dataclass(frozen=True)
class LayerCall:
    """Form of a layer's arguments and results."""

    argument: int | str
    """Position or keyword of the hidden states."""

    results: int | None
    """Length of the returned tuple, in which all entries but the first are None. None if the layer returns a tensor."""


@dataclass(eq=False)
class Passage:
    """One forward of one stage."""

    layers: range
    """Indices of the stage's layers."""

    received: Tensor | None
    """Hidden states from the previous stage. None on the first stage."""

    is_entered: bool = False
    """Whether the stage's first layer has got the received hidden states. It never does on the first stage."""

    output: Tensor | None = None
    """Hidden states after the stage's last layer. None until then, and on the last stage."""

    is_over: bool = False
    """Whether the model's forward has ended. What the step does with the model's modules after it is not part of the
    stage."""

    passed_on: Tensor | None = None
    """Hidden states that the stand-in for a layer after the stage's last one returned. None until then."""


class SequenceStack(Protocol):
    """Interface of the code that shards the hidden states between the layers of a model along the sequence."""

    def resume(self, hidden: Tensor) -> None:
        """Continue with hidden states from an earlier stage; whole hidden states have the shape of ``hidden``."""

    def pause(self, hidden: Tensor) -> Tensor:
        """Leave the hidden states sharded for a later stage, and return zeros of the shape of whole ones."""


@dataclass(eq=False)
class Relay:
    """State that all stand-ins of a model share."""

    num_ranks: int
    """Number of pipeline ranks."""

    passage: Passage | None = None
    """The forward that runs now."""

    is_in_step: bool = False
    """Whether a step runs, or another method of the root, which may prepare inputs before it calls the model."""

    missed: ValueError | None = None
    """Error for a stand-in that the step has used, unless the step calls the model after that."""

    stack: SequenceStack | None = None
    """Code that shards the hidden states along the sequence. None if they are whole."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the last input that a stand-in saw."""


class Stub(nn.Module):
    """Stand-in for a module that another stage holds. It owns no parameters and no buffers.

    Attributes are those of the original module; tensors among them are zeros that take no memory. Methods and
    submodules compute only shapes, too.

    Args:
        skeleton: Copy of the original module on the meta device.
        path: Name of the module in the model.
        stages: Stages that hold the original module.
        relay: State that all stand-ins of the model share.
    """

    def __init__(self, skeleton: nn.Module, path: str, stages: Iterable[int], relay: Relay) -> None:
        super().__init__()
        self.skeleton: nn.Module
        self.__dict__["skeleton"] = skeleton  # not in `_modules`, because it is not part of the model
        self._path, self._stages, self._relay = path, tuple(sorted(stages)), relay
        self.without_values: set[Tensor] = set()
        """Tensors of the skeleton whose originals, on other ranks, have no values yet."""
        self._runs_on_meta = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros of the shape that the original module would return.

        Raises:
            ValueError: Outside of a stage, where the zeros would be taken for results.
        """
        self._check_stage("call it")
        return self._compute_shapes(self.skeleton, args, kwargs)

    def extra_repr(self) -> str:
        return f"{type(self.skeleton).__name__} of stage {', '.join(map(str, self._stages))}"

    def __getattr__(self, name: str) -> Any:
        if "skeleton" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        value = getattr(self.skeleton, name)
        if isinstance(value, Tensor):
            self._check_stage(f"read its `{name}`")
            return _make_zeros(value, value.dtype, self._relay.device)
        if isinstance(value, nn.Module):
            return self._wrap(value, name)
        if inspect.ismethod(value) and value.__self__ is self.skeleton:
            return partial(self._call_method, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        skeleton = self.__dict__.get("skeleton")
        if isinstance(value, Tensor) or isinstance(getattr(skeleton, name, None), Tensor):
            raise self._make_error(f"cannot set its `{name}`")
        super().__setattr__(name, value)

    def _wrap(self, module: nn.Module, name: str) -> nn.Module:
        if has_forward(module):
            return Stub(module, f"{self._path}.{name}", self._stages, self._relay)
        shell = copy.copy(module)  # a container, which is iterated or indexed but not called
        shell._modules = {key: child and self._wrap(child, f"{name}.{key}") for key, child in module._modules.items()}
        return shell

    def _check_stage(self, use: str) -> None:
        """Refuse a use whose zeros would be taken for results: after the model's forward, or outside of a step."""
        passage = self._relay.passage
        if passage is not None and not passage.is_over:
            return
        error = self._make_error(f"cannot {use} outside of the model's forward")
        if passage is not None or not self._relay.is_in_step:
            raise error
        self._relay.missed = error

    def _call_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_stage(f"call its `{method.__name__}`")
        parameters = list(self.skeleton.parameters())
        versions = [parameter._version for parameter in parameters]
        result = self._compute_shapes(method, args, kwargs)
        if versions != [parameter._version for parameter in parameters]:
            raise self._make_error(f"cannot run its `{method.__name__}`, which writes to its weights")
        return result

    def _compute_shapes(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._relay.device = next((tensor.device for tensor in inputs), self._relay.device)
        own_dtype = next((p.dtype for p in self.skeleton.parameters() if p.is_floating_point()), None)
        with torch.no_grad():
            result = self._run(function, args, kwargs, own_dtype)
        dtype = self._get_dtype(inputs)

        def present(tensor: Tensor) -> Tensor:
            is_own = dtype is not None and tensor.dtype == own_dtype
            return _make_zeros(tensor, dtype if is_own else tensor.dtype, self._relay.device)

        names = {module: name for name, module in self.skeleton.named_modules() if name}
        result = tree_map_only(nn.Module, lambda module: self._wrap(module, names.get(module, "")), result)
        return tree_map_only(Tensor, present, result)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype | None) -> Any:
        """Run ``function`` on the meta device, or with zeros on the real one if it reads values of its inputs."""
        if self._runs_on_meta:
            args_on_meta, kwargs_on_meta = tree_map_only(Tensor, partial(_make_meta, dtype=dtype), (args, kwargs))
            try:
                return function(*args_on_meta, **kwargs_on_meta)
            except (NotImplementedError, RuntimeError):
                self._runs_on_meta = False
                use_plain_functions(self.skeleton, experts=True)
        tensors = chain(self.skeleton.named_parameters(), self.skeleton.named_buffers())
        zeros = {f"module.{name}": _make_zeros(t, t.dtype, self._relay.device) for name, t in tensors}
        args, kwargs = tree_map_only(Tensor, partial(_cast, dtype=dtype), (args, kwargs))
        return functional_call(_Call(self.skeleton, function), zeros, args, kwargs)

    def _get_dtype(self, inputs: list[Tensor]) -> torch.dtype | None:
        """Return the dtype in which this stage computes, or None if it is unknown."""
        passage = self._relay.passage
        if passage is not None and passage.received is not None:
            return passage.received.dtype
        return next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), None)

    def _make_error(self, problem: str) -> ValueError:
        stages = f"stage {self._stages[0]}" if len(self._stages) == 1 else f"stages {', '.join(map(str, self._stages))}"
        return ValueError(
            f"pp_size={self._relay.num_ranks}: this rank {problem}, because {self._path} is part of pipeline {stages};"
            " do this before the model is sharded, or use pp_size=1."
        )


class _Call(nn.Module):
    """Call of a function that uses the weights of ``module``."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class LayerStub(Stub):
    """Stand-in for a layer. It returns the hidden states that it is given.

    The one after a stage's last layer notes the hidden states in the :class:`Passage`.

    Some models add features of images to the hidden states after a layer. Only the first stage computes such features,
    so the stand-ins for layers of later stages raise an error if the hidden states change between them.

    Args:
        skeleton: See :class:`Stub`.
        path: See :class:`Stub`.
        stages: See :class:`Stub`.
        relay: See :class:`Stub`.
        index: Index of the layer in the model.
        call: How the model calls the layer.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        path: str,
        stages: Iterable[int],
        relay: Relay,
        *,
        index: int,
        call: LayerCall,
    ) -> None:
        super().__init__(skeleton, path, stages, relay)
        self._index, self._call = index, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states, in the form in which the original layer returns them."""
        call, passage = self._call, self._relay.passage
        hidden = kwargs[call.argument] if isinstance(call.argument, str) else args[call.argument]
        if passage is not None and self._index == passage.layers.stop:
            passage.output = hidden
            if self._relay.stack is not None:
                hidden = self._relay.stack.pause(hidden)
            passage.passed_on = hidden
        elif passage is not None and self._index > passage.layers.stop and hidden is not passage.passed_on:
            raise ValueError(
                f"The model changes the hidden states between its layers {self._index - 1} and {self._index}, as models"
                f" do that add features of images there. Only the first stage of pp_size={self._relay.num_ranks} has"
                f" these features; give it at least {self._index} layers in pp_layers_per_stage, or use pp_size=1."
            )
        return hidden if call.results is None else (hidden, *[None] * (call.results - 1))

    def build_entry(self, layer: nn.Module) -> "LayerEntry":
        """Return the stand-in for ``layer``, the original layer, while its own stage runs and it is the first one."""
        return LayerEntry(layer, self._relay, self._call)


class LayerEntry(nn.Module):
    """Stand-in for the first layer of a stage while the stage runs. It calls the layer with the received hidden states.

    What the model does between the layers of the previous stage and this layer has been done by the previous stage.

    Args:
        layer: The layer. Its attributes, parameters and submodules are those of the stand-in.
        relay: State that all stand-ins of the model share.
        call: How the model calls the layer.
    """

    def __init__(self, layer: nn.Module, relay: Relay, call: LayerCall) -> None:
        super().__init__()
        self._layer: nn.Module
        self.__dict__["_layer"] = layer  # not in `_modules`, so that no name changes
        self._relay, self._call = relay, call
        self._parameters, self._buffers, self._modules = layer._parameters, layer._buffers, layer._modules

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with the hidden states from the previous stage."""
        passage, stack, argument = self._relay.passage, self._relay.stack, self._call.argument
        if passage is not None and passage.received is not None:
            arguments: dict[int | str, Any] = dict(enumerate(args))
            arguments.update(kwargs)
            if stack is not None:
                stack.resume(arguments[argument])
            arguments[argument] = passage.received
            passage.is_entered = True
            args, kwargs = tuple(arguments[key] for key in range(len(args))), {key: arguments[key] for key in kwargs}
        return self._layer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_layer" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self._layer, name)


def find_stubs(root: nn.Module) -> list[Stub]:
    """Return the stand-ins in ``root``."""
    return [module for module in root.modules() if isinstance(module, Stub)]


@contextmanager
def with_skeletons(root: nn.Module) -> Iterator[None]:
    """Put copies on the meta device in place of the stand-ins in ``root``, so that it has all modules inside the block.

    Tensors that the block registers in the copies are removed at its end.
    """
    slots = [
        (parent, name, child)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if isinstance(child, Stub)
    ]
    inside = {module for _, _, stub in slots for module in stub.skeleton.modules()}
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in inside]
    for parent, name, stub in slots:
        parent._modules[name] = stub.skeleton
    try:
        yield
    finally:
        for parent, name, stub in slots:
            parent._modules[name] = stub
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def get_absent_tensors(root: nn.Module) -> set[Tensor]:
    """Return the tensors, on the meta device, of the modules for which ``root`` has stand-ins."""
    return {tensor for stub in find_stubs(root) for tensor in get_tensors(stub.skeleton)}


def get_tensors_without_values(root: nn.Module) -> set[Tensor]:
    """Return those of :func:`get_absent_tensors` whose originals, on other ranks, have no values yet."""
    return {tensor for stub in find_stubs(root) for tensor in stub.without_values}


def mark_initialized(root: nn.Module, tensors: set[Tensor]) -> None:
    """Record that the originals of ``tensors`` of :func:`get_absent_tensors` have values now."""
    for stub in find_stubs(root):
        stub.without_values -= tensors


def get_tensors(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    """Return the parameters and buffers of ``module``."""
    return [*module.parameters(recurse), *module.buffers(recurse)]


def is_head_elsewhere(model: Any) -> bool:
    """Return whether another stage holds the output head of a Hugging Face model."""
    return isinstance(model.get_output_embeddings(), Stub)


def copy_structure(module: nn.Module, build: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module without copying its tensors.

    Args:
        module: Module of any size. It is not changed.
        build: Function that returns the copy of a parameter, of a buffer or of another tensor that a module holds.
    """
    # leave out the user's hooks, which could not be copied, or would be called with tensors that are no results
    memo: dict[int, Any] = {id(hooks): type(hooks)() for inner in module.modules() for hooks in get_hooks(inner)}
    for inner in module.modules():
        held = (*inner._parameters.values(), *inner._buffers.values(), *vars(inner).values())
        for tensor in held:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _copy_parameter(tensor, build) if isinstance(tensor, nn.Parameter) else build(tensor)
    return copy.deepcopy(module, memo)


def build_skeleton(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy a module to the meta device in evaluation mode, with floating-point tensors in ``dtype`` if it is given."""
    return copy_structure(module, partial(_make_meta, dtype=dtype)).eval()


def _copy_parameter(parameter: nn.Parameter, build: Callable[[Tensor], Tensor]) -> nn.Parameter:
    result = nn.Parameter(build(parameter), parameter.requires_grad)
    result.__dict__.update(parameter.__dict__)
    return result


def _make_meta(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a meta tensor of the same shape, which has ``dtype`` if ``tensor`` is a floating-point tensor."""
    is_cast = dtype is not None and tensor.is_floating_point()
    # not `empty_like`, which would make a DTensor from a DTensor
    return torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device="meta")


def _make_zeros(like: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return zeros of the shape of ``like``. They take no memory, because all elements are the same one."""
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
