"""Parts of a benchmark, which run one after another within a time budget. The output is written after each part.

A part is a generator with the decorator :func:`part`. It runs in a separate process, and repeatedly yields its tables
so far. The yielded tables are kept even if the part fails, dies or is stopped when the budget ends.
"""

import argparse
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import cleandoc
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

TOY, REAL = "toy", "real"
SCALES = (TOY, REAL)
"""Sizes of the models. Toy sizes take a CPU some seconds, and real sizes are for a GPU with 80 GB."""

WAITING, RUNNING, DONE, FAILED, LEFT_OUT = "waiting", "running", "done", "failed", "left out"

_LINES_OF_ERROR = 12


@dataclass(frozen=True)
class Table:
    """A table with figures of a part."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """Cells of each row: texts, numbers, or None for an empty cell."""


Run = Callable[[argparse.Namespace], Iterator[Sequence[Table]]]


@dataclass(frozen=True)
class Part:
    """A generator of tables, with its name and its requirements."""

    name: str
    run: Run
    seconds: dict[str, float]
    """Longest duration in seconds, by scale."""

    needs_cuda: bool

    @property
    def purpose(self) -> str:
        """Purpose of the figures: the docstring of the generator."""
        return cleandoc(self.run.__doc__ or "")


@dataclass
class Outcome:
    """The status, the error and the tables of a part."""

    name: str
    purpose: str
    status: str = WAITING
    reason: str = ""
    """Reason why the part is left out, or the last lines of its error."""

    seconds: float = 0.0
    tables: Sequence[Table] = field(default_factory=list)


def part(name: str, *, toy: float, real: float, needs_cuda: bool = False) -> Callable[[Run], Part]:
    """Turn a generator into a part. The docstring of the generator explains the purpose of the figures.

    Args:
        name: Name of the part, for ``--parts``.
        toy: Longest duration in seconds at toy size on a CPU.
        real: Longest duration in seconds at real size on a GPU.
        needs_cuda: Whether the part needs a GPU.
    """
    return lambda run: Part(name, run, {TOY: toy, REAL: real}, needs_cuda)


def run_parts(parts: Sequence[Part], args: argparse.Namespace, write: Callable[[Sequence[Outcome]], None]) -> bool:
    """Run the parts that can end within ``args.budget`` seconds, and return whether none of them failed.

    Args:
        parts: Parts in the order in which they run.
        args: Options that are passed to each part.
        write: Function that is called with the outcomes of all parts whenever one has changed.
    """
    ends = time.monotonic() + args.budget
    outcomes = [Outcome(part.name, part.purpose) for part in parts]
    for one, outcome in zip(parts, outcomes, strict=True):
        left = ends - time.monotonic()
        if one.needs_cuda and not has_cuda():
            outcome.status, outcome.reason = LEFT_OUT, "needs CUDA"
        elif one.seconds[args.scale] > left:
            needed = f"takes up to {one.seconds[args.scale]:.0f} s, and of the budget {max(0, left):.0f} s are left"
            outcome.status, outcome.reason = LEFT_OUT, needed
        else:
            _run_apart(one, args, outcome, ends, lambda: write(outcomes))
        write(outcomes)
    return all(outcome.status != FAILED for outcome in outcomes)


def has_cuda() -> bool:
    """Return whether there is a GPU. Unlike ``is_available``, this does not start CUDA, which would prevent forks."""
    return torch.cuda.device_count() > 0


def get_device_type() -> str:
    """Return the type of the device that the parts run on."""
    return "cuda" if has_cuda() else "cpu"


def _run_apart(one: Part, args: argparse.Namespace, outcome: Outcome, ends: float, write: Callable[[], None]) -> None:
    """Run a part in a separate process, and record the tables that it sends."""
    started = time.monotonic()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_tables, args=(one, args, sender))
    process.start()
    sender.close()
    outcome.status = RUNNING
    while outcome.status == RUNNING:
        if not wait([receiver], timeout=max(0.0, ends - time.monotonic())):
            outcome.status, outcome.reason = FAILED, "stopped: the budget ended"
            break
        try:
            outcome.status, outcome.reason, outcome.tables = receiver.recv()
        except EOFError:
            process.join()
            outcome.status, outcome.reason = FAILED, f"its process died (exit code {process.exitcode})"
        outcome.seconds = time.monotonic() - started
        write()
    _kill_session(process)
    outcome.seconds = time.monotonic() - started


def _send_tables(one: Part, args: argparse.Namespace, sender: Connection) -> None:
    os.setsid()  # so that child processes can be stopped with this process
    tables: Sequence[Table] = ()
    with open(args.output / f"{one.name}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        sender.send((RUNNING, "", tables))
        for tables in one.run(args):
            sender.send((RUNNING, "", tables))
        sender.send((DONE, "", tables))
    except BaseException:
        error = traceback.format_exc()
        os.write(2, error.encode())
        sender.send((FAILED, "\n".join(error.strip().splitlines()[-_LINES_OF_ERROR:]), tables))


def _kill_session(process: Any) -> None:
    with suppress(ProcessLookupError):  # all processes of the session have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
