"""Driver of Megatron-FSDP's wrapper: calls it around each backward and after each optimizer step.

By itself the package does this with hooks that look for tensors in a model's output, and with replaced methods of the
optimizer. That depends on the form of the output, and on the order in which optimizers and schedules are made. So the
package's hooks are removed here.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fsdp2.compat.megatron import (
    abandon_backward,
    list_without_gradient,
    take_hooks_off,
    take_over_exchange,
)
from lightning_fsdp2.compat.torch import call_at_end_of_backward, get_shard, is_in_backward, tree_leaves
from lightning_fsdp2.modules.sharder import get_optional_sharder, set_sharder
from lightning_fsdp2.parallel.data.gradients import extend_zero_grad
from lightning_fsdp2.ranks.failures import list_names


class _Slot(NamedTuple):
    """A place where a module holds a parameter, and the two parameters that take turns there."""

    holder: dict[str, nn.Parameter | None]
    name: str
    raw: nn.Parameter
    distributed: nn.Parameter


class Driver:
    """Driver of ``wrapper``: makes the calls that each point of a training loop needs.

    Args:
        wrapper: The ``megatron_fsdp.MegatronFSDP`` around the model.
    """

    name = "Megatron-FSDP"

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._buffer = wrapper.param_and_grad_buffer
        self._parameters = dict(self._buffer.optimizer_named_parameters)
        self._slots = self._take_over_exchange()
        self._versions = self._get_versions()
        self._is_stale = False
        self._in_backward = False
        self._has_reached_a_leaf = False
        self._has_gradients = False
        self._unused: set[str] | None = None
        self._has_warned = False
        self._holders = {module for module in wrapper.modules() if next(module.parameters(), None) is not None}
        take_hooks_off(wrapper)
        self._put_hooks_on()
        # version 0.5.1 calls the module without its hooks, and would miss those for parameters in the module itself
        wrapper.__dict__["forward"] = wrapper.module.__call__
        for module in (wrapper, wrapper.module):
            set_sharder(module, self)
            module.__dict__["zero_grad"] = self.zero_grad
            module.__dict__["__deepcopy__"] = _refuse_copy

    # ------------------------------------------------------------------ which parameters the model holds

    def install_distributed_parameters(self) -> None:
        """Make the model hold the parameters that optimizers and checkpoints see."""
        if self.wrapper.is_param_fsdp_distributed:
            return
        self.wrapper.is_param_fsdp_distributed = True
        for slot in self._slots:
            slot.holder[slot.name] = slot.distributed

    def install_raw_parameters(self) -> None:
        """Make the model hold the parameters that it computes with, with the values of the distributed ones."""
        if not self.wrapper.is_param_fsdp_distributed:
            return
        if self._is_stale or self._get_versions() != self._versions:
            self.wrapper.install_optimized_model_weights()
            # otherwise weights gathered by a call between backward and step would be mistaken for the new ones
            self.wrapper.synchronize_param_gather()
            self._is_stale, self._versions = False, self._get_versions()
        self.wrapper.is_param_fsdp_distributed = False
        for slot in self._slots:
            slot.holder[slot.name] = slot.raw

    def holds_parameters(self, module: nn.Module) -> bool:
        """Return whether ``module`` holds any wrapped parameter, at any depth; networks in metrics are not wrapped."""
        return module in self._holders

    def expect_writes(self) -> None:
        """Prepare for writes to the distributed parameters, so that the next forward computes with the new values.

        This includes writes that autograd does not count.
        """
        self.install_distributed_parameters()
        self._is_stale = True

    def get_checkpointed_module(self) -> nn.Module:
        """Return the module in the wrapper, with the distributed parameters installed."""
        self.install_distributed_parameters()
        module: nn.Module = self.wrapper.module
        return module

    def check_can_unshard(self) -> None:
        """Refuse to keep weights gathered for a block; see :class:`~lightning_fsdp2.modules.sharder.Sharder`.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "unshard_fsdp2_model: Megatron-FSDP gathers weights for a call of its own alone; call the module on all"
            " ranks, or read a parameter there by lightning_fsdp2.ranks.whole_tensors.gather(parameter)."
        )

    def _take_over_exchange(self) -> list[_Slot]:
        """Replace the package's methods that swap parameters, and return the places of the parameters.

        The package's own methods look up every parameter by name several times a step, and need to know all of them.
        """
        wrapper = self.wrapper
        take_over_exchange(wrapper, self.install_raw_parameters, self.install_distributed_parameters)
        raw = {distributed: wrapper.raw_param[name] for name, distributed in self._parameters.items()}
        return [
            _Slot(module._parameters, name, raw[parameter], parameter)
            for module in wrapper.module.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _get_versions(self) -> list[tuple[int, int]]:
        """Return autograd's counts of writes to the parameters and to their shards."""
        return [(parameter._version, get_shard(parameter)._version) for parameter in self._parameters.values()]

    # ------------------------------------------------------------------ optimizers

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Make steps of ``optimizer`` reach the raw parameters, and make its ``zero_grad`` clear the buffers.

        This replaces ``megatron_fsdp.fully_shard_optimizer``, which up to 0.6.1 begins with a step that moves weights
        (https://github.com/NVIDIA/Megatron-LM/issues/5974), and removes a schedule's wrapper around ``step``.
        """
        extend_zero_grad(optimizer, self.clear_gradients)
        optimizer.register_step_post_hook(lambda *args: self.expect_writes())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients; this replaces the ``zero_grad`` of the modules."""
        self.install_distributed_parameters()
        nn.Module.zero_grad(self.wrapper.module, set_to_none)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Clear the gradient buffers, so that gradients are added up from zero again."""
        self.wrapper.zero_grad_buffer()
        self._has_gradients = False

    # ------------------------------------------------------------------ backward

    @contextmanager
    def surround_backward(self) -> Iterator[None]:
        """Prepare and finish the backward in the block. If it raises, the next forward cleans up."""
        self._begin_backward()
        yield
        self._end_backward()

    @contextmanager
    def defer_sync(self) -> Iterator[None]:
        """Run the micro-batches in the block without automatic synchronisation, since no optimizer step follows."""
        # the setter would warn each time
        before, self.wrapper.model_auto_sync = self.wrapper.model_auto_sync, False
        try:
            yield
        finally:
            self.wrapper.model_auto_sync = before

    def _put_hooks_on(self) -> None:
        """Register hooks that notice each forward, and a backward outside of :meth:`surround_backward`.

        They notice that backward at the model's output, if tensors can be found there, or else at the first gradient of
        a parameter.
        """
        self.wrapper.register_forward_hook(self._watch_output)
        for parameter in self.wrapper.raw_param.values():
            if parameter.requires_grad:
                parameter.register_hook(self._reach_leaf)
        for module in self._holders:
            # any part of the model may be called, also after a backward
            module.register_forward_pre_hook(self._enter_forward, prepend=True)

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, self._reach_output, mode="any")
        elif not torch.is_grad_enabled():
            self.install_distributed_parameters()

    def _enter_forward(self, module: nn.Module, args: Any) -> None:
        if self._in_backward and not is_in_backward():
            self._abandon_backward()  # the backward ended with an exception
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
            self._abandon_backward()  # it was `torch.autograd.grad`, which gives parameters no gradients

    def _begin_backward(self) -> None:
        if self._has_gradients:
            self._check_gradients()
        self._in_backward, self._has_reached_a_leaf = True, False
        self.install_raw_parameters()
        self.wrapper.pre_backward()

    def _check_gradients(self) -> None:
        """Check the gradients that an earlier, synchronised backward has left, before the next one adds to them."""
        if all(parameter.grad is None for parameter in self._parameters.values()):
            self.clear_gradients()  # the user has cleared only `parameter.grad`
            return
        reduces_twice = self.wrapper.data_parallel_sharding_strategy == "optim"
        if reduces_twice or self.wrapper.dist_index.use_hybrid_fsdp:
            raise ValueError(
                "A second synchronised backward before the gradients are cleared: with zero_dp_strategy=1, or with"
                " replicas, megatron-fsdp would reduce those of the first again. Put all but the last into"
                " `defer_grad_sync`, or under manual optimisation `optimizer.toggle_model(sync_grad=False)`."
            )

    def _end_backward(self) -> None:
        """Reduce the remaining gradients, and install them after the last backward of a step."""
        self._in_backward = False
        self._note_unused()
        self.wrapper.post_backward()
        self.install_distributed_parameters()
        if self.wrapper.model_auto_sync:
            self._has_gradients = True
            self._warn_of_unused()
            self._fill_empty_gradients()

    def _abandon_backward(self) -> None:
        """Reset the package to its state between two backwards."""
        self._in_backward = False
        abandon_backward(self.wrapper)

    def _note_unused(self) -> None:
        names = self._buffer.param_to_name
        unused = {names[parameter].removeprefix("module.") for parameter in list_without_gradient(self.wrapper)}
        self._unused = unused if self._unused is None else self._unused & unused

    def _warn_of_unused(self) -> None:
        """Warn of unused parameters once, after the backwards of the first step.

        Without Megatron-FSDP, an unused parameter has no gradient, and optimizers leave it alone.
        """
        if self._unused and not self._has_warned:
            warnings.warn(
                f"{list_names(self._unused)}: not used by the loss. Under Megatron-FSDP such a parameter has a gradient"
                " of zero, so that optimizers with weight decay or momentum move it; freeze it to avoid that.",
                stacklevel=2,
            )
        self._has_warned, self._unused = True, None

    def _fill_empty_gradients(self) -> None:
        """Give an empty gradient to ranks that hold no row of a parameter.

        The package gives these ranks none, so they would miss the collectives of the other ranks.
        """
        for parameter in self._parameters.values():
            if parameter.requires_grad and parameter.grad is None and isinstance(parameter, DTensor):
                parameter.grad = torch.zeros_like(parameter)


def _refuse_copy(memo: dict[int, Any]) -> None:
    raise TypeError(
        "A model wrapped by Megatron-FSDP cannot be copied: its parameters lie in buffers of the package. Make a new"
        " one and load a checkpoint."
    )


def get_driver(module: nn.Module) -> Driver:
    """Return the driver of a wrapper, or of the module in it."""
    return cast(Driver, get_optional_sharder(module))


def take_over_optimizer(optimizer: Optimizer, names: dict[Tensor, str], wrapper: Any) -> None:
    """Make an optimizer from before wrapping step the distributed parameters, and keep its groups and options.

    Args:
        optimizer: Optimizer that has not stepped yet.
        names: Names of the parameters before wrapping.
        wrapper: Wrapper around the model.

    Raises:
        ValueError: If the optimizer has stepped, or holds parameters that the model did not have.
    """
    if optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has stepped before its model was wrapped, and its states are not sharded; make"
            " a new one."
        )
    driver = get_driver(wrapper)
    driver.install_distributed_parameters()
    parameters = dict(wrapper.module.named_parameters())
    for group in optimizer.param_groups:
        if not all(parameter in names for parameter in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters that are not of the model to be wrapped; make it of"
                " `model.parameters()`."
            )
        group["params"] = [parameters[names[parameter]] for parameter in group["params"]]
    driver.attach_optimizer(optimizer)
