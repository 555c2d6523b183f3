"""Parts of a benchmark: one after the other, within a budget of seconds, with a page and a JSON file after each.

A part is a generator with the decorator :func:`part`. It yields the tables that it has so far, again and again, and
runs in a process of its own: what it has yielded stays, whether it then fails, dies or is stopped when the budget ends.
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
"""Toy sizes take a CPU some seconds; real ones are for a GPU with 80 GB."""

WAITING, RUNNING, DONE, FAILED, LEFT_OUT = "waiting", "running", "done", "failed", "left out"

_LINES_OF_ERROR = 12


@dataclass(frozen=True)
class Table:
    """Some of a part's figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """Texts, numbers, and None where there is nothing."""


Run = Callable[[argparse.Namespace], Iterator[Sequence[Table]]]


@dataclass(frozen=True)
class Part:
    """A generator of tables, and what is known of it before it runs."""

    name: str
    run: Run
    seconds: dict[str, float]
    """What it takes at most, by scale."""

    needs_cuda: bool

    @property
    def purpose(self) -> str:
        """What its figures decide."""
        return cleandoc(self.run.__doc__ or "")


@dataclass
class Outcome:
    """What has become of a part."""

    name: str
    purpose: str
    status: str = WAITING
    reason: str = ""
    """Why it is left out, or the last lines of its error."""

    seconds: float = 0.0
    tables: Sequence[Table] = field(default_factory=list)


def part(name: str, *, toy: float, real: float, needs_cuda: bool = False) -> Callable[[Run], Part]:
    """Make a part of a generator, whose docstring says what its figures decide.

    Args:
        name: By which ``--parts`` chooses it.
        toy: Seconds that it takes at most at toy size on a CPU.
        real: The same at real size on a GPU.
        needs_cuda: Whether it can do nothing on a CPU.
    """
    return lambda run: Part(name, run, {TOY: toy, REAL: real}, needs_cuda)


def run_parts(parts: Sequence[Part], args: argparse.Namespace, write: Callable[[Sequence[Outcome]], None]) -> bool:
    """Run the parts that can end within ``args.budget`` seconds; tell whether none of them failed.

    Args:
        parts: In their order.
        args: Passed to each.
        write: Called with all outcomes, those to come included, whenever one has changed.
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
    """Whether there is a GPU; unlike ``is_available`` it leaves CUDA alone, which could not be forked then."""
    return torch.cuda.device_count() > 0


def get_device_type() -> str:
    """What the parts run on."""
    return "cuda" if has_cuda() else "cpu"


def _run_apart(one: Part, args: argparse.Namespace, outcome: Outcome, ends: float, write: Callable[[], None]) -> None:
    """Run a part in a process of its own, and put down what it sends."""
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
    os.setsid()  # so that the processes of this one can be stopped with it
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
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
