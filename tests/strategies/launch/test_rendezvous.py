"""Ranks that do not come, or answer no longer, are named with their hosts."""

import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from helpers.ranks import raises_on_all_ranks, run_ranks
from helpers.strategies import STRATEGIES, Kind, fast_under
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

from lightning_fsdp2 import FSDP2Strategy
from lightning_fsdp2.callbacks import ProcessGroupTimeout
from lightning_fsdp2.ranks.failures import describe_ranks
from lightning_fsdp2.strategies.launch import rendezvous as peers

HOSTS = ["a", "a", "b", "b"]


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks each."""
    monkeypatch.setattr(platform, "node", lambda: HOSTS[int(os.environ["RANK"])])


@pytest.mark.parametrize(
    ("ranks", "hosts", "text"),
    [
        ([0, 1, 2, 3], HOSTS, "0-1 (a), 2-3 (b)"),
        ([0, 2, 3], HOSTS, "0 (a), 2-3 (b)"),
        ([0, 2, 3, 5, 7], ["a"] * 8, "0, 2-3, 5, 7 (a)"),
        ([1, 3], ["a", "", "b", ""], "1, 3"),
        ([0, 1, 2], [], "0-2"),
        (
            range(18),
            [f"h{rank}" for rank in range(18)],
            ", ".join(f"{n} (h{n})" for n in range(16)) + " and 2 more hosts",
        ),
    ],
)
def test_ranks_in_words(ranks: Sequence[int], hosts: list[str], text: str) -> None:
    assert describe_ranks(ranks, hosts) == text


# ---------------------------------------------------------------------- the start


def start(rendezvous_timeout: timedelta, **environment: str) -> str:
    """What a run of four ranks says on a rank."""
    os.environ.update(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", **environment)
    strategy = FSDP2Strategy(rendezvous_timeout=rendezvous_timeout)
    trainer = make_trainer(strategy, devices=4)
    with pytest.raises(TimeoutError) as error:
        trainer.fit(Regressor(), make_batches(1))
    return str(error.value)


@pytest.mark.guarantees("rendezvous")
def test_ranks_that_do_not_come_are_named() -> None:
    for rank, message in enumerate(run_ranks(start, 3, timedelta(seconds=2), group=False)):
        assert f"Rank {rank} ({HOSTS[rank]}) waited at 127.0.0.1:" in message
        assert " for all 4 ranks until rendezvous_timeout=0:00:02 was over. " in message
        arrived = "Ranks that arrived: 0-1 (a), 2 (b). Ranks that did not: 3."
        assert arrived in message or "Rank 0 has already given up." in message


def test_a_rank_0_that_does_not_come_is_named() -> None:
    def run() -> str:
        os.environ["RANK"] = "3"
        return start(timedelta(seconds=1), MASTER_ADDR="127.0.0.1")

    [message] = run_ranks(run, 1, group=False)
    assert message.startswith("Rank 3 (b) could not reach the store of rank 0 at 127.0.0.1:")
    assert "Check that rank 0 has started and still runs, that MASTER_ADDR is its address" in message


def test_a_rank_0_that_does_not_come_is_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds, torch's pauses between its attempts are longer than the time that is left."""
    monkeypatch.setattr(peers, "TCPStore", lambda *args, **options: time.sleep(60))
    monkeypatch.setattr(peers, "_GRACE_SECONDS", 0.1)

    def run() -> str:
        port = int(os.environ["MASTER_PORT"])
        with pytest.raises(TimeoutError) as error:
            peers.meet("127.0.0.1", port, 1, 2, on_one_node=True, timeout=timedelta(seconds=0.5), run={})
        return str(error.value)

    [message] = run_ranks(run, 1, group=False)
    assert message.startswith("Rank 1 (a) could not reach the store of rank 0 at 127.0.0.1:")
    assert "within rendezvous_timeout=0:00:00.500000: [Errno 111] Connection refused. Check that rank 0" in message


def test_an_unknown_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*args: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(dist.DistNetworkError, match="Name or service not known"):
        peers._wait_for_listener("node-0", 1, time.monotonic())


def test_a_rank_0_that_comes_late_is_met() -> None:
    def run() -> float:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        time.sleep(3 * (rank == 0))
        start = time.monotonic()
        store = peers.meet("127.0.0.1", port, rank, 2, on_one_node=True, timeout=timedelta(seconds=20), run={})
        seconds = time.monotonic() - start
        if rank == 1:
            store.set("has met", "")
        else:
            store.wait(["has met"])  # rank 0 has the store
        return seconds

    assert run_ranks(run, 2, group=False)[0] < 2, "the other one looks often"


def test_the_wait_for_an_agent_is_not_called_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_AGENT_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(peers, "_GRACE_SECONDS", 0.1)

    def run() -> None:
        port = int(os.environ["MASTER_PORT"])
        Listener(port, say_nothing)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with pytest.raises(TimeoutError, match=r"reached 127\.0\.0\.1:\d+ within 0:00:00\.500000, but what listens"):
            peers.meet("127.0.0.1", port, 0, 2, on_one_node=True, timeout=timedelta(minutes=10), run={})

    run_ranks(run, 1, group=False)


def test_an_agent_of_torchrun_that_has_ended_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that still imported torch then would hold their devices for all of rendezvous_timeout."""
    monkeypatch.setattr(peers, "_AGENT_TIMEOUT", timedelta(seconds=1))

    def run() -> str:
        return start(timedelta(minutes=10), MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")

    [message] = run_ranks(run, 1, group=False)
    assert "could not reach the store of torchrun's agent" in message


def test_agents_that_have_counted_other_restarts_meet() -> None:
    def run() -> int:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
        trainer = make_trainer(FSDP2Strategy(rendezvous_timeout=timedelta(seconds=20)), devices=2)
        trainer.fit(Regressor(), DataLoader(make_batches(2), batch_size=None))
        return trainer.global_step

    assert run_ranks(run, 2, group=False) == [2, 2]


def test_two_nodes_of_the_same_number_are_named() -> None:
    def run() -> str:
        os.environ["RANK"] = ("0", "1", "1", "2")[int(os.environ["RANK"])]
        os.environ.update(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
        with pytest.raises(ValueError, match="must have the ranks") as error:
            make_trainer(devices=4).fit(Regressor(), make_batches(1))
        return str(error.value)

    for message in run_ranks(run, 4, group=False):
        assert "the ranks 0 to 3, each once, but there are 1 (a), 1 (a). Give every node a number" in message


def test_rank_0_whose_store_it_is_waits_until_all_know_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(PrefixStore):
        def get(self, key: str) -> bytes:
            if key == peers._ALL_CAME and os.environ["RANK"] == "1":
                time.sleep(0.5)
            return super().get(key)

    monkeypatch.setattr(peers, "PrefixStore", Slow)

    def run() -> None:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        peers.meet("127.0.0.1", port, rank, 2, on_one_node=True, timeout=timedelta(seconds=20), run={"lr": f"0.{rank}"})

    with raises_on_all_ranks(ValueError, match=r"lr is 0\.0 on rank 0 \(\w+\) and 0\.1 on rank 1"):
        run_ranks(run, 2, group=False)


@pytest.mark.guarantees("loopback")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_one_node_listens_on_the_loopback_only(address: str) -> None:
    """Any other address of this host reaches a store that listens on all interfaces."""

    def run() -> list[bool]:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        store = peers.meet(address, port, rank, 2, on_one_node=True, timeout=timedelta(seconds=20), run={})
        found = []
        for host in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as client:
                found.append(client.connect_ex((host, port)) == 0)
        if rank == 1:
            store.set("checked", "")
        else:
            store.wait(["checked"])  # rank 0 has the store
        return found

    assert run_ranks(run, 2, group=False) == [[True, False]] * 2


def test_kubeflow_gives_localhost_to_the_first_of_several_nodes() -> None:
    """The others get its name in the network, for which another address of this host stands here."""

    def run() -> int:
        os.environ["MASTER_ADDR"] = "localhost" if os.environ["RANK"] == "0" else "127.0.0.2"
        strategy = FSDP2Strategy(rendezvous_timeout=timedelta(seconds=20))
        trainer = make_trainer(strategy, devices=1, num_nodes=2, plugins=[KubeflowEnvironment()], max_steps=1)
        trainer.fit(Regressor(), DataLoader(make_batches(2), batch_size=None))
        return trainer.global_step

    assert run_ranks(run, 2, group=False) == [1, 1]


@pytest.mark.parametrize("address", ["node-1", "10.0.0.1", "127.example.org", "localhost.example.org"])
def test_other_addresses_are_left_to_torch(address: str) -> None:
    assert peers._listen_on_loopback(address, 0) is None


def test_a_process_meets_twice_at_the_same_port() -> None:
    def run() -> list[bytes]:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        stores = []
        for attempt in ("0", "1"):
            os.environ.update(TORCHELASTIC_RESTART_COUNT=attempt)
            stores.append(
                peers.meet("127.0.0.1", port, rank, 1, on_one_node=True, timeout=timedelta(seconds=20), run={})
            )
            stores[-1].set("key", attempt)
        return [store.get("key") for store in stores]

    assert run_ranks(run, 1, group=False) == [[b"1", b"1"]]


def test_only_so_many_ranks_are_listed() -> None:
    for ranks, end in ((64, "31 (a), 31 (a). Give every"), (66, "31 (a), 31 (a), .... Give every")):
        arrivals = [(rank // 2, "a", {}) for rank in range(ranks)]
        assert end in peers._find_fault(arrivals, ranks)
    several = [(rank, "a", {}) for rank in (*range(99), 98)]
    assert "each once, but there are 98 (a), 98 (a). Give every" in peers._find_fault(several, 100)


def test_a_port_that_is_taken_is_named() -> None:
    def run() -> None:
        os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        with taken, pytest.raises(OSError, match=r"Port \d+ is taken on a by another process; set MASTER_PORT"):
            make_trainer(FSDP2Strategy(), devices=2).fit(Regressor(), make_batches(1))

    run_ranks(run, 1, group=False)


class Listener(threading.Thread):
    """Another program at a port: ``answer`` gets each connection."""

    def __init__(self, port: int, answer: Callable[[socket.socket], None]) -> None:
        super().__init__(daemon=True)
        self.answer, self.connections = answer, list[socket.socket]()
        self.server = socket.create_server(("", port))
        self.start()

    def run(self) -> None:
        while True:
            connection, _ = self.server.accept()
            self.connections.append(connection)  # which would otherwise be closed
            self.answer(connection)


def say_nothing(connection: socket.socket) -> None:
    pass


def hang_up(connection: socket.socket) -> None:
    connection.close()


def talk_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: keep-alive\r\n\r\n" * 10)


@pytest.mark.guarantees("rendezvous", "taken-port")
@pytest.mark.parametrize("answer", [say_nothing, hang_up, talk_http])
def test_a_port_that_is_taken_is_named_by_all_ranks(
    answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 cannot listen there; the others reach the other program, and torch would wait for what it never says."""
    # torch pauses for up to 1.7 seconds between its attempts, and then tells what it saw
    monkeypatch.setattr(peers, "_GRACE_SECONDS", 5.0 if answer is hang_up else 1.0)
    seconds = 1.0

    def run() -> str:
        os.environ.update(WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
        port, rank = int(os.environ["MASTER_PORT"]), os.environ["RANK"]
        if rank == "0":
            Listener(port, answer)
        wait_until_it_listens(port)
        start = time.monotonic()
        strategy = FSDP2Strategy(rendezvous_timeout=timedelta(seconds=seconds))
        with pytest.raises(OSError, match="MASTER_PORT to a free one") as error:
            make_trainer(strategy, devices=3).fit(Regressor(), make_batches(1))
        assert time.monotonic() - start < 10 * seconds
        time.sleep(3 * seconds if rank == "0" else 0)  # the port is taken for as long as the others wait
        return str(error.value)

    first, *others = run_ranks(run, 3, group=False)
    assert re.fullmatch(r"Port \d+ is taken on a by another process; set MASTER_PORT to a free one\.", first)
    for rank, message in enumerate(others, start=1):
        assert message.startswith(f"Rank {rank} ({HOSTS[rank]}) ")
        if answer is say_nothing:
            assert "within rendezvous_timeout=0:00:01, but what listens there does not answer like a store" in message
            assert re.search(r"Port \d+ is taken on 127\.0\.0\.1 by another process; set MASTER_PORT to", message)
        if answer is hang_up:
            assert "could not reach the store of rank 0" in message
            assert "that no other program has the port (set MASTER_PORT to a free one)" in message


def wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)


def test_a_port_that_another_run_has_is_named() -> None:
    """Its store answers: the rank would join that run, and hang in the first group."""

    def run() -> None:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        options: dict[str, Any] = {"on_one_node": True, "timeout": timedelta(seconds=20), "run": {}}
        store = peers.meet("127.0.0.1", port, min(rank, 1), 2, **options) if rank < 2 else None
        if store is not None:
            store.set(f"{rank} has met", "")
            store.wait(["2 was refused"])
            peers.meet("127.0.0.1", port, rank, 2, **options)  # the same run once more
            store.set(f"{rank} has met twice", "")
            if rank == 0:  # the store ends with it
                store.wait(["1 has met twice"])
            return
        other = PrefixStore("0/2", TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False))
        other.wait(["0 has met", "1 has met"])
        with pytest.raises(
            ValueError, match=r"Rank 1 \(b\) came to the store at .* after all 2 ranks: port \d+ is tak"
        ):
            peers.meet("127.0.0.1", port, 1, 2, **options)
        other.set("2 was refused", "")

    run_ranks(run, 3, group=False)


# ---------------------------------------------------------------------- later


@pytest.mark.guarantees("silent-ranks")
@fast_under("fsdp2")
def test_a_rank_that_answers_no_longer_is_named(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PROBE_TIMEOUT", timedelta(seconds=2))
    found = tmp_path / "found"

    class Stops(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
            while trainer.global_step == 2 and trainer.global_rank == 1 and not found.exists():
                time.sleep(0.01)

    def run() -> str:
        trainer = kind.make_trainer(callbacks=[Stops(), ProcessGroupTimeout(timedelta(seconds=1))], max_steps=4)
        with pytest.raises(RuntimeError) as error:
            trainer.fit(Regressor(), make_loader(make_batches(12)))
        found.touch()
        return str(error.value)

    for message in kind.run(run, 3)[::2]:
        assert "Timed out waiting 1000ms" in message
        assert (
            "Another rank has ended or no longer answers. The ranks 0 (a), 2 (b) have noticed this. There is no report"
            " yet from 1 (a): they may be waiting or gone; look at their logs, and check that their hosts are up."
        ) in message


def test_a_rank_that_was_only_slow_is_not_accused() -> None:
    class IsSlow(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 2 and trainer.global_rank == 1:
                time.sleep(2)

    def run() -> str:
        strategy = FSDP2Strategy(steady_timeout=timedelta(seconds=1))
        trainer = make_trainer(strategy, callbacks=[IsSlow()], max_steps=4)
        with pytest.raises(RuntimeError) as error:
            trainer.fit(Regressor(), make_loader(make_batches(12)))
        return str(error.value)

    assert "All ranks have noticed this (0-1 (a), 2 (b)): one rank was too slow" in run_ranks(run, 3)[0]


def test_without_a_store_it_says_that_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def append(self, *args: Any) -> None:
            time.sleep(60)

    def run() -> str:
        monkeypatch.setattr(peers, "_PROBE_TIMEOUT", timedelta(seconds=0.1))
        with patch.object(type(dist.group.WORLD), "get_group_store", lambda self: Gone()):
            return peers.say_who_answers(HOSTS[:2])

    assert run_ranks(run, 2)[1].startswith("Rank 1 (a) reaches neither the other ranks nor the store at 127.0.0.1:")


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize("strategy", [kind.strategy for kind in STRATEGIES.values()], ids=STRATEGIES)
@pytest.mark.parametrize("name", ["timeout", "rendezvous_timeout", "steady_timeout"])
def test_wrong_timeouts(strategy: type[Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"{strategy.__name__}\({name}=30\) must be a timedelta; pass timedelta"):
        strategy(**{name: 30})
    with pytest.raises(ValueError, match=rf"{strategy.__name__}\({name}='0:00:00'\) must be longer than 0"):
        strategy(**{name: timedelta(0)})


def test_two_steady_timeouts_are_one_too_many() -> None:
    def run() -> None:
        strategy = FSDP2Strategy(steady_timeout=timedelta(minutes=1))
        trainer = make_trainer(strategy, callbacks=[ProcessGroupTimeout()])
        with pytest.raises(ValueError, match=r"steady_timeout='0:01:00'.* adds a ProcessGroupTimeout, but the Trainer"):
            trainer.fit(Regressor(), make_loader(make_batches(2)))

    run_ranks(run, 1)
