"""Gradients of sharded parameters: deferred ones, hooks on them, backwards to some of them.

FSDP2 computes with gathered parameters, and only these are in autograd's graph. So autograd neither runs the hooks that
users register on sharded parameters, nor finds sharded parameters in the graph. Tested with torch 2.11 to 2.15.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.fsdp import get_parameter_groups
from lightning_fsdp2.compat.torch import call_at_end_of_backward, is_in_backward, make_wrapper_subclass


def count_gradient_hooks(parameter: Tensor) -> int:
    """Return how many hooks ``parameter`` has on its gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has a hook on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class UnreducedGradient(DTensor):
    """Placeholder in ``parameter.grad`` for a gradient that is not reduced over the ranks yet.

    Without the placeholder, ``parameter.grad`` would be None, although the parameter has a gradient in one process.
    Every use of the placeholder except its attributes, such as ``shape``, is an error.
    """

    __slots__ = ()

    remedy: ClassVar[str] = (
        "Use gradients in `on_before_optimizer_step`; or in `on_after_backward`, since a module or callback with this"
        " hook makes every micro-batch reduce gradients; or set FSDP2Config(defer_fsdp_grad_sync=False), if there are"
        " no replicas. In a plain loop, leave out `defer_grad_sync`."
    )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        cls._refuse()

    @property
    def _local_tensor(self) -> NoReturn:  # type: ignore[override]
        self._refuse()

    @property
    def _spec(self) -> NoReturn:  # type: ignore[override]
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise ValueError(
            "A gradient was used in the middle of an accumulation window, but gradients are reduced over the ranks only"
            f" in the last micro-batch. {cls.remedy}"
        )


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


def drop_unreduced_gradients(module: FSDPModule, parameters: set[Tensor]) -> None:
    """Drop the gradients that ``parameters`` of a unit have accumulated without gradient synchronisation.

    torch has no public way to do this.
    """
    for group in get_parameter_groups(module):
        chosen = [parameter for parameter in group.fsdp_params if parameter.sharded_param in parameters]
        for parameter in chosen:
            if hasattr(parameter, "_unsharded_param"):  # set by the parameter's first all-gather
                parameter._unsharded_param.grad = None
            # torch 2.15 keeps the accumulated gradient in `grad` instead of in this attribute
            if parameter.unsharded_accumulated_grad is not None:
                parameter.unsharded_accumulated_grad = None
            if isinstance(parameter.sharded_param.grad, UnreducedGradient):
                parameter.sharded_param.grad = None
        if len(chosen) == len(group.fsdp_params):
            # HSDP stores the accumulated gradients of the whole FSDP unit in this attribute
            group._partial_reduce_output = None
            getattr(group, "_partial_reduce_output_layout", {}).clear()  # since torch 2.15


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


def watch_gradients(module: FSDPModule, check: Callable[["HookedUnit", list[Any]], None]) -> list["HookedUnit"]:
    """Make a unit run the hooks on the gradients of its sharded parameters, and mark gradients that are not reduced.

    The hooks are those of ``Tensor.register_hook`` and ``Tensor.register_post_accumulate_grad_hook``. They run once in
    each backward, at its end. They get the gradient that this backward has computed on all ranks, a DTensor that is
    sharded like the parameter. As in autograd, a hook may return another gradient. A unit with hooks reduces its
    gradients in every backward, even if gradient synchronisation is off.

    Args:
        module: Module that ``fully_shard`` was applied to.
        check: Function that is called in each backward, with one of the results and the unit's parameters with hooks.
    """
    state: Any = module._get_fsdp_state()
    units = [HookedUnit(group, state, check) for group in get_parameter_groups(module)]
    for group, unit in zip(get_parameter_groups(module), units, strict=True):
        group.post_backward = unit
    return units


class HookedUnit:
    """Replacement of the method with which a group of FSDP2 parameters reduces its gradients.

    If a module is called several times, FSDP2 calls this method several times in a backward, and each call adds to the
    gradient. So hooks run only at the end of the backward, when the gradient is complete.
    """

    def __init__(self, group: Any, state: Any, check: Callable[["HookedUnit", list[Any]], None]) -> None:
        self._group, self._state, self._check = group, state, check
        self._earlier: dict[Any, Tensor | None] = {}
        self._placeholders: dict[Any, UnreducedGradient] = {}

    def __call__(self, *_: Any) -> None:
        group, hooked = self._group, self.find_hooked()
        self._check(self, hooked)
        _check_gathered(group)
        if hooked:
            self._reduce_for_hooks(hooked)
        elif group.reduce_grads and (group.all_reduce_grads or not isinstance(group.mesh_info, DDPMeshInfo)):
            self._take_placeholders_off()
            type(group).post_backward(group)
        else:
            unreduced = [parameter for parameter in group.fsdp_params if _is_unreduced(parameter)]
            type(group).post_backward(group)
            self._put_placeholders_on(unreduced)

    def find_hooked(self) -> list[Any]:
        """Return the parameters that have hooks."""
        return [parameter for parameter in self._group.fsdp_params if has_gradient_hooks(parameter.sharded_param)]

    def get_name(self, parameter: Any) -> str:
        """Return the name of a parameter in its root."""
        return _get_name(parameter)

    def _reduce_for_hooks(self, hooked: list[Any]) -> None:
        group = self._group
        if self._take_placeholders_off():
            raise ValueError(
                f"A hook was registered on {_get_name(hooked[0])} in the middle of an accumulation window, so it would"
                " see the gradients of several micro-batches at once. Register hooks before the first micro-batch of an"
                " optimizer step; or set FSDP2Config(defer_fsdp_grad_sync=False), if there are no replicas."
            )
        for parameter in hooked:
            if parameter not in self._earlier:
                self._earlier[parameter] = parameter.sharded_param.grad
                parameter.sharded_param.grad = None
        # a pipeline runs several backwards in place of one
        is_last = self._state._state_ctx.is_last_backward
        with _hide_hooks(hooked), _reduce_now(group, enabled=is_last):
            type(group).post_backward(group)
        if is_last:
            call_at_end_of_backward(self._run_hooks)

    @torch.no_grad()
    def _run_hooks(self) -> None:
        """Run the hooks on the gradients of this backward, and add the gradients to those of earlier backwards."""
        earlier, self._earlier = self._earlier, {}
        for parameter, before in earlier.items():
            shard = parameter.sharded_param
            if (gradient := shard.grad) is None:  # this backward has not used the parameter
                shard.grad = before
                continue
            for hook in tuple((shard._backward_hooks or {}).values()):
                gradient = _call_hook(hook, gradient, _get_name(parameter))
            shard.grad = gradient if before is None else before.add_(gradient)
            for hook in tuple((shard._post_accumulate_grad_hooks or {}).values()):
                hook(shard)

    def _put_placeholders_on(self, unreduced: list[Any]) -> None:
        for parameter in unreduced:
            shard = parameter.sharded_param
            if shard.grad is None:
                if parameter not in self._placeholders:
                    self._placeholders[parameter] = make_wrapper_subclass(UnreducedGradient, shard)
                shard.grad = self._placeholders[parameter]

    def _take_placeholders_off(self) -> bool:
        """Remove the placeholders, and return whether there were any."""
        marked = [p for p in self._group.fsdp_params if isinstance(p.sharded_param.grad, UnreducedGradient)]
        for parameter in marked:
            parameter.sharded_param.grad = None
        return bool(marked)


def _is_unreduced(parameter: Any) -> bool:
    gathered = getattr(parameter, "_unsharded_param", None)  # set by the parameter's first all-gather
    return parameter.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)


def _check_gathered(group: Any) -> None:
    """Refuse hooks on gathered parameters, which autograd has run on the gradient of this rank alone."""
    for parameter in group.fsdp_params:
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is not None and has_gradient_hooks(gathered):
            raise ValueError(
                f"A hook was registered on {_get_name(parameter)} while a step had the parameter gathered, so it would"
                " see only this rank's part of the gradient. Register hooks outside of steps, such as in"
                " `on_train_start` or `on_train_batch_start`."
            )


def _call_hook(hook: Callable[[Tensor], Any], gradient: Tensor, name: str) -> Tensor:
    try:
        result = hook(gradient)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ValueError(
            f"A hook on {name} combines the gradient, which is sharded (a DTensor), with a whole tensor. Shard this"
            " tensor too: `distribute_tensor(tensor, gradient.device_mesh, gradient.placements, src_data_rank=None)`."
        ) from error
    if result is None:
        return gradient
    if not isinstance(result, DTensor) or result.shape != gradient.shape:
        raise TypeError(
            f"A hook on {name} returned {type(result).__name__}{list(getattr(result, 'shape', []))} instead of a"
            f" DTensor of the shape {list(gradient.shape)}. A hook on a sharded parameter gets and returns a gradient"
            " that is sharded like the parameter."
        )
    return result.redistribute(placements=gradient.placements)  # type: ignore[attr-defined]


@contextmanager
def _hide_hooks(parameters: list[Any]) -> Iterator[None]:
    """Hide the hooks that FSDP2 would call whenever it adds to a gradient."""
    hooks = [p.sharded_param._post_accumulate_grad_hooks for p in parameters]
    kept = [(of_one, dict(of_one)) for of_one in hooks if of_one]
    for of_one, _ in kept:
        of_one.clear()
    try:
        yield
    finally:
        for of_one, saved in kept:
            of_one.update(saved)


@contextmanager
def _reduce_now(group: Any, *, enabled: bool) -> Iterator[None]:
    flags = group.reduce_grads, group.all_reduce_grads
    if enabled:
        group.reduce_grads = group.all_reduce_grads = True
    try:
        yield
    finally:
        group.reduce_grads, group.all_reduce_grads = flags


def _get_name(parameter: Any) -> str:
    return str(parameter._param_fqn or parameter._module_info.param_name)


def find_gathered_parameters(modules: Iterable[FSDPModule], wanted: Iterable[Tensor]) -> dict[int, tuple[str, Tensor]]:
    """Return the names and gathered forms, which autograd knows, of those ``wanted`` that are parameters of units.

    The key is the ``id`` of what was wanted. That may be any form of a parameter that a user may hold: the sharded
    parameter, or one of those that are in the module between its forward and its backward.
    """
    ids = set(map(id, wanted))
    found: dict[int, tuple[str, Tensor]] = {}
    for group in (group for module in modules for group in get_parameter_groups(module)):
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)  # None if no forward has used the parameter
            shards = parameter.sharded_param, getattr(parameter, "_sharded_post_forward_param", None)
            for form in (gathered, *shards) if gathered is not None else ():
                if id(form) in ids:
                    found[id(form)] = _get_name(parameter), gathered
    return found
