"""Errors that are raised on every rank: whoever goes on alone waits for the others in the next collective."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fail_together(groups: Sequence[dist.ProcessGroup] = ()) -> Iterator[None]:
    """Raise the error of one rank on all of them, at the end of the block; every rank must enter it.

    Args:
        groups: Along which an error, passed on by one after the other, reaches all ranks. None for one process.

    Raises:
        ValueError: On the ranks without an error of their own, with the message of another's.
    """
    failure: str | None = None
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own, failure = error, f"{type(error).__name__}: {error}"
    for group in groups:
        failures = [failure] * group.size()
        dist.all_gather_object(failures, failure, group=group)
        failure = failure or next((other for other in failures if other is not None), None)
    if own is not None:
        raise own
    if failure is not None:
        raise ValueError(f"Another rank failed with {failure}")
