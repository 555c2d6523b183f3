"""Hosts on one machine: network namespaces with host names of their own, on one virtual switch.

Everything a host runs dies with :meth:`Host.kill`, as when its power is cut, and :meth:`Host.unplug` cuts its network
alone, so that nobody learns of it.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None,
    reason="makes network namespaces: needs root, iproute2 and util-linux",
)


class Host:
    """One namespace."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.interface = f"{name}-eth"

    def start(self, command: Sequence[str], log: Path, **environment: str) -> "subprocess.Popen[Any]":
        """Run ``command`` on the host, with its output behind what is in ``log``."""
        # gloo and torchrun ask the system for this host's name and address
        own = {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface, **environment}
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        with open(log, "a") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *inside],
                env={**os.environ, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End all its processes at once."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        for process in map(int, found.stdout.split()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def unplug(self) -> None:
        """Nothing it sends arrives any longer, and nothing arrives there."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def make_hosts(names: Sequence[str], switch: str = "lf-switch") -> Iterator[list[Host]]:
    """Hosts of these names, which reach each other and nothing else."""
    hosts = [Host(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)]
    _remove(hosts, switch)  # what a run that was killed has left
    try:
        _ip("link", "add", switch, "type", "bridge")
        _ip("link", "set", switch, "up")
        for host in hosts:
            port = f"{host.name}-port"
            _ip("netns", "add", host.name)
            _ip("link", "add", port, "type", "veth", "peer", "name", host.interface, "netns", host.name)
            _ip("link", "set", port, "master", switch, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            # torchrun waits in a read of its store until TCP gives up: 15 minutes by default
            _ip("netns", "exec", host.name, "sysctl", "-w", "net.ipv4.tcp_retries2=6")
        yield hosts
    finally:
        _remove(hosts, switch)


def _remove(hosts: Sequence[Host], switch: str) -> None:
    for host in hosts:
        if Path(f"/run/netns/{host.name}").exists():
            host.kill()
            _ip("netns", "del", host.name)
        # goes with the namespace, but only when the last process is gone
        subprocess.run(["ip", "link", "del", f"{host.name}-port"], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", switch], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
