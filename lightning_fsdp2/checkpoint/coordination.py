"""What ranks do together around files: one rank acts, or all do, and every rank learns of a failure."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lightning_fsdp2.parallel.failures import fail_together, make_portable

T = TypeVar("T")


def get_rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 while the others wait, and return its result, or raise its error, on every rank.

    Args:
        action: What it returns is pickled.
        group: Of all ranks; a CPU group spares the accelerator.
    """
    result: Any = None
    failure: Exception | None = None
    if get_rank() == 0:
        try:
            result = action()
        except Exception as error:
            failure = error
    result, other = broadcast((result, make_portable(failure)), group)
    if other is not None:
        raise failure or other
    return cast(T, result)


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on every rank and return its result; where it fails on any, raise an error on all.

    Args:
        action: Must not communicate, since it may fail on some ranks only.
        group: Of all ranks.
    """
    groups = [cast(dist.ProcessGroup, group or dist.group.WORLD)] if dist.is_initialized() else []
    with fail_together(groups):
        return action()


def broadcast(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's ``value``."""
    if not dist.is_initialized():
        return value
    message = [value]
    dist.broadcast_object_list(message, src=0, group=group)
    return message[0]


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in their order."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
