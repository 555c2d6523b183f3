"""Metrics that schedulers such as ``ReduceLROnPlateau`` monitor: all ranks must step with the same value."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.compat.lightning_loops import agree_on_monitored_values
from lightning_fsdp2.ranks.coordination import wait_for_all_ranks

Agree = Callable[[str, Any], Any]


def agree_on_metrics(
    trainer: Trainer, module: LightningModule, group: dist.ProcessGroup | None, timeout: timedelta
) -> None:
    """Make all ranks step their schedulers with the same value of a metric, also if they have logged other values.

    Args:
        trainer: Trainer that runs ``fit``.
        module: Module whose schedulers step. With manual optimisation, those from its ``lr_schedulers()`` agree.
        group: CPU group of all ranks. None while a plan simulates the run.
        timeout: How long a rank waits for the others when a scheduler steps in manual optimisation.
    """
    if group is None or group.size() == 1:
        return
    agree = partial(_agree, group, set())
    agree_on_monitored_values(trainer, agree)
    if not module.automatic_optimization:
        get = partial(_get_schedulers, partial(type(module).lr_schedulers, module), agree, timeout)
        get_ledger(trainer).replace(module, "lr_schedulers", get, reason="each rank would set its own learning rate")


def _agree(group: dist.ProcessGroup, warned: set[str], name: str, value: Any) -> Any:
    """Return ``value`` if all ranks have the same, and otherwise the mean over the ranks that have a value."""
    own = torch.tensor([0.0, 0.0] if value is None else [1.0, float(value)], dtype=torch.float64)
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    known = [number for has_value, number in torch.stack(found).tolist() if has_value]
    if not known:
        return None
    if len(set(map(repr, known))) == 1:  # nan is not equal to itself, but its `repr` is
        return torch.tensor(known[0]) if value is None else value
    if name not in warned:
        warned.add(name)
        rank_zero_warn(
            f"A learning rate scheduler monitors {name}, which differs between the ranks ({min(known):.6g} to"
            f" {max(known):.6g}): each would set its own learning rate. All ranks use the mean over the ranks. Log the"
            " metric with `sync_dist=True`."
        )
    return torch.tensor(sum(known) / len(known), dtype=torch.float64)


def _get_schedulers(get: Callable[[], Any], agree: Agree, timeout: timedelta) -> Any:
    schedulers = get()
    if isinstance(schedulers, list):
        return [_guard(scheduler, agree, timeout) for scheduler in schedulers]
    return _guard(schedulers, agree, timeout)


def _guard(scheduler: Any, agree: Agree, timeout: timedelta) -> Any:
    """Return a view of a ``ReduceLROnPlateau`` with which all ranks step together; any other scheduler as it is.

    The view has the attributes of the scheduler, which stays unchanged, because checkpoints save all its attributes.
    """
    if not isinstance(scheduler, ReduceLROnPlateau):
        return scheduler
    kind = type(scheduler)

    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        remedy = "Call `step` of the scheduler on all ranks, or on none."
        wait_for_all_ranks("step ReduceLROnPlateau", timeout, remedy)
        kind.step(self, agree("the argument of `ReduceLROnPlateau.step`", metrics), *args, **kwargs)

    view: Any = object.__new__(type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__}))
    view.__dict__ = scheduler.__dict__
    return view
