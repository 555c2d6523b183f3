"""Progress of commands that take long, on stderr."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int | None], None]
"""Function that is told how many parts of the work are done, and how many there are, or None if this is not known."""

_SECONDS = 10
"""Seconds between two lines, if stderr is not a terminal."""


@contextmanager
def show_progress(task: str) -> Iterator[Report]:
    """Show at once that ``task`` has begun, and then how far it is. Yield a function that updates this.

    On a terminal, this is a bar that disappears at the end. Anywhere else, it is a line at the start, and then one
    every ten seconds.
    """
    with _show_bar(task) if sys.stderr.isatty() else _write_lines(task) as report:
        yield report


@contextmanager
def _show_bar(task: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(task, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


@contextmanager
def _write_lines(task: str) -> Iterator[Report]:
    start, ended = time.monotonic(), threading.Event()
    state = [""]

    def write() -> None:
        while not ended.wait(_SECONDS):
            sys.stderr.write(f"{task}: {state[0]}{time.monotonic() - start:.0f} s\n")
            sys.stderr.flush()

    def report(done: int, total: int | None) -> None:
        state[0] = f"{done} done, " if total is None else f"{done} of {total}, "

    sys.stderr.write(f"{task} ...\n")
    sys.stderr.flush()
    writer = threading.Thread(target=write, daemon=True, name="progress")
    writer.start()
    try:
        yield report
    finally:
        ended.set()
        writer.join()
