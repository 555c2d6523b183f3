"""Use of private names of torch's FSDP2, for the state that it keeps on its modules. Tested with torch 2.11 to 2.15."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor


def initialize_root(module: FSDPModule) -> None:
    """Make ``module`` the FSDP2 root of all units inside it, as its first forward would.

    Without this call, the unit that runs first becomes the root, and a second root is an error. torch has no public way
    to choose the root.
    """
    module._get_fsdp_state()._lazy_init()


def end_forward(module: FSDPModule) -> None:
    """Clean up the state of ``module`` after a part of the model was called alone, so that ``reshard`` works.

    A call of one block prefetches the next block, which then is not used. If one module of a unit is called
    (``lm_head`` without the norm), the unit keeps waiting for its other modules. In both cases, gathered weights would
    stay and be outdated after the next optimizer step. ``FSDPModule.reset_iter_state`` (torch 2.13) would also help,
    but it drops accumulated gradients.
    """
    state = module._get_fsdp_state()
    # torch prefetches along this order, even from an earlier forward; the order does not exist before the first forward
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


def ensure_gathered_once(module: FSDPModule) -> None:
    """Gather the weights of ``module`` if they were never gathered before. Every rank must call this function.

    With a ``reduce_dtype``, a backward without gradient synchronisation reads the gathered copy of every parameter. It
    does so even for a unit that was not used in the forward (an unused head, a dropped layer), and fails if there never
    was such a copy.
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
    """Keep weights gathered after each forward inside the block, and restore the modules' settings at its end.

    ``FSDPModule.set_reshard_after_forward`` changes these settings, but there is no public way to read them.
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
    """Drop the gradients of ``parameters`` in a unit that were accumulated without gradient synchronisation.

    torch has no public way to do this.
    """
    for group in _get_param_groups(module):
        chosen = [parameter for parameter in group.fsdp_params if parameter.sharded_param in parameters]
        for parameter in chosen:
            if hasattr(parameter, "_unsharded_param"):  # true once it was gathered
                parameter._unsharded_param.grad = None
            if parameter.unsharded_accumulated_grad is not None:  # before torch 2.15, separate from `grad`
                parameter.unsharded_accumulated_grad = None
        if len(chosen) == len(group.fsdp_params):
            group._partial_reduce_output = None  # holds the gradients of the whole unit under HSDP
            getattr(group, "_partial_reduce_output_layout", {}).clear()  # since torch 2.15


def separate_unreduced_gradients(modules: Iterable[FSDPModule]) -> None:
    """Copy gradients that share memory, if they were accumulated without gradient synchronisation.

    If several parameters are added or concatenated, autograd may give all of them the same tensor as gradient. It
    copies the tensor for each parameter except the last. With DTensors, autograd does not notice the sharing and copies
    nothing, so the next backward would add to the gradients of several parameters at once.
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
    """Return the parameter groups of a unit. torch 2.11 has at most one, and later versions have a list."""
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
