"""Hooks on the gradients of sharded parameters, which all ranks must have on the same parameters."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.compat.gradients import HookedUnit, watch_gradients
from lightning_fsdp2.compat.torch import get_group_timeout
from lightning_fsdp2.parallel.data.fully_shard import get_fsdp_modules
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
    """Make the FSDP2 units in ``root`` run hooks on the gradients of their sharded parameters.

    A unit with hooks reduces its gradients in every backward, with the other ranks. So the ranks compare which
    parameters have hooks: in the first backward, in the first one after :func:`expect_new_hooks`, and whenever other
    parameters than before have hooks on this rank. Other backwards communicate nothing for that.

    Args:
        root: Module with units.
        mesh: Ranks that hold parts of ``root``. Nothing is compared if ranks are only simulated.
    """
    is_real = dist.is_initialized() and dist.get_backend() != "fake"
    agreement = root.__dict__[_ATTRIBUTE] = _Agreement(mesh.mesh.flatten().tolist() if is_real else [0])
    for module in get_fsdp_modules(root):
        agreement.units += watch_gradients(module, agreement.check)


def expect_new_hooks(root: nn.Module) -> None:
    """Make the ranks compare the hooks on parameters of ``root`` in the next backward. Call this on every rank."""
    if (agreement := root.__dict__.get(_ATTRIBUTE)) is not None:
        agreement.is_due = True


class _Agreement:
    """Agreement of the ranks on the parameters that have hooks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._agreed: dict[HookedUnit, list[Any]] = {}
        self.units: list[HookedUnit] = []
        self.is_due = True

    def check(self, unit: HookedUnit, hooked: list[Any]) -> None:
        """Compare the hooks of all units with those of the other ranks, if this is due or ``hooked`` is new.

        Raises:
            RuntimeError: If not every rank has come to compare them.
            ValueError: On every rank, if they differ.
        """
        if len(self._ranks) == 1 or not (self.is_due or hooked != self._agreed.get(unit, [])):
            return
        found = {unit: unit.find_hooked() for unit in self.units}
        names = sorted({unit.get_name(parameter) for unit, hooked in found.items() for parameter in hooked})
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
