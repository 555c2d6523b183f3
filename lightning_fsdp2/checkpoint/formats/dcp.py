"""Calls of ``torch.distributed.checkpoint`` (DCP), whose errors are not ``Exception``s and hide their causes."""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from lightning_fsdp2.checkpoint.files.drafts import AnyPath
from lightning_fsdp2.checkpoint.files.storage import get_reason
from lightning_fsdp2.ranks.coordination import get_rank
from lightning_fsdp2.ranks.failures import describe_ranks


def call_dcp(action: Callable[[], Any], path: AnyPath) -> None:
    """Run ``action``, and convert an error of DCP to an ``Exception``.

    When a rank fails, DCP raises a ``BaseException``, which a user's ``except Exception`` would not catch.

    Raises:
        KeyboardInterrupt: On a rank that was interrupted. The other ranks raise a RuntimeError.
    """
    try:
        with _without_warning():
            action()
    except CheckpointException as error:
        _raise_interrupt(path, {rank: cause for rank, (cause, _) in error.failures.items()})
        causes = [cause for cause, _ in error.failures.values() if isinstance(cause, Exception)]
        for cause in causes:
            if isinstance(cause, OSError) or (isinstance(cause, ValueError) and str(path) in str(cause)):
                raise cause from error  # the cause's own message already explains the failure
        reasons = "; ".join(map(get_reason, causes)) or error
        raise RuntimeError(
            f"The checkpoint {str(path)!r} could not be written or read: {reasons}. If this was a read,"
            f" `lightning-fsdp2 verify {path}` names the damaged files."
        ) from error


def _raise_interrupt(path: AnyPath, failures: Mapping[int, BaseException]) -> None:
    ranks = [rank for rank, cause in failures.items() if not isinstance(cause, Exception)]
    if get_rank() in ranks:
        raise failures[get_rank()]
    if ranks:
        raise RuntimeError(f"Rank {describe_ranks(ranks)} was interrupted while it wrote or read {str(path)!r}.")


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress, inside the block, DCP's warning that there is no process group.

    Warning filters apply to the whole process, so a background thread must not change them. A background thread always
    has a process group, so DCP does not warn there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
