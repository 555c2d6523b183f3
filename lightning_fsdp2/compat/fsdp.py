"""Access to the private state that FSDP2 keeps on its modules. Tested with torch 2.11 to 2.15."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor


def initialize_root(module: FSDPModule) -> None:
    """Make ``module`` the FSDP2 root of all FSDP2 units inside it, as the first forward of ``module`` would.

    Without this call, the unit whose forward runs first becomes the root. If this is an inner unit, FSDP2 raises an
    error when an outer unit is called later. torch has no public way to choose the root.
    """
    module._get_fsdp_state()._lazy_init()


def end_forward(module: FSDPModule) -> None:
    """Reset the forward state of ``module`` after only a part of the model was called, so that ``reshard`` works.

    When one block is called alone, FSDP2 prefetches the next block, although nobody calls it. When one module of a unit
    is called alone (``lm_head`` without the norm), the unit keeps waiting for its other modules. In both cases, the
    gathered weights would stay in memory and be outdated after the next optimizer step.
    ``FSDPModule.reset_iter_state`` (torch 2.13) also resets this state, but it drops accumulated gradients.
    """
    state = module._get_fsdp_state()
    # Clear the order of modules that an earlier forward recorded. Otherwise, FSDP2 would prefetch in this order.
    # The attribute does not exist before the first forward.
    getattr(state._comm_ctx, "post_forward_order", []).clear()
    if state._modules_to_run_forward:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        if state._state_ctx.iter_forward_root is state:
            state._state_ctx.iter_forward_root = None
        for group in _get_param_groups(module):
            group._training_state = TrainingState.IDLE
    for group in _get_param_groups(module):
        if group._all_gather_result is not None:
            group.wait_for_unshard()


def begin_backward(module: FSDPModule) -> None:
    """Make a unit gather its weights and keep them until its backward, as FSDP2 does when the gradient reaches it.

    torch has no public way to do this earlier, before the gradient has reached the unit.
    """
    state: Any = module._get_fsdp_state()
    if state._training_state != TrainingState.PRE_BACKWARD:
        state._pre_backward(None)


def ensure_gathered_once(module: FSDPModule) -> None:
    """Gather the weights of ``module`` if they were never gathered before. Every rank must call this function.

    With a ``reduce_dtype``, a backward without gradient synchronisation reads the gathered copy of every parameter,
    even in units that the forward did not use, such as an unused head or a dropped layer. The backward fails if a
    parameter was never gathered.
    """
    if any(
        not hasattr(parameter, "_unsharded_param")
        for group in _get_param_groups(module)
        for parameter in group.fsdp_params
    ):
        module.unshard()
        module.reshard()


@contextmanager
def keep_unsharded_after_forward(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Keep the weights of ``modules`` gathered after each forward, until the ``with`` block ends.

    The end of the block restores the modules' settings of ``reshard_after_forward``. FSDP2 has a public function that
    changes these settings, ``FSDPModule.set_reshard_after_forward``, but none that reads them.
    """
    groups = [group for module in modules for group in _get_param_groups(module)]
    settings = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, setting in zip(groups, settings, strict=True):
            group.post_forward_mesh_info = setting


def drop_unreduced_gradients(module: FSDPModule, parameters: set[Tensor]) -> None:
    """Drop the gradients that ``parameters`` of a unit have accumulated without gradient synchronisation.

    torch has no public way to do this.
    """
    for group in _get_param_groups(module):
        chosen = [parameter for parameter in group.fsdp_params if parameter.sharded_param in parameters]
        for parameter in chosen:
            if hasattr(parameter, "_unsharded_param"):  # set by the parameter's first all-gather
                parameter._unsharded_param.grad = None
            # torch 2.15 keeps the accumulated gradient in `grad` instead of in this attribute
            if parameter.unsharded_accumulated_grad is not None:
                parameter.unsharded_accumulated_grad = None
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
    for group in (group for module in modules for group in _get_param_groups(module)):
        for parameter in group.fsdp_params:
            gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if isinstance(gradient, DTensor):
                memory = gradient._local_tensor.untyped_storage()._cdata
                if memory in seen:
                    parameter._unsharded_param.grad = gradient.clone()
                seen.add(memory)


def _get_param_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups of a unit: at most one in torch 2.11, and any number in later versions."""
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
