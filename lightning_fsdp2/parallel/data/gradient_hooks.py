"""Hooks on the gradients of sharded parameters, and placeholders for gradients that are not reduced yet.

All ranks must have hooks on the same parameters.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.gradients import UnitGradients, UnitParameter, get_hooks, get_unit_gradients
from lightning_fsdp2.compat.torch import call_at_end_of_backward, get_group_timeout, make_wrapper_subclass
from lightning_fsdp2.parallel.data.fully_shard import get_fsdp_modules
from lightning_fsdp2.parallel.data.gradients import UnreducedGradient
from lightning_fsdp2.ranks.coordination import compare_in_store
from lightning_fsdp2.ranks.failures import describe_ranks, list_names

_TIMEOUT = timedelta(minutes=5)
"""Longest time that a rank with a new hook waits for the same hook of the other ranks.

All ranks are in the same backward, so they arrive within a layer's backward of each other.
"""

_REMEDY = (
    "All ranks hold a part of each parameter and of its gradient, so register and remove hooks on all ranks, not under"
    " `if trainer.is_global_zero`. To log gradients, use `on_before_optimizer_step` on all ranks, or the callback"
    " lightning_fsdp2.callbacks.GradientNorm."
)

_ATTRIBUTE = "_lightning_fsdp2_gradient_hooks"


def run_gradient_hooks(root: nn.Module, mesh: DeviceMesh) -> None:
    """Make FSDP2 units run hooks on the gradients of their sharded parameters, and mark gradients that are not reduced.

    The hooks are those of ``Tensor.register_hook`` and ``Tensor.register_post_accumulate_grad_hook``. They run once in
    each backward, at its end. They get the gradient that this backward has computed on all ranks, a DTensor that is
    sharded like the parameter. As in autograd, a hook may return another gradient.

    A unit with hooks reduces its gradients in every backward, even if gradient synchronisation is off. That takes all
    ranks, so they compare which parameters have hooks: in the first backward, in the first one after
    :func:`expect_new_hooks`, and whenever other parameters than before have hooks on this rank. Other backwards
    communicate nothing for that.

    Args:
        root: Module with units.
        mesh: Ranks that hold parts of ``root``. Nothing is compared if ranks are only simulated.
    """
    is_real = dist.is_initialized() and dist.get_backend() != "fake"
    agreement = root.__dict__[_ATTRIBUTE] = _Agreement(root, mesh.mesh.flatten().tolist() if is_real else [0])
    for module in get_fsdp_modules(root):
        for gradients in get_unit_gradients(module):
            agreement.units.append(gradients)
            gradients.call_in_place_of_finish(_Unit(gradients, agreement).finish)


def expect_new_hooks(root: nn.Module) -> None:
    """Make the ranks compare the hooks on parameters of ``root`` in the next backward. Call this on every rank."""
    if (agreement := root.__dict__.get(_ATTRIBUTE)) is not None:
        agreement.is_due = True


class _Agreement:
    """Agreement of the ranks on the parameters that have hooks."""

    def __init__(self, root: nn.Module, ranks: Sequence[int]) -> None:
        self._root, self._ranks = root, ranks
        self._agreed: dict[UnitGradients, list[UnitParameter]] = {}
        self.units: list[UnitGradients] = []
        self.is_due = True

    def check(self, unit: UnitGradients, hooked: list[UnitParameter]) -> None:
        """Compare the hooks of all units with those of the other ranks, if this is due or ``hooked`` is new.

        Raises:
            RuntimeError: If not every rank has come to compare them.
            ValueError: On every rank, if they differ.
        """
        if len(self._ranks) == 1 or not (self.is_due or hooked != self._agreed.get(unit, [])):
            return
        found = {unit: unit.find_hooked() for unit in self.units}
        # without the root, names may be equal: FSDP2 takes each unit for a root if the module around them is no unit
        modules = {module: name for name, module in self._root.named_modules()}
        owners = [parameter.owner for hooked in found.values() for parameter in hooked]
        names = sorted(f"{modules[module]}.{name}".lstrip(".") for module, name in owners)
        timeout = get_group_timeout(cast(Any, dist.group.WORLD))
        timeout = timeout if self.is_due else min(timeout, _TIMEOUT)
        try:
            answers = compare_in_store("hooks on parameters", "\n".join(names), self._ranks, timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {dist.get_rank()} compares hooks on parameters (`register_hook`) with the other ranks, because"
                f" {'this is the first backward' if self.is_due else 'its hooks have changed'}: they are on"
                f" {list_names(names) or 'no parameter'}. But not every rank has come within {timeout}{error}."
                f" {_REMEDY}"
            ) from error
        if answers:
            raise ValueError(f"Hooks (`register_hook`) are not on all ranks: {_describe(answers)}. {_REMEDY}")
        self._agreed, self.is_due = found, False


def _describe(answers: dict[str, list[int]]) -> str:
    """Return the parameters that have hooks on some ranks only, with these ranks, as text."""
    world = sum(map(len, answers.values()))
    owners: dict[str, list[int]] = {}
    for answer, ranks in answers.items():
        for name in answer.splitlines():
            owners.setdefault(name, []).extend(ranks)
    on_some = {name: describe_ranks(sorted(ranks)) for name, ranks in owners.items() if len(ranks) < world}
    return list_names([f"{name} (only on rank {ranks})" for name, ranks in on_some.items()])


class _Unit:
    """Runner of the hooks on the parameters of a unit.

    If a module is called several times, FSDP2 finishes gradients several times in a backward, and each time adds to the
    gradient. So hooks run only at the end of the backward, when the gradient is complete.
    """

    def __init__(self, gradients: UnitGradients, agreement: _Agreement) -> None:
        self._gradients, self._agreement = gradients, agreement
        self._earlier: dict[UnitParameter, Tensor | None] = {}
        self._placeholders: dict[UnitParameter, UnreducedGradient] = {}

    def finish(self) -> None:
        """Finish gradients that backward has just computed."""
        gradients = self._gradients
        hooked = gradients.find_hooked()
        self._agreement.check(gradients, hooked)
        _check_not_gathered(gradients.find_hooked_while_gathered())
        if hooked:
            self._finish_for_hooks(hooked)
        elif gradients.are_reduced:
            self._take_placeholders_off()
            gradients.finish()
        else:
            unreduced = [parameter for parameter in gradients.parameters if parameter.has_unreduced_gradient]
            gradients.finish()
            self._put_placeholders_on(unreduced)

    def _finish_for_hooks(self, hooked: list[UnitParameter]) -> None:
        if self._take_placeholders_off():
            raise ValueError(
                f"A hook was registered on {hooked[0].name} in the middle of an accumulation window, so it would"
                " see the gradients of several micro-batches at once. Register hooks before the first micro-batch of an"
                " optimizer step; or set FSDP2Config(defer_fsdp_grad_sync=False), if there are no replicas."
            )
        for parameter in hooked:
            if parameter not in self._earlier:
                self._earlier[parameter] = parameter.shard.grad
                parameter.shard.grad = None
        is_last = self._gradients.is_last_backward
        self._gradients.finish_without_hooks(reduces=is_last)
        if is_last:
            call_at_end_of_backward(self._run_hooks)

    @torch.no_grad()
    def _run_hooks(self) -> None:
        """Run the hooks on the gradients of this backward, and add the gradients to those of earlier backwards."""
        earlier, self._earlier = self._earlier, {}
        for parameter, before in earlier.items():
            shard = parameter.shard
            if (gradient := shard.grad) is None:  # this backward has not used the parameter
                shard.grad = before
                continue
            hooks, hooks_after = get_hooks(shard)
            for hook in hooks:
                gradient = _call_hook(hook, gradient, parameter.name)
            shard.grad = gradient if before is None else before.add_(gradient)
            for hook in hooks_after:
                hook(shard)

    def _put_placeholders_on(self, unreduced: list[UnitParameter]) -> None:
        for parameter in unreduced:
            shard = parameter.shard
            if shard.grad is None:
                if parameter not in self._placeholders:
                    self._placeholders[parameter] = make_wrapper_subclass(UnreducedGradient, shard)
                shard.grad = self._placeholders[parameter]

    def _take_placeholders_off(self) -> bool:
        """Remove the placeholders, and return whether there were any."""
        shards = [parameter.shard for parameter in self._gradients.parameters]
        marked = [shard for shard in shards if isinstance(shard.grad, UnreducedGradient)]
        for shard in marked:
            shard.grad = None
        return bool(marked)


def _check_not_gathered(hooked: list[UnitParameter]) -> None:
    """Refuse hooks on gathered parameters, which autograd has run on the gradient of this rank alone."""
    if hooked:
        raise ValueError(
            f"A hook was registered on {hooked[0].name} while a step had the parameter gathered, so it would see only"
            " this rank's part of the gradient. Register hooks outside of steps, such as in `on_train_start` or"
            " `on_train_batch_start`."
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
