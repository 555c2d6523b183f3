"""The other ranks of a run: waiting for them at its start, and saying which are gone when they answer no longer."""

import os
import platform
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_PROBE_TIMEOUT = timedelta(seconds=5)
"""How long ranks that lost contact wait for the others to say the same: all were in one collective."""

_LISTED_HOSTS = 16

_ARRIVED, _ALL_ARRIVED, _HOST, _LOST = "arrived", "all arrived", "host of rank", "lost contact, rank"


def meet(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Wait until every rank has come to the store at ``address:port``, and return it.

    Args:
        address: Of rank 0, which holds the store unless torchrun's agent does.
        port: Of the store.
        rank: This rank.
        world_size: Number of ranks to wait for.
        timeout: After which this fails.

    Raises:
        OSError: When the port is taken.
        TimeoutError: With the ranks that did not come, and the hosts of those that did.
    """
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        server = TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not is_agents,
            timeout=timeout,
            wait_for_workers=False,  # which does not say for whom
            multi_tenant=True,
        )
        # torchrun may keep its store for the attempts that follow; the counts of two agents need not be the same, so
        # that hosts come back only to stores of their own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_agents else "0"
        store = PrefixStore(f"{attempt}/{world_size}", server)
        store.set(f"{_HOST} {rank}", platform.node())
        if store.add(_ARRIVED, 1) == world_size:
            store.set(_ALL_ARRIVED, "")
    except dist.DistError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise OSError(
                f"Port {port} is taken on {platform.node()} by another process; set MASTER_PORT to a free one."
            ) from error
        raise TimeoutError(
            f"Rank {rank} ({platform.node()}) could not reach the store of rank 0 at {address}:{port} within"
            f" rendezvous_timeout={timeout}: {str(error).splitlines()[0]} Check that rank 0 has started, that"
            " MASTER_ADDR is its address and the same on all nodes, and that no firewall closes the port."
        ) from error
    try:
        store.wait([_ALL_ARRIVED], timeout)
    except dist.DistError as error:
        raise TimeoutError(
            f"Rank {rank} ({platform.node()}) waited rendezvous_timeout={timeout} for {world_size} ranks at"
            f" {address}:{port}. {_say_who_came(store, world_size)} Look into the logs of the missing ones, or at the"
            " nodes that have none."
        ) from error
    return store


def describe_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Write ranks as in ``0-7 (node-a), 8-15 (node-b)``.

    Args:
        ranks: Ascending.
        hosts: Of all ranks, or as many as are known; "" for one that is not.
    """
    parts = []
    for host, of_host in groupby(ranks, key=lambda rank: hosts[rank] if rank < len(hosts) else ""):
        # what is one run of numbers keeps its distance to the place in the list
        runs = [[rank for _, rank in run] for _, run in groupby(enumerate(of_host), key=lambda pair: pair[1] - pair[0])]
        numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        parts.append(f"{numbers} ({host})" if host else numbers)
    more = f" and {len(parts) - _LISTED_HOSTS} more hosts" if len(parts) > _LISTED_HOSTS else ""
    return ", ".join(parts[:_LISTED_HOSTS]) + more


def say_who_answers(hosts: Sequence[str]) -> str:
    """Find out which ranks have lost contact, too, behind a collective that failed because one does not answer.

    Args:
        hosts: Of all ranks.

    Returns:
        A sentence for the error; it takes seconds, whatever state the network is in.
    """
    answered: list[int] = []
    # a call to a store behind a dead link can wait for minutes
    thread = threading.Thread(target=_ask_others, args=(len(hosts), answered), daemon=True)
    thread.start()
    thread.join(2 * _PROBE_TIMEOUT.total_seconds())
    own = describe_ranks([dist.get_rank()], hosts)
    if not answered:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"Rank {own} reaches neither the other ranks nor the store at {address}: its own host has lost the network,"
            f" or that of the store is gone. The ranks were {describe_ranks(range(len(hosts)), hosts)}."
        )
    there = describe_ranks(sorted(answered), hosts)
    silent = [rank for rank in range(len(hosts)) if rank not in answered]
    if not silent:
        return f"All ranks notice it ({there}): one of them was too slow, or at another place."
    return (
        f"The same is noticed by the ranks {there}. Nothing is heard yet of {describe_ranks(silent, hosts)}: they wait"
        " for others, or are gone; see their logs, and whether their hosts live."
    )


def _ask_others(world_size: int, answered: list[int]) -> None:
    """Say that this rank is there, and collect those that do the same."""
    store = dist.group.WORLD.get_group_store()
    deadline = time.monotonic() + _PROBE_TIMEOUT.total_seconds()
    try:
        store.set(f"{_LOST} {dist.get_rank()}", "")
        while len(answered) < world_size and time.monotonic() < deadline:
            others = set(range(world_size)) - set(answered)
            answered += [rank for rank in others if store.check([f"{_LOST} {rank}"])]
            time.sleep(0.1)
    except RuntimeError:  # the store is gone
        answered.clear()


def _say_who_came(store: Store, world_size: int) -> str:
    try:
        came = [rank for rank in range(world_size) if store.check([f"{_HOST} {rank}"])]
        hosts = [store.get(f"{_HOST} {rank}").decode() if rank in came else "" for rank in range(world_size)]
    except RuntimeError:
        return "Rank 0 gave up before."
    missing = [rank for rank in range(world_size) if rank not in came]
    return f"These came: {describe_ranks(came, hosts)}. These did not: {describe_ranks(missing, hosts)}."
