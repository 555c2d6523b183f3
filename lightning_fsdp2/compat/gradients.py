"""Gradients of sharded parameters: when FSDP2 reduces them, and how autograd reaches them.

FSDP2 computes with gathered parameters, and only these are in autograd's graph. So autograd neither runs the hooks that
users register on sharded parameters, nor finds sharded parameters in the graph. Tested with torch 2.11 to 2.15.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.fsdp import get_parameter_groups, get_parameter_name
from lightning_fsdp2.compat.torch import is_in_backward


def count_gradient_hooks(parameter: Tensor) -> int:
    """Return how many hooks ``parameter`` has on its gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has a hook on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class PlaceholderGradient(DTensor):
    """Tensor in ``parameter.grad`` that stands for a gradient which does not exist yet.

    Every use except its attributes, such as ``shape``, calls :meth:`refuse`.
    """

    __slots__ = ()

    @classmethod
    def refuse(cls) -> NoReturn:
        """Raise the error of a use."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        cls.refuse()

    @property
    def _local_tensor(self) -> NoReturn:  # type: ignore[override]
        self.refuse()

    @property
    def _spec(self) -> NoReturn:  # type: ignore[override]
        self.refuse()


InputsChoice = Callable[[Sequence[Tensor], bool], Sequence[Tensor]]
"""Function that chooses the tensors to which a backward computes gradients; see :func:`replace_backward_inputs`."""


@contextmanager
def replace_backward_inputs(replace: InputsChoice) -> Iterator[None]:
    """Let ``replace`` choose the tensors to which backwards in the block compute gradients.

    ``replace`` gets the tensors that a call of ``backward(inputs=...)`` or ``torch.autograd.grad`` names, and whether
    the gradients are added to ``.grad``, as by ``backward``. It does not see calls inside a backward. torch has no
    public hook for the beginning of a backward.

    Blocks may end in any order, as the stages of two Trainers may.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward
    if not isinstance(run, _RunBackward):
        run = autograd._engine_run_backward = _RunBackward(run)
    run.choices.append(replace)
    try:
        yield
    finally:
        run.choices.remove(replace)
        if not run.choices and autograd._engine_run_backward is run:  # another library may have replaced it since
            autograd._engine_run_backward = run.original


class _RunBackward:
    """Replacement of autograd's function that runs a backward, for all blocks of :func:`replace_backward_inputs`."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.choices: list[InputsChoice] = []

    def __call__(
        self,
        outputs: Any,
        gradients: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        if inputs and not is_in_backward():
            for choose in self.choices:
                inputs = tuple(choose(inputs, options["accumulate_grad"]))
        return self.original(outputs, gradients, retain_graph, create_graph, inputs, *args, **options)


def drop_unreduced_gradients(module: FSDPModule, parameters: set[Tensor]) -> list[Tensor]:
    """Drop the gradients that ``parameters`` of a unit have accumulated without gradient synchronisation.

    torch has no public way to do this.

    Returns:
        Those of ``parameters`` that are in the unit.
    """
    dropped: list[Tensor] = []
    for group in get_parameter_groups(module):
        chosen = [parameter for parameter in group.fsdp_params if parameter.sharded_param in parameters]
        for parameter in chosen:
            if hasattr(parameter, "_unsharded_param"):  # set by the parameter's first all-gather
                parameter._unsharded_param.grad = None
            # torch 2.15 keeps the accumulated gradient in `grad` instead of in this attribute
            if parameter.unsharded_accumulated_grad is not None:
                parameter.unsharded_accumulated_grad = None
            dropped.append(parameter.sharded_param)
        if len(chosen) == len(group.fsdp_params):
            # HSDP stores the accumulated gradients of the whole FSDP unit in this attribute
            group._partial_reduce_output = None
            getattr(group, "_partial_reduce_output_layout", {}).clear()  # since torch 2.15
    return dropped


def separate_unreduced_gradients(modules: Iterable[FSDPModule]) -> None:
    """Copy gradients that accumulated without synchronisation, so that no two parameters share a gradient's memory.

    If several parameters are added or concatenated, autograd may compute one gradient tensor for all of them. Normally,
    autograd then copies this tensor for each parameter except the last. With DTensors, autograd does not notice the
    sharing and copies nothing, so the next backward would add to the gradients of several parameters at once.
    """
    seen: set[int] = set()
    for group in (group for module in modules for group in get_parameter_groups(module)):
        for parameter in group.fsdp_params:
            gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if isinstance(gradient, DTensor):
                memory = gradient._local_tensor.untyped_storage()._cdata
                if memory in seen:
                    parameter._unsharded_param.grad = gradient.clone()
                seen.add(memory)


@dataclass(frozen=True)
class UnitParameter:
    """Parameter of a unit."""

    _parameter: Any

    @property
    def name(self) -> str:
        """Name in the root module; before the first forward, in its own module."""
        return get_parameter_name(self._parameter)

    @property
    def owner(self) -> tuple[nn.Module, str]:
        """Module that has the parameter, and the name there."""
        owner = self._parameter._module_info
        return owner.module, owner.param_name

    @property
    def shard(self) -> Tensor:
        """Parameter that users and optimizers hold."""
        return self._parameter.sharded_param

    @property
    def has_unreduced_gradient(self) -> bool:
        """Whether backwards have left a gradient that is not reduced yet."""
        gathered = getattr(self._parameter, "_unsharded_param", None)  # set by the parameter's first all-gather
        is_kept = gathered is not None and gathered.grad is not None
        return is_kept or self._parameter.unsharded_accumulated_grad is not None


class UnitGradients:
    """Gradients of a group of parameters that FSDP2 reduces together."""

    def __init__(self, group: Any, state: Any) -> None:
        self._group, self._state = group, state
        self.parameters = [UnitParameter(parameter) for parameter in group.fsdp_params]

    @property
    def is_last_backward(self) -> bool:
        """Whether no other backward follows. A pipeline runs several backwards in place of one."""
        return self._state._state_ctx.is_last_backward

    @property
    def are_reduced(self) -> bool:
        """Whether :meth:`finish` reduces gradients over all ranks."""
        group = self._group
        return group.reduce_grads and (group.all_reduce_grads or not isinstance(group.mesh_info, DDPMeshInfo))

    def find_hooked(self) -> list[UnitParameter]:
        """Return the parameters with hooks on the gradients of their shards."""
        return [own for own in self.parameters if has_gradient_hooks(own._parameter.sharded_param)]

    def find_hooked_while_gathered(self) -> list[UnitParameter]:
        """Return the parameters with hooks on their gathered forms, which autograd runs."""
        gathered = [(own, getattr(own._parameter, "_unsharded_param", None)) for own in self.parameters]
        return [own for own, form in gathered if form is not None and has_gradient_hooks(form)]

    def call_in_place_of_finish(self, function: Callable[[], None]) -> None:
        """Call ``function`` where FSDP2 would call :meth:`finish`.

        FSDP2 does so in each backward; once more for each further call of a module in the forward.
        """
        self._group.post_backward = lambda *_: function()

    def finish(self) -> None:
        """Reduce the gradients that backward has just computed, or keep them without gradient synchronisation."""
        type(self._group).post_backward(self._group)

    def finish_without_hooks(self, *, reduces: bool) -> None:
        """Call :meth:`finish` without the hooks that FSDP2 itself calls whenever it adds to a gradient.

        Args:
            reduces: Whether to reduce the gradients even if gradient synchronisation is off.
        """
        with _hide_hooks(self.find_hooked()), _reduce_now(self._group) if reduces else nullcontext():
            self.finish()


def get_unit_gradients(module: FSDPModule) -> list[UnitGradients]:
    """Return the gradients of a unit, for each group of its parameters."""
    return [UnitGradients(group, module._get_fsdp_state()) for group in get_parameter_groups(module)]


@contextmanager
def _hide_hooks(parameters: Iterable[UnitParameter]) -> Iterator[None]:
    hooks = [parameter.shard._post_accumulate_grad_hooks for parameter in parameters]
    kept = [(of_one, dict(of_one)) for of_one in hooks if of_one]
    for of_one, _ in kept:
        of_one.clear()
    try:
        yield
    finally:
        for of_one, saved in kept:
            of_one.update(saved)


@contextmanager
def _reduce_now(group: Any) -> Iterator[None]:
    flags = group.reduce_grads, group.all_reduce_grads
    group.reduce_grads = group.all_reduce_grads = True
    try:
        yield
    finally:
        group.reduce_grads, group.all_reduce_grads = flags


def get_hooks(parameter: Tensor) -> tuple[list[Callable[[Tensor], Any]], list[Callable[[Tensor], Any]]]:
    """Return the hooks of ``register_hook`` and of ``register_post_accumulate_grad_hook`` on ``parameter``."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    before, after = ([*(of_one or {}).values()] for of_one in hooks)
    return before, after


def find_gathered_parameters(modules: Iterable[FSDPModule], wanted: Iterable[Tensor]) -> dict[int, tuple[str, Tensor]]:
    """Return the names and gathered forms, which autograd knows, of those ``wanted`` that are parameters of units.

    The key is the ``id`` of what was wanted. That may be any form of a parameter that a user may hold: the sharded
    parameter, or one of those that are in the module between its forward and its backward.
    """
    ids = set(map(id, wanted))
    found: dict[int, tuple[str, Tensor]] = {}
    for group in (group for module in modules for group in get_parameter_groups(module)):
        for parameter in group.fsdp_params:
            gathered: Any = getattr(parameter, "_unsharded_param", None)  # None if no forward has used the parameter
            shards = parameter.sharded_param, getattr(parameter, "_sharded_post_forward_param", None)
            for form in (gathered, *shards) if gathered is not None else ():
                if id(form) in ids:
                    found[id(form)] = get_parameter_name(parameter), gathered
    return found
