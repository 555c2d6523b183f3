"""Execution of simulations in forked processes, since each simulation needs its own process group and module."""

import math
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from lightning_fsdp2._refusals import BugInProcessError, get_message, is_mistake, is_refusal

T = TypeVar("T")


def run_in_processes(
    tasks: Sequence[Callable[[], T]], *, processes: int | None = None, end: float = math.inf
) -> Iterator[tuple[int, T]]:
    """Run each task in a forked process, which gets copies of this process's objects.

    Args:
        tasks: Functions without arguments. Their results are pickled; the functions are not.
        processes: Number of tasks that run at once. None means one per CPU that this process may use.
        end: Time, as in ``time.monotonic``, at which running tasks are stopped. No task starts after it.

    Yields:
        The index of each task in ``tasks``, with its result, in the order in which the tasks finish. Tasks that have
        no result at ``end`` are left out.

    Raises:
        Exception: When a task rejects the run with an error message for the user. The same error is raised here, and
            the other tasks are stopped.
        RuntimeError: When a task raises an error that is a bug, whose traceback becomes the message, or when the
            process of a task was killed.
        ValueError: When a library in a task rejects the run, or when ``processes`` is less than 1.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes} is less than 1; use >= 1, or None (null) for one per CPU.")
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < (processes or len(os.sched_getaffinity(0))):
                number, task = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(task, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = number, process
            for ready in wait(list(running), timeout=None if end == math.inf else max(0.0, end - time.monotonic())):
                number, process = running.pop(ready)
                yield number, _receive(ready, process)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def add_up_progress(on_progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """Return a function that is told the progress of one list of tasks after the other, and reports their sum."""
    done = total = 0

    def report(done_of_list: int, total_of_list: int) -> None:
        nonlocal done, total
        done, total = done + 1, total + (total_of_list if done_of_list == 1 else 0)
        if on_progress is not None:
            on_progress(done, total)

    return report


def get_result_or_refusal(task: Callable[[], T]) -> T | str:
    """Return the result of ``task``. If a check in ``task`` rejects the run, return the error message instead."""
    try:
        return task()
    except ValueError as error:
        if not is_refusal(error):
            raise
        return str(error)


def _run(task: Callable[[], Any], sender: Connection) -> None:
    try:
        answer = pickle.dumps((task(), None))
    except BaseException as error:
        answer = pickle.dumps((None, _make_error(error)))
    sender.send_bytes(answer)
    os._exit(0)  # skip the exit handlers, which only the parent process should run


def _make_error(error: BaseException) -> BaseException:
    """Return the error to raise in the main process, which does not have the traceback of ``error``."""
    if is_refusal(error):
        return error
    return ValueError(get_message(error)) if is_mistake(error) else BugInProcessError(traceback.format_exc())


def _receive(receiver: Any, process: Any) -> Any:
    try:
        result, error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeError(
            f"A process of the plan died with exit code {process.exitcode}; -9 usually means out of memory: plan with"
            " fewer processes at once."
        ) from None
    process.join()
    if error is not None:
        raise error
    return result
