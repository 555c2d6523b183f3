"""Access to the private state that FSDP2 keeps on its modules. For gradients, see ``gradients.py``.

Tested with torch 2.11 to 2.15.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import is_in_backward


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
    # Clear the order of modules that an earlier forward recorded. Otherwise, FSDP2 would prefetch in this order. A
    # backward of that forward may still come. It then gathers each unit's weights without prefetching.
    # The attribute does not exist before the first forward.
    order = getattr(state._comm_ctx, "post_forward_order", [])
    for group in order:
        group._post_forward_indices.clear()
    order.clear()
    if state._modules_to_run_forward:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        if state._state_ctx.iter_forward_root is state:
            state._state_ctx.iter_forward_root = None
        for group in get_parameter_groups(module):
            group._training_state = TrainingState.IDLE
    for group in get_parameter_groups(module):
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
        for group in get_parameter_groups(module)
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
    groups = [group for module in modules for group in get_parameter_groups(module)]
    settings = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, setting in zip(groups, settings, strict=True):
            group.post_forward_mesh_info = setting


def get_parameter_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups of a unit: at most one in torch 2.11, and any number in later versions."""
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def get_parameter_name(parameter: Any) -> str:
    """Return the name of a unit's parameter in the root module; before the first forward, in its own module."""
    return parameter._param_fqn or parameter._module_info.param_name


@dataclass
class GatheredWeight:
    """One parameter of a unit while it is gathered."""

    name: str
    """Name in the root module."""

    whole: Tensor
    """Gathered weight, in the compute dtype. With tensor parallelism, this rank's part of it."""

    shard: Tensor
    """Storage of this rank's rows of :attr:`whole`, in the dtype and on the device of the weights at rest."""

    dim: int
    """Dim of :attr:`whole` along which the ranks hold shards."""

    is_replaced: bool
    """Whether the weight has other memory than what was gathered, or its module has another parameter."""


@dataclass
class GatheringRanks:
    """Ranks that gather a unit together."""

    ranks: list[int]
    """Global ranks, replicas included."""

    shards: dist.ProcessGroup | None
    """Group whose ranks hold the shards of one replica."""

    replicas: dist.ProcessGroup | None
    """Group whose ranks hold the same shard, one in each replica."""


class GatherWatcher(Protocol):
    """Functions that :func:`watch_gathered_weights` calls."""

    def check_first(self, weights: list[GatheredWeight], ranks: GatheringRanks) -> None:
        """Check weights without changes, at the end of the unit's first forward with gradients."""

    def write_back(self, weights: list[GatheredWeight], ranks: GatheringRanks) -> None:
        """Save weights that were changed in place, before their gathered copies are freed."""


def watch_gathered_weights(module: FSDPModule, watcher: GatherWatcher) -> None:
    """Tell ``watcher`` of weights that are changed in place while they are gathered.

    FSDP2 frees the gathered copy of a weight, and with it all changes. It keeps the copy's version number, which every
    change in place raises, when it gathers the weight again. So to compare version numbers is enough, which needs no
    operation on the device. torch has no public hook between a forward and the end of the gathered copies.
    """
    for group in get_parameter_groups(module):
        group.__class__ = _WatchedParamGroup
        group.watch(watcher)


@contextmanager
def drop_changes_in_place(modules: Iterable[FSDPModule]) -> Iterator[list[str]]:
    """Tell no watcher of changes that are made in the ``with`` block.

    The list that the block gets is filled at its end: the names of the weights that were changed.
    """
    groups = [g for module in modules for g in get_parameter_groups(module) if isinstance(g, _WatchedParamGroup)]
    names: list[str] = []
    for group in groups:
        group.is_paused = True
        group.note_versions()
    try:
        yield names
    finally:
        for group in groups:
            names += [get_parameter_name(parameter) for parameter in group.find_changed()]
            group.is_paused = False


_get_version = attrgetter("_version")


class _WatchedParamGroup(FSDPParamGroup):
    """Parameter group of a unit that tells a watcher of gathered weights that were changed in place."""

    def watch(self, watcher: GatherWatcher) -> None:
        self.watcher = watcher
        self.gathered: list[Tensor] = []
        self.owners: list[Any] = []
        self.versions: list[int] = []
        self.is_paused = False
        self.is_first = True

    def note_versions(self) -> None:
        """Note the version numbers of the weights, if they are gathered."""
        parameters: list[Any] = self.fsdp_params if self.is_unsharded else []
        weights = [(p, p._unsharded_param) for p in parameters]
        # tensor parallel layers change the local tensor, whose changes the DTensor around it does not count
        weights += [(p, weight._local_tensor) for p, weight in weights if isinstance(weight, DTensor)]
        # torch does not count changes of tensors that were made in inference mode
        self.owners = [p for p, weight in weights if not weight.is_inference()]
        self.gathered = [weight for _, weight in weights if not weight.is_inference()]
        self.versions = list(map(_get_version, self.gathered))

    def find_changed(self) -> list[Any]:
        """Return the parameters that were changed in place since the last call, or since they were gathered."""
        before, self.versions = self.versions, list(map(_get_version, self.gathered))
        if self.versions == before:
            return []
        changes = zip(self.owners, before, self.versions, strict=True)
        return list(dict.fromkeys(parameter for parameter, old, new in changes if old != new))

    def post_forward(self, module: Any, input: Any, output: Any) -> Any:
        if not (self.is_paused or is_in_backward()):  # a recomputed forward is checked when its weights are freed
            changed = self._report()
            if self.is_first and self.is_unsharded and torch.is_grad_enabled():
                self.is_first = False
                unchanged = [parameter for parameter in self.fsdp_params if parameter not in changed]
                self.watcher.check_first([_get_gathered(p) for p in unchanged], self._get_ranks())
            if changed and (self._use_post_forward_mesh or not self._reshard_after_forward):
                self._gather_again()
        return super().post_forward(module, input, output)

    def _to_unsharded(self) -> None:
        super()._to_unsharded()
        if not self.gathered:
            self.note_versions()

    def _to_sharded(self) -> None:
        self._report()
        self.gathered, self.versions = [], []
        super()._to_sharded()

    def _to_sharded_post_forward(self) -> None:
        self._report()
        self.gathered, self.versions = [], []
        super()._to_sharded_post_forward()

    def _report(self) -> list[Any]:
        """Tell the watcher of weights that were changed in place, and return their parameters."""
        changed = [] if self.is_paused else self.find_changed()
        if changed:
            self.watcher.write_back([_get_gathered(parameter) for parameter in changed], self._get_ranks())
        return changed

    def _gather_again(self) -> None:
        """Gather the changes of all ranks, since this rank's gathered copies have only its own."""
        self._to_sharded()
        self.unshard()
        self.wait_for_unshard()

    def _get_ranks(self) -> GatheringRanks:
        info: Any = self.mesh_info
        return GatheringRanks(
            ranks=info.mesh.mesh.flatten().tolist(),
            shards=getattr(info, "shard_process_group", None),
            replicas=getattr(info, "replicate_process_group", None),
        )


def _get_gathered(parameter: Any) -> GatheredWeight:
    shard, owner = parameter.sharded_param, parameter._module_info
    whole = _get_local(parameter._unsharded_param).detach()
    # under tensor parallelism, the module may have a plain tensor of the same memory meanwhile
    seen = owner.module._parameters.get(owner.param_name)
    tensors = [whole, *parameter.all_gather_outputs, *([] if seen is None else [_get_local(seen)])]
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return GatheredWeight(
        name=get_parameter_name(parameter),
        whole=whole,
        shard=shard._local_tensor.detach(),
        dim=parameter.fsdp_placement.dim,
        is_replaced=seen is None or (type(whole) is Tensor and len(memory) > 1),
    )


def _get_local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
