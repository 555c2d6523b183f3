"""Wait for the other ranks at the start of a run, and report which are gone when some no longer answer."""

import json
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_fsdp2.ranks.failures import describe_ranks

_PROBE_TIMEOUT = timedelta(seconds=5)
"""Time that a rank without contact waits for the others to report the same, as all were in one collective."""

_AGENT_TIMEOUT = timedelta(seconds=15)
"""Time to wait for the store of torchrun's agent. The store is older than the ranks, but may be gone."""

_MOST_NAMED = 5
_MOST_LISTED = 64
_MOST_CHARACTERS = 200

_CAME, _NUMBER, _ALL_CAME, _ALL_KNOW = "ranks that came", "number of ranks that came", "all came", "all know"
_LOST = "ranks that lost contact"


def meet(address: str, port: int, rank: int, world_size: int, *, timeout: timedelta, run: Mapping[str, str]) -> Store:
    """Wait until every rank has reached the store at ``address:port``, and return the store.

    Args:
        address: Address of rank 0, which holds the store unless torchrun's agent does.
        port: Port of the store.
        rank: Number of this rank.
        world_size: Number of ranks to wait for.
        timeout: How long to wait for the other ranks.
        run: Values, by name, that must be the same on all ranks for them to communicate.

    Raises:
        OSError: When the port is taken.
        TimeoutError: When ranks are missing. The message names them, and the ranks that came with their hosts.
        ValueError: On every rank, when ``run`` differs or two processes have the same rank. The message says what
            differs and where.
    """
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store_timeout = min(timeout, _AGENT_TIMEOUT) if is_agents else timeout
    try:
        server = TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not is_agents,
            timeout=store_timeout,
            wait_for_workers=False,  # waiting here would not say which ranks are missing
            multi_tenant=True,
        )
        # torchrun may keep its store for later attempts, so every attempt has its own prefix. Two agents may count the
        # attempts differently, so a host can rejoin only if torchrun's store is not used
        # (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_agents else "0"
        store: Any = PrefixStore(f"{attempt}/{world_size}", server)  # torch's stubs lack `append`
        store.append(_CAME, json.dumps([rank, platform.node(), run]) + "\n")
        if store.add(_NUMBER, 1) == world_size:  # the last to come compares for all
            store.set(_ALL_CAME, _find_fault(_read_arrivals(store), world_size))
    except dist.DistError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise OSError(
                f"Port {port} is taken on {platform.node()} by another process; set MASTER_PORT to a free one."
            ) from error
        holder = "torchrun's agent" if is_agents else "rank 0"
        waited = f"rendezvous_timeout={timeout}" if store_timeout == timeout else f"{store_timeout}"
        raise TimeoutError(
            f"Rank {rank} ({platform.node()}) could not reach the store of {holder} at {address}:{port} within"
            f" {waited}: {str(error).splitlines()[0]} Check that {holder} has started and still runs, that"
            " MASTER_ADDR is its address and the same on all nodes, and that no firewall closes the port."
        ) from error
    try:
        store.wait([_ALL_CAME], timeout)
        fault = store.get(_ALL_CAME).decode()
    except dist.DistError as error:
        raise TimeoutError(
            f"Rank {rank} ({platform.node()}) waited rendezvous_timeout={timeout} for {world_size} ranks at"
            f" {address}:{port}. {_say_who_came(store, world_size)} Look into the logs of the missing ones, or at the"
            " nodes that have none."
        ) from error
    if fault:
        with suppress(dist.DistError):  # the store ends with rank 0, which waits only for a short time
            if store.add(_NUMBER, 1) == 2 * world_size:
                store.set(_ALL_KNOW, "")
            store.wait([_ALL_KNOW], _PROBE_TIMEOUT)
        raise ValueError(fault)
    return store


def refuse(differences: str) -> str:
    """Return the error message for the differences that :func:`tell_differences` has found."""
    return (
        f"The ranks of a run must be the same, and differ: {differences}. Install the same versions on all nodes, and"
        " start them with the same config."
    )


def tell_differences(descriptions: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str:
    """Describe how ranks differ, as in ``lr is 0.1 on rank 0 (node-a) and 0.2 on rank 1 (node-b)``; "" if they do not.

    Args:
        descriptions: The values of each rank, by name.
        hosts: Host names of all ranks.
    """
    names = dict.fromkeys(name for description in descriptions for name in description)
    differences = [name for name in names if len({description.get(name) for description in descriptions}) > 1]
    told = [_tell_difference(name, descriptions, hosts) for name in differences[:_MOST_NAMED]]
    if len(differences) > len(told):
        told.append(f"and {len(differences) - len(told)} more")
    return "; ".join(told)


def say_who_answers(hosts: Sequence[str]) -> str:
    """Find out which ranks have also lost contact, after a collective failed because a rank does not answer.

    This takes only seconds, whatever the state of the network.

    Args:
        hosts: Host names of all ranks.

    Returns:
        A sentence for the error message.
    """
    answered: list[int] = []
    # a call to a store that a dead link has cut off can block for minutes
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
    there = describe_ranks(answered, hosts)
    silent = [rank for rank in range(len(hosts)) if rank not in answered]
    if not silent:
        return f"All ranks notice it ({there}): one of them was too slow, or at another place."
    return (
        f"The same is noticed by the ranks {there}. Nothing is heard yet of {describe_ranks(silent, hosts)}: they wait"
        " for others, or are gone; see their logs, and whether their hosts live."
    )


def _ask_others(world_size: int, answered: list[int]) -> None:
    """Report that this rank has lost contact, and collect in ``answered`` all ranks that report the same."""
    store: Any = dist.group.WORLD.get_group_store()
    deadline = time.monotonic() + _PROBE_TIMEOUT.total_seconds()
    try:
        store.append(_LOST, f"{dist.get_rank()} ")
        while len(answered) < world_size and time.monotonic() < deadline:
            answered[:] = sorted({int(rank) for rank in store.get(_LOST).split()})
            time.sleep(0.1)
    except RuntimeError:  # the store is gone
        answered.clear()


def _tell_difference(name: str, descriptions: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str:
    places: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        places.setdefault(description.get(name, "missing"), []).append(rank)
    return f"{name} is " + " and ".join(
        f"{value[:_MOST_CHARACTERS]} on {'rank' if len(of_value) == 1 else 'ranks'} {describe_ranks(of_value, hosts)}"
        for value, of_value in places.items()
    )


def _say_who_came(store: Store, world_size: int) -> str:
    try:
        hosts = {rank: host for rank, host, _ in _read_arrivals(store)}
    except RuntimeError:
        return "Rank 0 gave up before."
    missing = [rank for rank in range(world_size) if rank not in hosts]
    known = [hosts.get(rank, "") for rank in range(world_size)]
    return f"These came: {describe_ranks(sorted(hosts), known)}. These did not: {describe_ranks(missing)}."


def _read_arrivals(store: Any) -> list[tuple[int, str, dict[str, str]]]:
    """Return rank, host and ``run`` of each rank that has come, in order of arrival."""
    return [json.loads(line) for line in store.get(_CAME).splitlines()]


def _find_fault(arrivals: Sequence[tuple[int, str, dict[str, str]]], world_size: int) -> str:
    """Return what is wrong with the ranks, once all have come; "" if nothing is."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    if [rank for rank, _, _ in arrivals] != list(range(world_size)):
        came = ", ".join(f"{rank} ({host})" for rank, host, _ in arrivals[:_MOST_LISTED])
        return (
            f"The processes of a run must be the ranks 0 to {world_size - 1}, and call themselves {came}"
            f"{', ...' if world_size > _MOST_LISTED else ''}. Give every node a number of its own (NODE_RANK, or"
            " torchrun's --node-rank)."
        )
    differences = tell_differences([run for _, _, run in arrivals], [host for _, host, _ in arrivals])
    return refuse(differences) if differences else ""
