"""Errors that are raised on every rank: whoever goes on alone waits for the others in the next collective."""

import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fail_together(groups: Sequence[dist.ProcessGroup] = ()) -> Iterator[None]:
    """Raise the error of one rank on all of them, at the end of the block; every rank must enter it.

    Args:
        groups: Along which an error, passed on by one after the other, reaches all ranks. None for one process.

    Raises:
        Exception: The one of the block, or that of the first other rank that has one.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    for group in groups:
        failures: list[Exception | None] = [None] * group.size()
        dist.all_gather_object(failures, make_portable(failure), group=group)
        failure = failure or next((other for other in failures if other is not None), None)
    if failure is not None:
        raise failure


def list_names(names: Collection[str], most: int = 20) -> str:
    """Return names for an error, in order, of which there may be thousands."""
    more = len(names) - most
    return ", ".join([*sorted(names)[:most], *([f"{more} more"] if more > 0 else [])])


def make_portable(error: Exception | None) -> Exception | None:
    """Return an exception that can be sent: some cannot be pickled, and some only until somebody unpickles them."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
