"""Two hosts train together under torchrun; one dies, or its network does, and the run goes on as if nothing had been.

Each cell of this file takes a minute, because torchrun waits for hosts.
"""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.fork_server import get_python
from helpers.hosts import Host, make_hosts, needs_hosts
from helpers.node_job import GLOBAL_BATCH_SIZE, SAVES_EVERY, STEPS, Step, read_steps, write_config

TESTS = Path(__file__).parents[1]

PORT = 29400

KEEPS_STORE = f"""
import time
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", {PORT}, is_master=True, wait_for_workers=False)
time.sleep(10**6)
"""

pytestmark = [pytest.mark.slow, needs_hosts, pytest.mark.timeout(900)]


class Job:
    """A run on the hosts ``a`` and ``b``; the store of the rendezvous is on a third one."""

    def __init__(self, folder: Path, hosts: list[Host], *, max_restarts: int = 10, **options: Any) -> None:
        folder.mkdir()
        self.folder = folder
        *self.hosts, self.store = hosts
        self.max_restarts = max_restarts
        self.config = write_config(folder, **options)
        self.agents: dict[str, subprocess.Popen[Any]] = {}

    def start(self, *hosts: Host, nodes: str = "1:2") -> None:
        for host in hosts or self.hosts:
            self.agents[host.name] = host.start(
                [
                    *(get_python(), "-m", "torch.distributed.run"),
                    *("--nnodes", nodes, "--nproc-per-node", "2", "--max-restarts", str(self.max_restarts)),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.store.address}:{PORT}"),
                    *("--rdzv-id", self.folder.name, "--local-addr", host.address),
                    *("--rdzv-conf", "is_host=false,join_timeout=240,last_call_timeout=6,keep_alive_interval=2"),
                    *("-m", "lightning_fsdp2", "fit", "--config", str(self.config), "--ckpt_path", "last"),
                ],
                self.folder / f"{host.name}.log",
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                OMP_NUM_THREADS="1",
                PYTHONPATH=f"{TESTS.parent}:{TESTS}",
            )

    def wait_for(self, is_there: Callable[[list[Step]], bool], seconds: float = 240) -> list[Step]:
        deadline = time.monotonic() + seconds
        while not is_there(steps := read_steps(self.folder)):
            assert time.monotonic() < deadline, self.read_logs()
            time.sleep(0.1)
        return steps

    def wait_for_end(self, *hosts: Host, seconds: float = 240) -> list[int]:
        try:
            return [self.agents[host.name].wait(seconds) for host in hosts]
        except subprocess.TimeoutExpired:
            pytest.fail(self.read_logs())

    def read_logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in self.folder.glob("*.log"))


@contextmanager
def make_cluster(folder: Path) -> Iterator[list[Host]]:
    """Two hosts, and a third one with the store of the rendezvous, which never fails here."""
    with make_hosts(["lf-a", "lf-b", "lf-store"]) as hosts:
        hosts[-1].start([get_python(), "-c", KEEPS_STORE], folder / "store.log")
        yield hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with make_cluster(tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """What a run that nothing happens to sees."""
    folder = tmp_path_factory.mktemp("expected")
    with make_cluster(folder) as hosts:
        job = Job(folder / "run", hosts)
        job.start(nodes="2")
        assert job.wait_for_end(*job.hosts) == [0, 0], job.read_logs()
    return read_steps(job.folder)


def get_attempts(steps: list[Step]) -> list[list[Step]]:
    """Cut where the run began anew: steps are repeated, or, behind a save, made by another number of ranks."""
    attempts: list[list[Step]] = [steps[:1]]
    for step in steps[1:]:
        is_repeated = any(other.rank == step.rank and other.step >= step.step for other in attempts[-1])
        if is_repeated or step.world_size != attempts[-1][0].world_size:
            attempts.append([])
        attempts[-1].append(step)
    return attempts


def get_rows(steps: list[Step], number: int) -> Counter[str]:
    """The samples of an optimizer step."""
    return Counter(row for step in steps if step.step == number for row in step.rows)


@pytest.mark.guarantees("same-command", "same-samples", "only-lost-steps")
@pytest.mark.parametrize(
    "seed",
    # either host dies first, either one last, and one of them twice
    [0, 4, 5, *(pytest.param(seed, marks=pytest.mark.release) for seed in (1, 2, 3))],
)
def test_the_run_goes_on_where_hosts_die(tmp_path: Path, hosts: list[Host], expected: list[Step], seed: int) -> None:
    """One host dies and comes back; then one dies and does not."""
    chance = random.Random(seed)
    job = Job(tmp_path / "run", hosts)
    job.start()
    for is_last, number in ((False, 5), (True, STEPS // 2)):
        # at any moment of a step, a save or what lies between them
        until = number + chance.randrange(SAVES_EVERY)
        job.wait_for(lambda steps, until=until: any(step.step >= until and step.world_size == 4 for step in steps))
        time.sleep(chance.uniform(0, 0.3))
        chance.shuffle(job.hosts)
        job.hosts[0].kill()
        if not is_last:
            job.start(job.hosts[0])
    assert job.wait_for_end(job.hosts[1]) == [0], job.read_logs()

    attempts = get_attempts(read_steps(job.folder))
    assert [attempt[0].world_size for attempt in attempts][:: len(attempts) - 1] == [4, 2]
    losses = {step.step: step.loss for step in expected}
    saved = {0}
    for attempt in attempts:
        first, last = min(step.step for step in attempt), max(step.step for step in attempt)
        assert first - 1 in saved, "what is repeated is what came behind the last save"
        # a host may die amid the save of the step that has just been noted
        saved = {last // SAVES_EVERY * SAVES_EVERY, (last - 1) // SAVES_EVERY * SAVES_EVERY}
        for step in attempt:
            assert abs(step.loss - losses[step.step]) < 1e-5
        for number in range(first, last):  # a host that dies may not have noted its last step
            assert get_rows(attempt, number) == get_rows(expected, number)
            assert get_rows(expected, number).total() == GLOBAL_BATCH_SIZE
    assert last == STEPS


@pytest.mark.guarantees("silent-ranks")
def test_a_host_whose_network_is_cut_is_named_by_the_others(tmp_path: Path, hosts: list[Host]) -> None:
    job = Job(tmp_path / "run", hosts, max_restarts=0, steady_timeout="0:00:10")
    job.start(nodes="2")
    job.wait_for(lambda steps: any(step.step >= 6 for step in steps))
    job.hosts[1].unplug()
    assert job.wait_for_end(job.hosts[0]) != [0]
    assert job.wait_for_end(job.hosts[1]) != [0]
    there, cut = ((job.folder / f"{host.name}.log").read_text() for host in job.hosts)
    assert "The ranks 0-1 (lf-a) have noticed this. There is no report yet from 2-3 (lf-b): they" in there
    assert "reaches neither the other ranks nor the store" in cut


@pytest.mark.release
@pytest.mark.guarantees("cut-links")
def test_the_other_host_goes_on_alone_after_a_cut(tmp_path: Path, hosts: list[Host]) -> None:
    job = Job(tmp_path / "run", hosts, steady_timeout="0:00:10")
    job.start(nodes="1:2")
    job.wait_for(lambda steps: any(step.step >= 6 and step.world_size == 4 for step in steps))
    job.hosts[1].unplug()
    assert job.wait_for_end(job.hosts[0]) == [0], job.read_logs()
    first, *_, last = get_attempts(read_steps(job.folder))
    assert (first[0].world_size, last[0].world_size) == (4, 2)
    assert max(step.step for step in last) == STEPS
