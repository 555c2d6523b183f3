"""Raise one rank's error on every rank, because the other ranks would otherwise wait in a collective."""

import pickle
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch.distributed as dist

_LISTED = 16


class ExitOfAllRanks(SystemExit):
    """Exit that all ranks raise at the same point, so that no rank waits for another."""


@contextmanager
def fail_together(groups: Sequence[dist.ProcessGroup] = ()) -> Iterator[None]:
    """Raise an error on all ranks at the end of a ``with`` block if any rank failed in it.

    Every rank must enter the block.

    Args:
        groups: Process groups that share an error, one group after another. After the last group, all ranks must have
            the error. Empty for one process.

    Raises:
        Exception: This rank's own error, or else the error of the first rank that has one.
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
    """Return up to ``most`` names for an error message, sorted and joined by commas, and a count of the others."""
    more = len(names) - most
    return ", ".join([*sorted(names)[:most], *([f"{more} more"] if more > 0 else [])])


def describe_ranks(ranks: Iterable[int], hosts: Sequence[str] = ()) -> str:
    """Return ranks as text, such as ``0-7 (node-a), 8-15 (node-b)``.

    Args:
        ranks: Ranks in ascending order.
        hosts: Host of each rank, beginning with rank 0, or "" if the host is unknown. Hosts of the last ranks may be
            missing.
    """
    parts = []
    for host, of_host in groupby(ranks, key=lambda rank: hosts[rank] if rank < len(hosts) else ""):
        # within a run of consecutive numbers, number minus index is constant
        runs = [[rank for _, rank in run] for _, run in groupby(enumerate(of_host), key=lambda pair: pair[1] - pair[0])]
        numbers = _list([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs], "")
        parts.append(f"{numbers} ({host})" if host else numbers)
    return _list(parts, " hosts")


def make_portable(error: Exception | None) -> Exception | None:
    """Return ``error``, or a RuntimeError with the same text if ``error`` cannot be pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _list(parts: Sequence[str], what: str) -> str:
    more = f" and {len(parts) - _LISTED} more{what}" if len(parts) > _LISTED else ""
    return ", ".join(parts[:_LISTED]) + more
