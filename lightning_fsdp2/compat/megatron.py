"""Access to private names of megatron-fsdp, to control its wrapper step by step. Tested with 0.5.1, 0.6.0 and 0.6.1.

megatron-fsdp has no public way to begin and end a backward, or to choose when it swaps the model's parameters.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def take_over_exchange(wrapper: Any, install_raw: Callable[[], None], install_distributed: Callable[[], None]) -> None:
    """Make ``wrapper`` call the given functions instead of swapping the parameters of its model itself.

    Args:
        wrapper: ``megatron_fsdp.MegatronFSDP``.
        install_raw: Function that puts the parameters for forward and backward into the model.
        install_distributed: Function that puts the sharded parameters for the optimizer into the model.
    """
    # call the original methods once before replacing them, because the first call also marks shared parameters
    wrapper._replace_param_with_raw_if_needed()
    wrapper._replace_param_with_distributed_if_needed()
    vars(wrapper)["_replace_param_with_raw_if_needed"] = install_raw
    vars(wrapper)["_replace_param_with_distributed_if_needed"] = install_distributed


def take_hooks_off(wrapper: Any) -> None:
    """Remove the hooks by which ``wrapper`` detects the beginning of a backward."""
    wrapper._root_pre_backward_hook_handle.remove()
    for name, handle in wrapper.backward_pre_hooks.items():
        if name.endswith("_root_pre_backward"):
            handle.remove()


def abandon_backward(wrapper: Any) -> None:
    """Reset ``wrapper`` after a failed backward, so that it is ready for the next backward."""
    wrapper._root_pre_backward_hook_issued = False
    wrapper._params_require_handle_grad = set()
    for module in wrapper.module.modules():
        module._training_state = type(module._training_state).IDLE
    wrapper.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)
    wrapper.grad_reduce_pipeline.reset()
    wrapper.synchronize_param_gather()


def get_gradient_buffer(wrapper: Any, parameter: Any) -> Tensor:
    """Return the flat tensor in which each backward accumulates this rank's shard of a parameter's gradient.

    ``parameter.grad`` may be a copy of this tensor in another dtype.

    Args:
        wrapper: ``megatron_fsdp.MegatronFSDP``.
        parameter: Distributed parameter of ``wrapper`` that requires a gradient.
    """
    buffer, original = wrapper.param_and_grad_buffer, parameter.orig_param
    gradients = buffer.parameter_groups[buffer.param_to_param_group[original]].main_grad_buffer
    is_sharded = wrapper.data_parallel_sharding_strategy != "no_shard"
    memory: Tensor = gradients.get_item(gradients.param_idx[original], only_shard=is_sharded)
    return memory


def keeps_buffers() -> bool:
    """Return whether each unit of a double-buffered model uses the same buffer in forward and in backward.

    This has been the case since megatron-fsdp 0.6.0. In 0.5.1, a unit may use the other buffer in backward. Tensors
    that were saved in forward then point to a buffer that holds the weights of another unit.
    """
    from megatron_fsdp.param_and_grad_buffer import FixedPoolAllocator

    return "strict_assignments" in inspect.signature(FixedPoolAllocator.allocate).parameters


def list_without_gradient(wrapper: Any) -> list[Tensor]:
    """Return the trainable parameters that received no gradient in the backward that is about to end."""
    return [
        parameter
        for parameter in wrapper._params_require_handle_grad
        if parameter.grad is None and not parameter.grad_added_to_main_grad
    ]
