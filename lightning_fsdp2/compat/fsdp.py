"""Private names of torch's FSDP2: the state that it keeps on its modules. Tried with torch 2.11 to 2.15."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor


def initialize_root(module: FSDPModule) -> None:
    """Make ``module`` the root of its FSDP2 units now, as its first forward would.

    Whichever unit runs first becomes the root, and a second root is an error; torch has no public way to choose.
    """
    module._get_fsdp_state()._lazy_init()


def end_forward(module: FSDPModule) -> None:
    """Finish what a forward of a part of the model has left open in ``module``, so that ``reshard`` shards it again.

    A call of one block gathers the next block ahead of time. A call of one module of a list unit (``lm_head`` without
    the norm) leaves the unit waiting for its other modules. Either would keep weights from before the next optimizer
    step. ``FSDPModule.reset_iter_state`` (torch 2.13) would help too, but drops accumulated gradients.
    """
    state = module._get_fsdp_state()
    # torch's own prefetch follows this order, also into an earlier forward; before the first forward there is no order
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
    """Gather the weights of ``module`` once if they were never gathered; every rank must call it.

    With a ``reduce_dtype``, a backward without gradient synchronisation reads the gathered copy of every parameter,
    even in a unit that took no part in forward (an unused head, a dropped layer). The backward fails if there never was
    a copy.
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
    """Let forwards leave weights gathered inside the block; the settings of the modules are restored at the end.

    ``FSDPModule.set_reshard_after_forward`` changes the settings, but there is no public way to read them.
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
    """Drop the gradients of ``parameters`` that backwards without synchronisation have left in a unit.

    There is no public way to do so.
    """
    for group in _get_param_groups(module):
        chosen = [parameter for parameter in group.fsdp_params if parameter.sharded_param in parameters]
        for parameter in chosen:
            if hasattr(parameter, "_unsharded_param"):  # it was gathered at least once
                parameter._unsharded_param.grad = None
            if parameter.unsharded_accumulated_grad is not None:  # before torch 2.15 kept separately from `grad`
                parameter.unsharded_accumulated_grad = None
        if len(chosen) == len(group.fsdp_params):
            group._partial_reduce_output = None  # gradients of the whole unit, under HSDP
            getattr(group, "_partial_reduce_output_layout", {}).clear()  # since torch 2.15


def separate_unreduced_gradients(modules: Iterable[FSDPModule]) -> None:
    """Give its own memory to each gradient that backwards without synchronisation have left in units.

    Autograd may pass one tensor on as the gradient of several parameters (of a sum, or a concatenation), and copies it
    for all but the last holder. In DTensors each parameter looks like the only holder, so nothing is copied, and the
    next backward would add to the memory that all of them share.
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
    """Return the parameter groups of a unit: one or none in torch 2.11 (``_fsdp_param_group``), a list since then."""
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
