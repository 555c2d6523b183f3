"""Rendezvous of the ranks at the start of a run, and a search for lost ranks after a collective has failed."""

import json
import os
import platform
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_fsdp2.ranks.failures import describe_ranks

_PROBE_TIMEOUT = timedelta(seconds=5)
"""Time that a rank waits, after a collective has failed, for the other ranks to report the same failure."""

_AGENT_TIMEOUT = timedelta(seconds=15)
"""Time to wait for the store of torchrun's agent. It is short, because the store exists before the ranks start."""

_GRACE_SECONDS = 5.0
"""Number of seconds that a rank waits for torch's own error once the time is up."""

_ATTEMPT_SECONDS = 5.0
"""Number of seconds after which a rank tries once more to reach the port, because a packet may have been lost."""

_LONGEST_PAUSE = 1.0
"""Longest number of seconds that a rank pauses while nothing listens at the port."""

_met = set[tuple[str, int]]()
"""Addresses and ports of stores at which this process has met all ranks. It may meet them there again."""

_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
_BACKLOG = 2048
"""Number of ranks that may wait to be connected to the store, as in torch."""

_MOST_NAMED = 5
_MOST_LISTED = 64
_MOST_CHARACTERS = 200

_CAME, _NUMBER, _ALL_CAME, _ALL_KNOW = "ranks that came", "number of ranks that came", "all came", "all know"
_LOST = "ranks that lost contact"


_CHECKS = (
    "MASTER_ADDR is its address and the same on all nodes, that no firewall blocks the port, and that no other program"
    " has the port (set MASTER_PORT to a free one)."
)
"""What else to check when a rank cannot reach the store."""


def meet(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    *,
    on_one_node: bool,
    timeout: timedelta,
    run: Mapping[str, str],
) -> Store:
    """Wait until every rank has reached the store at ``address:port``, and return the store.

    Args:
        address: Address of the store, which runs in rank 0 or in torchrun's agent.
        port: Port of the store.
        rank: This process's rank.
        world_size: Number of ranks to wait for.
        on_one_node: Whether all ranks are on this host.
        timeout: How long to wait for the other ranks.
        run: Values, by name, that must be the same on all ranks.

    Raises:
        OSError: On rank 0, when the port is taken.
        TimeoutError: When ranks are missing. The message names the missing ranks. It also names the ranks that
            arrived, and their hosts. Also when another program listens at the port.
        ValueError: On every rank, when ``run`` differs between ranks or two processes have the same rank. The message
            names the differences and the ranks. Also when the store belongs to another run.
    """
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not is_agents
    store_timeout = min(timeout, _AGENT_TIMEOUT) if is_agents else timeout
    waited = f"rendezvous_timeout={timeout}" if store_timeout == timeout else f"{store_timeout}"
    try:
        options = {"is_master": is_master, "on_one_node": on_one_node}
        server = _connect(address, port, world_size, timeout=store_timeout, **options)
        if server is None:
            _refuse_port_of_others(address, port, rank, waited)
        store: Any = PrefixStore(_get_prefix(is_agents, world_size), server)  # torch's stubs lack `append`
        number = _report_arrival(store, rank, world_size, run)
    except dist.DistError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise OSError(
                f"Port {port} is taken on {platform.node()} by another process; set MASTER_PORT to a free one."
            ) from error
        holder = "torchrun's agent" if is_agents else "rank 0"
        place = f"the store of {holder} at {address}:{port}"
        raise TimeoutError(
            f"Rank {rank} ({platform.node()}) could not reach {place} within {waited}: {str(error).splitlines()[0]}"
            f" Check that {holder} has started and still runs, that {_CHECKS}"
        ) from error
    if number > world_size and (address, port) not in _met:
        _refuse_store_of_others(address, port, rank, world_size)
    try:
        store.wait([_ALL_CAME], timeout)
        fault = store.get(_ALL_CAME).decode()
    except dist.DistError as error:
        raise TimeoutError(
            f"Rank {rank} ({platform.node()}) waited at {address}:{port} for all {world_size} ranks until"
            f" rendezvous_timeout={timeout} was over. {_say_who_came(store, world_size)} Look at the logs of the"
            " missing ranks, or check the nodes that have no logs."
        ) from error
    if fault:
        _leave_together(store, world_size)
        raise ValueError(fault)
    _met.add((address, port))
    return store


def _get_prefix(is_agents: bool, world_size: int) -> str:
    """Return the prefix of the keys of this attempt."""
    # torchrun may keep its store when it restarts the ranks, so each restart uses a different prefix for its keys.
    # When a host rejoins the run, its torchrun agent may count restarts differently. The ranks of this host would
    # then use a different prefix, and never meet the other ranks. To let hosts rejoin a run, turn torchrun's store
    # off (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1); rank 0 then starts a new store in each attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_agents else "0"
    return f"{attempt}/{world_size}"


def _leave_together(store: Store, world_size: int) -> None:
    """Let all ranks read the error before rank 0, which hosts the store, exits."""
    with suppress(dist.DistError):
        if store.add(_NUMBER, 1) == 2 * world_size:
            store.set(_ALL_KNOW, "")
        store.wait([_ALL_KNOW], _PROBE_TIMEOUT)


def _report_arrival(store: Any, rank: int, world_size: int, run: Mapping[str, str]) -> int:
    """Say that this rank has come, and return how many have. The last one compares what all have reported."""
    store.append(_CAME, json.dumps([rank, platform.node(), run]) + "\n")
    number: int = store.add(_NUMBER, 1)
    if number == world_size:
        store.set(_ALL_CAME, _find_fault(_read_arrivals(store), world_size))
    return number


def _connect(
    address: str, port: int, world_size: int, *, is_master: bool, on_one_node: bool, timeout: timedelta
) -> TCPStore | None:
    """Start or reach the store, for at most ``timeout``. Return None if what listens at the port does not answer.

    If another program holds the port, it may accept a connection and never answer. torch would wait for its answer
    without a limit, so a thread waits instead.
    """
    outcome: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            # if the store itself waited for the ranks, it would not say which ranks are missing
            options: dict[str, Any] = {"is_master": is_master, "wait_for_workers": False, "multi_tenant": True}
            if is_master and on_one_node:
                options["master_listen_fd"] = _listen_on_loopback(address, port)
            outcome.set_result(TCPStore(address, port, world_size, timeout=timeout, **options))
        except BaseException as error:
            outcome.set_exception(error)

    deadline = time.monotonic() + timeout.total_seconds()
    if not is_master:
        _wait_for_listener(address, port, deadline)
    threading.Thread(target=connect, daemon=True).start()
    # the store has about the same timeout, and says more about a program that closes the connection
    done, _ = wait([outcome], deadline - time.monotonic() + _GRACE_SECONDS)
    return outcome.result() if done else None


def _wait_for_listener(address: str, port: int, deadline: float) -> None:
    """Wait until a program listens at the port.

    torch would also wait, but for up to twice its timeout, and would at last try only once a minute.

    Raises:
        DistNetworkError: When nothing listens there at the time ``deadline``, or the address is unknown.
    """
    pause = 0.05
    while True:
        try:
            socket.create_connection((address, port), _ATTEMPT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise dist.DistNetworkError(f"{error}.") from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _refuse_port_of_others(address: str, port: int, rank: int, waited: str) -> NoReturn:
    raise TimeoutError(
        f"Rank {rank} ({platform.node()}) reached {address}:{port} within {waited}, but what listens there does not"
        f" answer like a store of torch. Port {port} is taken on {address} by another process; set MASTER_PORT to a"
        " free one."
    )


def _refuse_store_of_others(address: str, port: int, rank: int, world_size: int) -> NoReturn:
    raise ValueError(
        f"Rank {rank} ({platform.node()}) came to the store at {address}:{port} after all {world_size} ranks: port"
        f" {port} is taken by another run, or rank {rank} was started again. Set MASTER_PORT to a free one, or start"
        " all ranks again."
    )


def _listen_on_loopback(address: str, port: int) -> int | None:
    """Return a socket for the store of a run on one node, so that other hosts cannot reach the store.

    By default, torch's store listens on all interfaces. On several nodes, ``address`` may be a loopback address too:
    Kubeflow gives ``localhost`` to rank 0 only. Return None if ``address`` may be that of a network: a host's name may
    stand for a loopback address on this host only. Also return None if the port is taken, perhaps by a store of this
    process, which torch then uses again.
    """
    if not _LOOPBACK.fullmatch(address):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener.detach()


def refuse(differences: str) -> str:
    """Return an error message that quotes ``differences``, a description from :func:`tell_differences`."""
    return (
        f"All ranks of a run must have the same config and versions, but {differences}. Install the same versions on"
        " all nodes, and start all ranks with the same config."
    )


def tell_differences(descriptions: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str:
    """Describe how ranks differ, such as ``lr is 0.1 on rank 0 (node-a) and 0.2 on rank 1 (node-b)``.

    Args:
        descriptions: The values of each rank, by name.
        hosts: Host names of all ranks.

    Returns:
        The description, or an empty string if the ranks do not differ.
    """
    names = dict.fromkeys(name for description in descriptions for name in description)
    differences = [name for name in names if len({description.get(name) for description in descriptions}) > 1]
    told = [_tell_difference(name, descriptions, hosts) for name in differences[:_MOST_NAMED]]
    if len(differences) > len(told):
        told.append(f"and {len(differences) - len(told)} more")
    return "; ".join(told)


def say_who_answers(hosts: Sequence[str]) -> str:
    """Find out which ranks still answer after a collective has failed, and describe them in a sentence.

    This takes only seconds, even if the network is down.

    Args:
        hosts: Host names of all ranks.

    Returns:
        A sentence for the error message.
    """
    answered: list[int] = []
    # ask in a thread, because a call to the store can block for minutes if the network is down
    thread = threading.Thread(target=_ask_others, args=(len(hosts), answered), daemon=True)
    thread.start()
    thread.join(2 * _PROBE_TIMEOUT.total_seconds())
    own = describe_ranks([dist.get_rank()], hosts)
    if not answered:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"Rank {own} reaches neither the other ranks nor the store at {address}: this host has lost the network, or"
            f" the store's host is gone. The ranks were {describe_ranks(range(len(hosts)), hosts)}."
        )
    there = describe_ranks(answered, hosts)
    silent = [rank for rank in range(len(hosts)) if rank not in answered]
    if not silent:
        return f"All ranks have noticed this ({there}): one rank was too slow, or ran different code."
    return (
        f"The ranks {there} have noticed this. There is no report yet from {describe_ranks(silent, hosts)}: they may"
        " be waiting or gone; look at their logs, and check that their hosts are up."
    )


def _ask_others(world_size: int, answered: list[int]) -> None:
    """Report this rank's failed collective to the store. Fill ``answered`` with all ranks that report a failure."""
    store: Any = dist.group.WORLD.get_group_store()
    deadline = time.monotonic() + _PROBE_TIMEOUT.total_seconds()
    try:
        store.append(_LOST, f"{dist.get_rank()} ")
        while len(answered) < world_size and time.monotonic() < deadline:
            answered[:] = sorted({int(rank) for rank in store.get(_LOST).split()})
            time.sleep(0.1)
    except RuntimeError:  # the store no longer answers
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
        return "Rank 0 has already given up."
    missing = [rank for rank in range(world_size) if rank not in hosts]
    known = [hosts.get(rank, "") for rank in range(world_size)]
    return f"Ranks that arrived: {describe_ranks(sorted(hosts), known)}. Ranks that did not: {describe_ranks(missing)}."


def _read_arrivals(store: Any) -> list[tuple[int, str, dict[str, str]]]:
    """Return the rank, host and ``run`` values of each rank that has reached the store, in order of arrival."""
    return [json.loads(line) for line in store.get(_CAME).splitlines()]


def _find_fault(arrivals: Sequence[tuple[int, str, dict[str, str]]], world_size: int) -> str:
    """Return the error message for ranks that cannot form a run together, or an empty string if they can."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    if [rank for rank, _, _ in arrivals] != list(range(world_size)):
        counts = Counter(rank for rank, _, _ in arrivals)
        wrong = [f"{rank} ({host})" for rank, host, _ in arrivals if counts[rank] > 1 or rank >= world_size]
        return (
            f"The processes of a run must have the ranks 0 to {world_size - 1}, each once, but there are"
            f" {', '.join(wrong[:_MOST_LISTED])}{', ...' if len(wrong) > _MOST_LISTED else ''}. Give every node a"
            " number of its own (NODE_RANK, or torchrun's --node-rank)."
        )
    differences = tell_differences([run for _, _, run in arrivals], [host for _, host, _ in arrivals])
    return refuse(differences) if differences else ""
