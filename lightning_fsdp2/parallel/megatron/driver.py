"""Driver that calls Megatron-FSDP's wrapper around each backward and after each optimizer step.

Without a driver, megatron-fsdp detects the backward with hooks on the tensors in a model's output, and replaces methods
of the optimizer. The hooks only work with some forms of output. The replaced methods only work if optimizers and
schedulers are made in a certain order. The driver therefore removes these hooks, and calls the wrapper itself.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fsdp2.compat.gradients import count_gradient_hooks, has_gradient_hooks
from lightning_fsdp2.compat.megatron import (
    abandon_backward,
    get_gradient_buffer,
    list_without_gradient,
    take_hooks_off,
    take_over_exchange,
)
from lightning_fsdp2.compat.torch import (
    call_at_end_of_backward,
    get_shard,
    is_in_backward,
    make_wrapper_subclass,
    tree_leaves,
)
from lightning_fsdp2.modules.sharder import get_optional_sharder, set_sharder
from lightning_fsdp2.parallel.data.gradients import UnreducedGradient, extend_zero_grad
from lightning_fsdp2.parallel.megatron.tensor_parallel import Lift
from lightning_fsdp2.ranks.failures import list_names


class _Slot(NamedTuple):
    """Place in a module that alternately holds two forms of the same parameter.

    In forward and backward, it holds the ``raw`` parameter, which megatron-fsdp gathers. At other times, it holds the
    ``distributed`` parameter, which is sharded.
    """

    holder: dict[str, nn.Parameter | None]
    name: str
    raw: nn.Parameter
    distributed: nn.Parameter


class _UnreducedGradient(UnreducedGradient):
    """Placeholder for a gradient that is still in megatron-fsdp's buffers."""

    __slots__ = ()
    remedy = "Use gradients in `on_before_optimizer_step`, or use FSDP2Strategy."


class Driver:
    """Object that calls a Megatron-FSDP wrapper at the right points of a training loop.

    Args:
        wrapper: The ``megatron_fsdp.MegatronFSDP`` around the model.
        lift: Converter from the wrapper's parameters to DTensors of the whole parameters. None without tensor
            parallelism.
    """

    name = "Megatron-FSDP"
    can_unshard = False

    def __init__(self, wrapper: Any, lift: Lift | None = None) -> None:
        self.wrapper = wrapper
        self._buffer = wrapper.param_and_grad_buffer
        self._lift = lift
        # `_parts` are the parameters that the wrapper shards; optimizers and checkpoints see `_parameters`
        self._parts = {_strip(name): part for name, part in self._buffer.optimizer_named_parameters}
        self._parameters = self._parts if lift is None else lift.lift_parameters(self._parts)
        self._slots = self._take_over_exchange()
        self._versions = self._get_versions()
        self._is_stale = False
        self._in_backward = False
        self._has_reached_a_leaf = False
        self._has_gradients = False
        self._are_gradients_current = False
        self._unused: set[str] | None = None
        self._has_warned = False
        self._holders = {module for module in wrapper.modules() if next(module.parameters(), None) is not None}
        take_hooks_off(wrapper)
        self._put_hooks_on()
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._names |= {id(slot.raw): self._names[id(slot.distributed)] for slot in self._slots}
        self._own_hooks = {slot.raw: count_gradient_hooks(slot.raw) for slot in self._slots}
        self._placeholders: dict[nn.Parameter, _UnreducedGradient] = {}
        # In megatron-fsdp 0.5.1, the wrapper calls `module.forward`, which skips the hooks of the module. These hooks
        # must run, because one of them gathers the parameters that the module holds directly.
        wrapper.__dict__["forward"] = wrapper.module.__call__
        for module in (wrapper, wrapper.module):
            set_sharder(module, self)
            module.__dict__["zero_grad"] = self.zero_grad
            module.__dict__["__deepcopy__"] = _refuse_copy
            module.__dict__["__reduce_ex__"] = _refuse_pickle

    # ------------------------------------------------------------------ which parameters the model holds

    def install_distributed_parameters(self) -> None:
        """Put the distributed parameters into the model, for optimizers and checkpoints."""
        if self.wrapper.is_param_fsdp_distributed:
            return
        self.wrapper.is_param_fsdp_distributed = True
        for slot in self._slots:
            slot.holder[slot.name] = slot.distributed

    def install_raw_parameters(self) -> None:
        """Put the raw parameters into the model, for forward and backward, with up-to-date values."""
        if not self.wrapper.is_param_fsdp_distributed:
            return
        if self._is_stale or self._get_versions() != self._versions:
            self.wrapper.install_optimized_model_weights()
            # without this call, the forward would use weights that were gathered before the optimizer step
            self.wrapper.synchronize_param_gather()
            self._is_stale, self._versions = False, self._get_versions()
        self.wrapper.is_param_fsdp_distributed = False
        for slot in self._slots:
            slot.holder[slot.name] = slot.raw

    def holds_parameters(self, module: nn.Module) -> bool:
        """Return whether the wrapper manages parameters in ``module``. It manages none in networks inside metrics."""
        return module in self._holders

    def expect_writes(self) -> None:
        """Prepare for writes to the distributed parameters, so that the next forward uses the new values.

        Call this method if autograd does not count the writes as in-place changes, because the driver cannot detect
        such writes itself.
        """
        self.install_distributed_parameters()
        self._is_stale = True

    def get_checkpointed_module(self) -> nn.Module:
        """Return the wrapped module with its distributed parameters, ready to be saved or loaded."""
        self.install_distributed_parameters()
        module: nn.Module = self.wrapper.module
        return module

    def _take_over_exchange(self) -> list[_Slot]:
        """Replace megatron-fsdp's methods that swap raw and distributed parameters, and return a slot per parameter.

        A slot is the place in a module where the two forms of a parameter are swapped. The original methods look up
        every parameter by name several times per step, and fail for unknown parameters.
        """
        wrapper = self.wrapper
        take_over_exchange(wrapper, self.install_raw_parameters, self.install_distributed_parameters)
        names = {part: name for name, part in self._parts.items()}
        raw = {_strip(name): parameter for name, parameter in wrapper.raw_param.items()}
        slots = [
            _Slot(module._parameters, name, raw[names[part]], self._parameters[names[part]])
            for module in wrapper.module.modules()
            for name, part in module._parameters.items()
            if part is not None
        ]
        for slot in slots:
            slot.holder[slot.name] = slot.distributed
        return slots

    def _get_versions(self) -> list[tuple[int, int]]:
        """Return how often each parameter and its shard were changed in place, as counted by autograd."""
        return [
            (parameter._version, get_shard(cast(Any, parameter))._version) for parameter in self._parameters.values()
        ]

    # ------------------------------------------------------------------ optimizers

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Connect ``optimizer`` with the wrapper.

        Each step of the optimizer then updates the raw parameters, and its ``zero_grad`` clears the gradient buffers.
        Use this method instead of ``megatron_fsdp.fully_shard_optimizer``, which has two bugs up to version 0.6.1. It
        runs a first ``optimizer.step()`` that changes the weights
        (https://github.com/NVIDIA/Megatron-LM/issues/5974). It also removes the patch that a learning rate scheduler
        applies to ``step``.
        """
        extend_zero_grad(optimizer, self.clear_gradients)
        optimizer.register_step_post_hook(lambda *args: self.expect_writes())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those in megatron-fsdp's gradient buffers.

        This method replaces ``zero_grad`` of the modules, which would not clear the buffers.
        """
        self.install_distributed_parameters()
        nn.Module.zero_grad(self.wrapper.module, set_to_none)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Clear the gradient buffers, so that gradients are accumulated from zero again."""
        self.wrapper.zero_grad_buffer()
        self._has_gradients = False
        self._take_placeholders_off()

    # ------------------------------------------------------------------ backward

    def check_backward_inputs(self, inputs: Sequence[Tensor], accumulates: bool) -> Sequence[Tensor]:
        """Refuse a backward to some parameters alone, since megatron-fsdp reduces the gradients of all of them.

        Args:
            inputs: Tensors that ``backward(inputs=...)`` or ``torch.autograd.grad`` was called with.
            accumulates: Whether the gradients are added to ``.grad``.

        Raises:
            ValueError: If there are parameters among ``inputs``.
        """
        if asked := [self._names[id(tensor)] for tensor in inputs if id(tensor) in self._names]:
            call = "backward(inputs=...)" if accumulates else "torch.autograd.grad"
            raise ValueError(
                f"`{call}` was called for parameters ({list_names(asked)}), but megatron-fsdp can only reduce the"
                " gradients of all parameters together. Call `self.manual_backward(loss)`, or use FSDP2Strategy."
            )
        return inputs

    @contextmanager
    def surround_backward(self) -> Iterator[None]:
        """Prepare the wrapper for the backward that runs inside the block, and finish this backward afterwards.

        If the backward raises an exception, the next forward resets the wrapper.
        """
        self._begin_backward()
        yield
        self._end_backward()

    @contextmanager
    def defer_sync(self) -> Iterator[None]:
        """Run the block without reducing gradients, for micro-batches before the last one of an optimizer step."""
        # do not use the public setter, which would warn each time
        before, self.wrapper.model_auto_sync = self.wrapper.model_auto_sync, False
        try:
            yield
        finally:
            self.wrapper.model_auto_sync = before

    def _put_hooks_on(self) -> None:
        """Register hooks that detect each forward, and each backward outside :meth:`surround_backward`.

        A backward is detected when it computes the gradient of the model's output. If no tensors are found in the
        output, the backward is detected when it computes the first gradient of a parameter.
        """
        self.wrapper.register_forward_hook(self._watch_output)
        for parameter in self.wrapper.raw_param.values():
            if parameter.requires_grad:
                parameter.register_hook(self._reach_leaf)
        for module in self._holders:
            # each module gets the hook, because users may call any part of the model while the distributed parameters
            # are installed, for example after a backward
            module.register_forward_pre_hook(self._enter_forward, prepend=True)

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, self._reach_output, mode="any")
        elif not torch.is_grad_enabled():
            self.install_distributed_parameters()

    def _enter_forward(self, module: nn.Module, args: Any) -> None:
        if self._in_backward and not is_in_backward():
            self._abandon_backward()  # the last backward raised an exception, so it was never finished
            self.clear_gradients()
        self.install_raw_parameters()

    def _reach_output(self, gradients: Any) -> None:
        if not self._in_backward:
            self._begin_backward()
            call_at_end_of_backward(self._leave_engine)

    def _reach_leaf(self, gradient: Tensor) -> None:
        self._has_reached_a_leaf = True
        self._reach_output(gradient)

    def _leave_engine(self) -> None:
        if self._has_reached_a_leaf:
            self._end_backward()
        else:
            # no parameter got a gradient: the user called `torch.autograd.grad`, which does not set `parameter.grad`
            self._abandon_backward()

    def _begin_backward(self) -> None:
        self._check_no_hooks()
        self._take_placeholders_off()
        if self._has_gradients:
            self._keep_gradients()
        self._in_backward, self._has_reached_a_leaf = True, False
        self.install_raw_parameters()
        self.wrapper.pre_backward()

    def _check_no_hooks(self) -> None:
        """Refuse hooks on gradients, which autograd would run on the gradient of this rank alone, or not at all."""
        hooked = [parameter for parameter in self._parameters.values() if has_gradient_hooks(parameter)]
        hooked += [raw for raw, own in self._own_hooks.items() if count_gradient_hooks(raw) > own]
        if hooked:
            names = list_names({self._names[id(parameter)] for parameter in hooked})
            raise ValueError(
                f"The parameters {names} have hooks (`register_hook`), which Megatron-FSDP cannot run on"
                " reduced gradients. Change gradients in `on_before_optimizer_step`, or use FSDP2Strategy."
            )

    def _put_placeholders_on(self) -> None:
        for parameter in self._parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                if parameter not in self._placeholders:
                    self._placeholders[parameter] = make_wrapper_subclass(_UnreducedGradient, parameter)
                parameter.grad = self._placeholders[parameter]

    def _take_placeholders_off(self) -> None:
        for parameter in self._parameters.values():
            if isinstance(parameter.grad, _UnreducedGradient):
                parameter.grad = None

    def _keep_gradients(self) -> None:
        """Prepare for another backward, which adds to the gradients that an earlier backward has already reduced.

        Raises:
            ValueError: If megatron-fsdp would reduce the earlier gradients again.
        """
        if all(parameter.grad is None for parameter in self._parameters.values()):
            self.clear_gradients()  # the user has cleared `parameter.grad`, but not megatron-fsdp's gradient buffers
            return
        strategy = self.wrapper.data_parallel_sharding_strategy
        # reducing the same gradients twice gives wrong values if the reduction sums them, but not if it averages them
        sums_twice = strategy == "no_shard" and self.wrapper.calculate_per_token_loss
        if strategy == "optim" or sums_twice or self.wrapper.dist_index.use_hybrid_fsdp:
            raise ValueError(
                "A second backward with gradient synchronisation ran before the gradients were cleared. With"
                " zero_dp_strategy=1, with replicas, or with zero_dp_strategy=0 and calculate_per_token_loss=True,"
                " megatron-fsdp would reduce the first gradients again. Synchronise only in the last backward:"
                " run the others inside `defer_grad_sync` or, under manual optimisation, inside"
                " `optimizer.toggle_model(sync_grad=False)`."
            )
        if self._are_gradients_current:
            self._write_gradients_back()

    @torch.no_grad()
    def _write_gradients_back(self) -> None:
        """Write the gradients, which the user may have changed, back to the buffers that the next backward adds to."""
        for name, part in self._parts.items():
            gradient = self._parameters[name].grad
            if not part.requires_grad:
                continue
            buffer = get_gradient_buffer(self.wrapper, part)
            if gradient is None or (self._lift is not None and self._lift.is_kept_elsewhere(name)):
                buffer.zero_()
            else:
                buffer.copy_(get_shard(cast(Any, gradient)).flatten())

    def _end_backward(self) -> None:
        """Finish a backward. After the last one of a step, all gradients are reduced and visible to the optimizer."""
        self._in_backward = False
        self._note_unused()
        self.wrapper.post_backward()
        self.install_distributed_parameters()
        self._are_gradients_current = self.wrapper.model_auto_sync
        if self.wrapper.model_auto_sync:
            if self._lift is not None:
                self._lift.lift_gradients(self._parts, self._parameters)
            self._has_gradients = True
            self._warn_of_unused()
            self._fill_empty_gradients()
        else:
            self._put_placeholders_on()

    def _abandon_backward(self) -> None:
        """Reset the wrapper to the state in which it waits for the next backward."""
        self._in_backward = False
        abandon_backward(self.wrapper)

    def _note_unused(self) -> None:
        names = self._buffer.param_to_name
        unused = {_strip(names[parameter]) for parameter in list_without_gradient(self.wrapper)}
        self._unused = unused if self._unused is None else self._unused & unused

    def _warn_of_unused(self) -> None:
        """Warn about parameters that the loss has not used in any backward of the first step.

        Megatron-FSDP gives such a parameter a gradient of zero, so weight decay or momentum may change it. Without
        Megatron-FSDP, it has no gradient, and optimizers do not change it.
        """
        if self._unused and not self._has_warned:
            warnings.warn(
                f"The loss does not use these parameters: {list_names(self._unused)}. Under Megatron-FSDP, their"
                " gradients are zero, so optimizers with weight decay or momentum change them. Freeze them to avoid"
                " that.",
                stacklevel=2,
            )
        self._has_warned, self._unused = True, None

    def _fill_empty_gradients(self) -> None:
        """Give an empty gradient to each parameter that has no rows on this rank.

        megatron-fsdp sets no gradient for such a parameter, so this rank would skip collectives that other ranks run.
        """
        for parameter in self._parameters.values():
            if parameter.requires_grad and parameter.grad is None and isinstance(parameter, DTensor):
                parameter.grad = torch.zeros_like(parameter)


def _strip(name: str) -> str:
    """Return the name that a parameter has in the wrapped module, given its name in the wrapper."""
    return name.removeprefix("module.")


def _refuse_copy(memo: dict[int, Any]) -> None:
    raise TypeError(
        "A model wrapped by Megatron-FSDP cannot be copied, because its parameters are in buffers of megatron-fsdp."
        " Make a new model and load a checkpoint into it."
    )


def _refuse_pickle(protocol: int) -> None:
    raise TypeError(
        "A model wrapped by Megatron-FSDP cannot be pickled, because each rank holds only shards of it. Save a"
        " checkpoint instead."
    )


def get_driver(module: nn.Module) -> Driver:
    """Return the driver of a Megatron-FSDP wrapper, given the wrapper or the wrapped module."""
    return cast(Driver, get_optional_sharder(module))


def take_over_optimizer(optimizer: Optimizer, names: dict[Tensor, str], wrapper: Any) -> None:
    """Give the distributed parameters to an optimizer that was made before wrapping.

    The optimizer keeps its parameter groups and their options.

    Args:
        optimizer: Optimizer that has not stepped yet.
        names: Names of the parameters before wrapping.
        wrapper: Megatron-FSDP's wrapper of the model.

    Raises:
        ValueError: If the optimizer has already stepped, or holds parameters that do not belong to the model.
    """
    if optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} took a step before its model was wrapped, so the optimizer's states are not"
            " sharded; create a new optimizer."
        )
    driver = get_driver(wrapper)
    driver.install_distributed_parameters()
    parameters = dict(wrapper.module.named_parameters())
    for group in optimizer.param_groups:
        if not all(parameter in names for parameter in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters that do not belong to the model to be wrapped; create the"
                " optimizer from `model.parameters()`."
            )
        group["params"] = [parameters[names[parameter]] for parameter in group["params"]]
    driver.attach_optimizer(optimizer)
