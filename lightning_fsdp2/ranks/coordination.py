"""Coordination of ranks that read and write files: waiting for each other, acting on one rank, and sharing errors."""

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_fsdp2.compat.torch import set_group_timeout
from lightning_fsdp2.ranks.default_group import keep_with_default_group
from lightning_fsdp2.ranks.failures import describe_ranks, fail_together, make_portable

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives, unless the user sets another one. It is also torch's for gloo."""

_meetings: Counter[str] = Counter()
"""Number of calls of :func:`compare_in_store` in this process, by purpose and ranks."""


def get_rank() -> int:
    """Return this process's rank, or 0 if there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_group(purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return the CPU process group of all ranks for one purpose, creating it on first use.

    All Trainers of the process share the group, until the default group is destroyed.

    Args:
        purpose: Name of the purpose. Each purpose has its own group, so that messages cannot be mixed up.
        timeout: Timeout of the group's collectives, and of creating the group.
    """
    group: dist.ProcessGroup = keep_with_default_group(purpose, lambda: dist.new_group(backend="gloo", timeout=timeout))
    set_group_timeout(group, timeout)
    return group


def get_group_of_ranks(ranks: Sequence[int], purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return the CPU process group of some ranks for one purpose, as :func:`get_group` does for all ranks.

    Only these ranks create the group.
    """
    group: dist.ProcessGroup = keep_with_default_group(
        (purpose, *ranks), lambda: dist.new_group([*ranks], timeout, "gloo", use_local_synchronization=True)
    )
    set_group_timeout(group, timeout)
    return group


def shorten_timeout(timeout: timedelta, limit: timedelta) -> timedelta:
    """Return how long to wait at a point that all ranks should reach soon after each other.

    Args:
        timeout: Timeout of collectives. One that is longer than the default is returned as it is: whoever sets it
            expects ranks that come late.
        limit: Longest time otherwise.
    """
    return timeout if timeout > DEFAULT_TIMEOUT else min(timeout, limit)


def wait_for_all_ranks(purpose: str, timeout: timedelta, remedy: str) -> None:
    """Wait until every rank has reached the same point of the program, or raise an error that names the late ranks.

    torch's ``monitored_barrier`` cannot be used instead. It applies its timeout on rank 0 only, and does not notice
    that ranks have reached different points.

    Args:
        purpose: What this rank is about to do, as in "rank 0 wants to ...".
        timeout: Longest time to wait.
        remedy: Advice for the error message.

    Raises:
        RuntimeError: If a rank is missing when the time is up, has ended, or has reached a different point.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return
    code = zlib.crc32(purpose.encode())
    codes = torch.tensor([code, -code])
    # each rank sets a key in the store, because a collective that times out does not say which ranks are missing
    store, keys = cast(Any, dist.group.WORLD).get_group_store(), [f"{purpose} {rank}" for rank in range(ranks)]
    store.set(keys[dist.get_rank()], "")
    start = time.monotonic()
    try:
        group = get_group("rendezvous", timeout)
        dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=group, async_op=True).wait(timeout)
    except RuntimeError as error:
        is_late = time.monotonic() - start >= timeout.total_seconds()
        end = f"within {timeout}" if is_late else "before the connection to a rank ended"
        raise RuntimeError(
            f"Rank {dist.get_rank()} wants to {purpose}, but not every rank reached this point {end}"
            f"{name_missing_ranks(store, keys, range(ranks))}. {remedy}"
        ) from error
    store.delete_key(keys[dist.get_rank()])
    # The store disappears when the process of rank 0 ends, which may be right after this call.
    # Rank 0 therefore waits until the other ranks no longer need the store.
    dist.barrier(group)
    if codes.tolist() != [code, -code]:
        raise RuntimeError(
            f"Rank {dist.get_rank()} wants to {purpose}, but another rank wants to do something else. {remedy}"
        )


def compare_in_store(purpose: str, answer: str, ranks: Sequence[int], timeout: timedelta) -> dict[str, list[int]]:
    """Wait until all ``ranks`` have called this function, and return their answers if these differ.

    A rank that does not know whether the others will call cannot use a collective, which could be mixed up with those
    that the other ranks run instead. A call takes a few messages per rank, and none on a single rank.

    Args:
        purpose: Name of what the ranks compare. They can compare it any number of times.
        answer: This rank's answer.
        ranks: Ranks that compare, this rank among them, in the same order on all of them.
        timeout: Longest time to wait.

    Returns:
        The ranks that gave each answer; empty if all answers are equal.

    Raises:
        RuntimeError: If a rank is missing when the time is up. The text is that of :func:`name_missing_ranks`.
    """
    if len(ranks) == 1:
        return {}
    store, rank = cast(Any, dist.group.WORLD).get_group_store(), dist.get_rank()
    name = f"{purpose} of ranks {zlib.crc32(str([*ranks]).encode())}"
    _meetings[name] += 1  # numbers never begin again, so that no meeting finds keys of an earlier one
    result, earlier = (f"{name}, number {_meetings[name] - ago}" for ago in (0, 1))
    keys = {other: f"{result}, rank {other}" for other in ranks}
    store.set(keys[rank], answer)
    try:
        if rank == ranks[0]:  # the only one that reads all answers, which would be too many messages for every rank
            store.wait([*keys.values()], timeout)
            given: dict[str, list[int]] = {}
            for other, key in keys.items():
                given.setdefault(store.get(key).decode(), []).append(other)
            store.set(result, json.dumps(given if len(given) > 1 else {}))
            store.delete_key(earlier)  # all ranks have read it
        else:
            store.wait([result], timeout)
        found = json.loads(store.get(result))
        if found:
            # the caller is about to fail, and the store disappears with the process of the first rank
            store.set(f"{keys[rank]} knows", "")
            store.wait([f"{key} knows" for key in keys.values()] if rank == ranks[0] else [], timeout)
    except RuntimeError as error:
        raise RuntimeError(name_missing_ranks(store, [*keys.values()], ranks)) from error
    if not found:
        store.delete_key(keys[rank])
    return found


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 while the other ranks wait; return its result or raise its error on every rank.

    Args:
        action: Function to run; its result is pickled.
        group: Process group of all ranks. A CPU group communicates without the accelerator.
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
    """Run ``action`` on every rank and return its result; if it fails on any rank, raise an error on all ranks.

    Args:
        action: Function to run. It must not communicate, since it may fail on some ranks only.
        group: Process group of all ranks.
    """
    groups = [cast(dist.ProcessGroup, group or dist.group.WORLD)] if dist.is_initialized() else []
    with fail_together(groups):
        return action()


def broadcast(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's ``value`` on every rank."""
    if not dist.is_initialized():
        return value
    message = [value]
    dist.broadcast_object_list(message, src=0, group=group)
    return message[0]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def name_missing_ranks(store: Any, keys: Sequence[str], ranks: Sequence[int]) -> str:
    """Return the end of an error message that names the ranks without a key in ``store``, or "" if none is known.

    Args:
        store: Store in which every rank that has arrived has set its key.
        keys: Keys in the order of ``ranks``.
        ranks: Ranks that were waited for.
    """
    try:
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
    except RuntimeError:  # the store is gone, because the process that hosted it has ended
        return ""
    return f": {'ranks' if len(missing) > 1 else 'rank'} {describe_ranks(missing)} did not" if missing else ""
