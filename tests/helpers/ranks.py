"""Run a function on N forked ranks that share one gloo process group.

torch, lightning and transformers are imported once in the parent; a forked rank starts in milliseconds where a spawned
one would import for nine seconds. The parent must therefore never start a process group or a thread pool of its own:
everything that trains, the one-process oracle included, runs inside :func:`run_ranks`.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

GROUP_TIMEOUT = timedelta(seconds=60)
RUN_TIMEOUT_SECONDS = 150.0
PATIENCE_SECONDS = 10.0
LINGER_SECONDS = 2.0
DAMAGED_HEAP = re.compile(
    r"^(malloc|malloc_consolidate|free|realloc)\(\): |^(double free or )?corruption|^corrupted ", re.MULTILINE
)
"""What the C library writes before it aborts a process with a damaged heap."""


class NativeCrash(Exception):
    """A thread that is none of Python's, such as gloo's, died of a segmentation fault, or the heap is damaged.

    pytest repeats a test once that ends with this error (``pyproject.toml``), with new fixtures, since the ranks may
    have left files.
    """


class RankError(AssertionError):
    """A rank failed; the message holds its traceback, ``cause`` the exception where it could be pickled.

    ``failures`` holds the exception of every rank, or a text: the traceback of one that could not be pickled, or how
    the rank ended without an exception.
    """

    def __init__(self, rank: int, message: str, failures: list[BaseException | str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = failures

    @property
    def cause(self) -> BaseException | None:
        failure = self.failures[self.rank]
        return None if isinstance(failure, str) else failure


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    group: bool = True,
    patience: float = PATIENCE_SECONDS,
    seconds: float = RUN_TIMEOUT_SECONDS,
) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` forked ranks and return what each of them returned, in rank order.

    Args:
        function: Any callable; nothing is pickled on the way in, so a closure will do.
        world_size: Number of ranks.
        *args: Passed to ``function``.
        group: Whether each rank starts the default (gloo) process group before it calls ``function``. A function that
            starts a ``Trainer`` can let the strategy start it: the environment is that of a torchrun worker.
        patience: Seconds that the other ranks have to end, too, once one has failed; then they are killed.
        seconds: Time after which the ranks are killed. It should be four times what they usually need, and end before
            the test's own timeout does.

    Raises:
        NativeCrash: When a native thread died of a segmentation fault: now and then one of gloo's dies in `malloc`, of
            a cause that is not known (docs/decisions.md). Also when the C library ended a rank because it found the
            heap damaged, in whatever thread. Any other crash of a thread of Python's, where the code under test runs,
            is a RankError.
        RankError: With the traceback of the first rank that failed. The other ranks are killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = _free_port()
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(
                target=_rank_main, args=(function, args, rank, world_size, group, port, Path(folder), seconds)
            )
            for rank in range(world_size)
        ]
        gc.freeze()  # so that collections in the ranks do not copy the parent's pages
        for process in processes:
            process.start()
        try:
            failed = _wait_for_all(processes, patience, seconds)
        finally:  # also when the test's own timeout ends the wait
            for process in processes:
                process.kill()
                process.join()
        _raise_native_crash(processes, Path(folder))
        results = [_read_result(Path(folder) / f"{rank}.pickle") for rank in range(world_size)]
        _raise_first_failure(results, failed, Path(folder), [process.exitcode for process in processes])
        return [result["value"] for result in results]


@contextlib.contextmanager
def raises_on_all_ranks(error: type[BaseException], match: str) -> Iterator[None]:
    """Expect that :func:`run_ranks` in this block ends with the same error on every rank.

    ``pytest.raises(RankError)`` sees only the first rank that fails. The others may have returned, wait for it, or fail
    because it is gone; here each of these is a failure of the test.

    Args:
        error: The type of the exception.
        match: A regular expression for its message.
    """
    with pytest.raises(RankError) as caught:
        yield
    for rank, failure in enumerate(caught.value.failures):
        if not isinstance(failure, error) or not re.search(match, str(failure)):
            raise AssertionError(f"rank {rank} did not raise {error.__name__}({match!r}), but: {failure!r}")


def _wait_for_all(processes: list[Any], patience: float, seconds: float) -> int | None:
    """Wait until every rank ended; after a first failure give the others a moment, then kill them."""
    deadline = time.monotonic() + seconds
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    first_failure: int | None = None
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            for rank in running.values():
                processes[rank].kill()
            for process in processes:
                process.join()
            return first_failure if first_failure is not None else min(running.values())
        for sentinel in ended:
            rank = running.pop(sentinel)
            processes[rank].join()
            if processes[rank].exitcode != 0 and first_failure is None:
                first_failure = rank
                deadline = time.monotonic() + patience
    return first_failure


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    group: bool,
    port: int,
    folder: Path,
    seconds: float,
) -> None:
    log = open(folder / f"{rank}.log", "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    _show_stacks(log)
    faulthandler.dump_traceback_later(0.95 * seconds, file=log)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every process starts with another seed
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="forked-ranks",  # Lightning then takes the processes as created externally
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        if group:
            store = dist.FileStore(str(folder / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
            dist.barrier()  # a rank that ends before its peers have connected would make them fail
        data, code = pickle.dumps({"value": function(*args)}), 0
    except BaseException as error:  # reported to the parent, which raises it
        data, code = _pickle_failure(error), 1
    _write_result(folder / f"{rank}.pickle", data)
    if code == 0 and dist.is_initialized():
        _wait_for_results(folder, world_size)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    log.flush()
    os._exit(code)  # skip the parent's exit handlers, which the fork inherited


def _wait_for_results(folder: Path, world_size: int) -> None:
    """Wait until all ranks have written their results, but not long: one may wait for this one, or have died.

    A rank that ends while another still connects to it in a new group would make that one fail.
    """
    deadline = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < deadline and len(list(folder.glob("*.pickle"))) < world_size:
        time.sleep(0.001)


def _show_stacks(log: TextIO) -> None:
    """Let a rank that dies of a signal say where, also after a Trainer, which resets the handlers of all signals."""
    reset_handlers = _SignalConnector.teardown

    def enable() -> None:
        faulthandler.disable()  # one that has lost its handlers would not set them again
        faulthandler.enable(log)

    def teardown(connector: _SignalConnector) -> None:
        reset_handlers(connector)
        enable()

    _SignalConnector.teardown = teardown  # type: ignore[method-assign]
    enable()


def _raise_native_crash(processes: list[Any], folder: Path) -> None:
    for rank, process in enumerate(processes):
        log = (folder / f"{rank}.log").read_text(errors="replace")
        # of a thread of Python's faulthandler writes "Current thread"
        if process.exitcode == -signal.SIGSEGV and "Segmentation fault" in log and "Current thread" not in log:
            raise NativeCrash(f"rank {rank} died in a native thread:\n{log[-4000:]}")
        if process.exitcode == -signal.SIGABRT and DAMAGED_HEAP.search(log):
            raise NativeCrash(f"rank {rank} died of a damaged heap:\n{log[-4000:]}")


def _pickle_failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        return pickle.dumps({"error": error, "traceback": text})
    except Exception:
        return pickle.dumps({"error": None, "traceback": text})


def _write_result(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def _read_result(path: Path) -> dict[str, Any] | None:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _raise_first_failure(
    results: list[dict[str, Any] | None], failed: int | None, folder: Path, codes: Sequence[int | None]
) -> None:
    if failed is None:
        return
    failures = [_find_failure(rank_result) for rank_result in results]
    # a rank without a result comes first: another may have failed because this one was gone
    without = [rank for rank, result in enumerate(results) if result is None]
    parts = [
        f"rank {rank} died or hung without a result (exit code {codes[rank]}). Its output:"
        f"\n{(folder / f'{rank}.log').read_text(errors='replace')[-16000:]}"
        for rank in without
    ]
    for rank in range(len(results)):
        if (rank == failed or without) and "error" in (results[rank] or ()):
            log = (folder / f"{rank}.log").read_text(errors="replace")
            parts.append(f"rank {rank} failed:\n{results[rank]['traceback']}\nIts output:\n{log[-4000:]}")
    raise RankError(failed, "\n".join(parts), failures)


def _find_failure(result: dict[str, Any] | None) -> BaseException | str:
    if result is None:
        return "it died or hung"
    if "value" in result:
        return "it returned"
    return result["error"] or result["traceback"]


def _free_port() -> int:
    """A port that nobody listens on, and that the system gives to no outgoing connection before the ranks use it."""
    while True:
        port = random.SystemRandom().randrange(16384, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
