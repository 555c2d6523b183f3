"""Megatron-FSDP's wrapper, driven step by step: around each backward, behind each optimizer step.

The package would do so by itself, by hooks that look for tensors in what a model returns, and by methods of an
optimizer that it exchanges: that depends on the form of the output, and on the order in which optimizers and schedules
are made.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_fsdp2.parallel.failures import list_names

_IN_BACKWARD = "_lightning_fsdp2_in_backward"

_HAS_GRADIENTS = "_lightning_fsdp2_has_gradients"

_HAS_WARNED = "_lightning_fsdp2_has_warned"


def take_over_optimizer(optimizer: Optimizer, names: dict[Tensor, str], wrapper: Any) -> None:
    """Let an optimizer of the parameters before wrapping step the distributed ones, its groups and their options kept.

    Args:
        optimizer: Without any steps so far.
        names: Of the parameters before wrapping.
        wrapper: Around the model.

    Raises:
        ValueError: When it has stepped, or holds parameters that the model did not have.
    """
    if optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has stepped before its model was wrapped, and its states are not sharded; make"
            " a new one."
        )
    install_distributed_parameters(wrapper)
    parameters = dict(wrapper.module.named_parameters())
    for group in optimizer.param_groups:
        if not all(parameter in names for parameter in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters that are not of the model to be wrapped; make it of"
                " `model.parameters()`."
            )
        group["params"] = [parameters[names[parameter]] for parameter in group["params"]]
    attach_optimizer(wrapper, optimizer)


def attach_optimizer(wrapper: Any, optimizer: Optimizer) -> None:
    """Let steps of ``optimizer`` reach the parameters that are computed with, and its ``zero_grad`` the buffers.

    In place of ``megatron_fsdp.fully_shard_optimizer``, which up to 0.6.1 begins with a step that moves weights
    (https://github.com/NVIDIA/Megatron-LM/issues/5974), and undoes what a schedule has put around ``step``.
    """
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        clear_gradients(wrapper)

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]
    optimizer.register_step_post_hook(lambda *args: install_weights(wrapper))


def install_weights(wrapper: Any) -> None:
    """Let the model compute with what the distributed parameters hold now."""
    wrapper.install_optimized_model_weights()
    # what a call between backward and step has gathered would be taken for the new weights
    wrapper.synchronize_param_gather()


@contextmanager
def surround_backward(wrapper: Any) -> Iterator[None]:
    """What the package does around a backward, which it leaves to hooks that look for tensors in the model's output."""
    _begin_backward(wrapper)
    try:
        yield
    finally:
        setattr(wrapper, _IN_BACKWARD, False)
    _end_backward(wrapper)


def drive_from_calls(wrapper: Any) -> None:
    """Do the same around every backward through what a call of ``wrapper`` returned, where nobody else does.

    Whatever part of the model is called computes with the raw parameters, also behind a backward.
    """
    engine = torch.autograd.Variable._execution_engine
    setattr(wrapper, _IN_BACKWARD, False)

    def begin(gradients: Any) -> None:
        if not getattr(wrapper, _IN_BACKWARD):
            _begin_backward(wrapper)
            engine.queue_callback(end)

    def end() -> None:
        setattr(wrapper, _IN_BACKWARD, False)
        _end_backward(wrapper)

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, begin, mode="any")
        elif not torch.is_grad_enabled():
            install_distributed_parameters(wrapper)

    wrapper.register_forward_hook(watch)
    for module in wrapper.module.modules():
        if next(module.parameters(), None) is not None:
            module.register_forward_pre_hook(lambda module, args: install_raw_parameters(wrapper), prepend=True)


def clear_gradients(wrapper: Any) -> None:
    """Begin to add up anew."""
    wrapper.zero_grad_buffer()
    setattr(wrapper, _HAS_GRADIENTS, False)


def _begin_backward(wrapper: Any) -> None:
    setattr(wrapper, _IN_BACKWARD, True)
    if getattr(wrapper, _HAS_GRADIENTS, False):
        if all(parameter.grad is None for _, parameter in wrapper.param_and_grad_buffer.optimizer_named_parameters):
            clear_gradients(wrapper)  # as `zero_grad` of a module did for the parameters alone
        elif wrapper.data_parallel_sharding_strategy == "optim":
            raise ValueError(
                "A second synchronised backward before the gradients are cleared: under zero_dp_strategy=1"
                " megatron-fsdp would reduce those of the first again. Put all but the last into `defer_grad_sync`, or"
                " under manual optimisation `optimizer.toggle_model(sync_grad=False)`; or use zero_dp_strategy=2."
            )
    install_raw_parameters(wrapper)
    wrapper.pre_backward()


def _end_backward(wrapper: Any) -> None:
    """Reduce what is left, and behind the last backward of a step install the gradients."""
    _warn_of_unused(wrapper)
    wrapper.post_backward()
    if wrapper.model_auto_sync:
        setattr(wrapper, _HAS_GRADIENTS, True)
        _fill_empty_gradients(wrapper.module)


def install_distributed_parameters(wrapper: Any) -> None:
    """Let the model hold the parameters that optimizers and checkpoints see."""
    wrapper._replace_param_with_distributed_if_needed()


def install_raw_parameters(wrapper: Any) -> None:
    """Let the model hold the parameters that it computes with."""
    wrapper._replace_param_with_raw_if_needed()


@contextmanager
def defer_sync(wrapper: Any) -> Iterator[None]:
    """A micro-batch that no optimizer step follows; anything else than a wrapper is left alone."""
    if not hasattr(wrapper, "model_auto_sync"):
        yield
        return
    # not by its setter, which warns each time
    wrapper.model_auto_sync = False
    try:
        yield
    finally:
        wrapper.model_auto_sync = True


def _warn_of_unused(wrapper: Any) -> None:
    """Once, behind the first backward: elsewhere such a parameter has no gradient, and optimizers leave it alone."""
    if getattr(wrapper, _HAS_WARNED, False):
        return
    setattr(wrapper, _HAS_WARNED, True)
    names = wrapper.param_and_grad_buffer.param_to_name
    unused = {
        names[parameter].removeprefix("module.")
        for parameter in wrapper._params_require_handle_grad
        if parameter.grad is None and not parameter.grad_added_to_main_grad
    }
    if unused:
        warnings.warn(
            f"{list_names(unused)}: not used by the loss. Under Megatron-FSDP such a parameter has a gradient of zero,"
            " so that optimizers with weight decay or momentum move it; freeze it to avoid that.",
            stacklevel=2,
        )


def _fill_empty_gradients(model: nn.Module) -> None:
    """Ranks without a row of a parameter get no gradient for it, and would miss the collectives of the others."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None and isinstance(parameter, DTensor):
            parameter.grad = torch.zeros_like(parameter)
