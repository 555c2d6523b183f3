"""Trainings that take turns in the same processes, one block of steps each, so that noise hits all of them alike.

Each is a Python thread, and events say whose turn it is. A step lasts from the start of one batch to the start of the
next, Lightning's loop included. Collectives and dispatched operations are counted in steps of their own.
"""

import argparse
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.trainings import select_device, synchronize

CLOCKS = {"wall": time.perf_counter, "CPU": time.thread_time}

COLLECTIVES = {
    "all-gathers": ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"),
    "reduce-scatters": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    "all-reduces": ("allreduce_", "allreduce_coalesced_"),
    "broadcasts": ("broadcast_",),
}
"""The names of their operations."""

OPERATIONS, HOST_READS = "operations", "host reads"
_KINDS = {f"c10d::{name}": kind for kind, names in COLLECTIVES.items() for name in names}
_KINDS["aten::_local_scalar_dense"] = HOST_READS


class OperationCounter(TorchDispatchMode):
    """Counts what reaches the dispatcher, but for the profiler's marks; collectives and host reads by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.counts[OPERATIONS] += not name.startswith("profiler::")
        self.counts[_KINDS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


class Turns:
    """Says which of the runs may go on; all others wait."""

    def __init__(self, runs: Sequence[str]) -> None:
        self._events = {run: threading.Event() for run in runs}
        self._next = dict(zip(runs, [*runs[1:], runs[0]], strict=True))
        self._events[runs[0]].set()

    def run(self, bodies: Mapping[str, Callable[[], None]]) -> None:
        """Run all of them to their ends, each of which is to pass its turn as often as the others."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            pool.map(self._run_one, bodies, bodies.values())

    def let_others_go_first(self, run: str) -> None:
        """Wait until each of the others has had its turn."""
        self._pass_on(run)
        self._events[run].wait()

    def _run_one(self, run: str, body: Callable[[], None]) -> None:
        try:
            self._events[run].wait()
            torch.set_num_threads(1)
            select_device()
            body()
            self._pass_on(run)
        except BaseException:  # the other runs would wait for ever
            traceback.print_exc()
            os._exit(1)

    def _pass_on(self, run: str) -> None:
        self._events[run].clear()
        self._events[self._next[run]].set()


class Stepper(pl.Callback):
    """One run's clock: it is told of every batch start, keeps the durations, and passes the turn after each block."""

    def __init__(self, run: str, turns: Turns, args: argparse.Namespace) -> None:
        self.run, self.turns, self.args = run, turns, args
        self.blocks: list[dict[str, list[float]]] = []
        self.losses: list[Tensor] = []
        self.counter = OperationCounter()
        self.started: dict[str, float] = {}
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        """End the time of the last step, let the others have their turn, start that of the next."""
        synchronize()
        now = read_clocks()
        step, timed_steps = self.batches - self.args.warmup_steps, self.args.blocks * self.args.steps
        self.batches += 1
        if 0 < step <= timed_steps:
            for clock, started in self.started.items():
                self.blocks[-1][clock].append(now[clock] - started)
        if 0 <= step <= timed_steps and step % self.args.steps == 0:
            self.turns.let_others_go_first(self.run)
            self.blocks.append({clock: [] for clock in CLOCKS})
            dist.barrier()
        if step == timed_steps:
            del self.blocks[-1]
            self.counter.__enter__()
        if self.batches == count_steps(self.args):
            self.counter.__exit__(None, None, None)
        self.started = read_clocks()

    def get_durations(self, clock: str) -> list[list[float]]:
        """Of the steps of each block, in seconds."""
        return [block[clock] for block in self.blocks]

    def count_per_step(self, kind: str) -> float:
        """How often it came in a step."""
        return self.counter.counts[kind] / self.args.counted_steps


def read_clocks() -> dict[str, float]:
    """Of this moment, in seconds."""
    return {clock: read() for clock, read in CLOCKS.items()}


def add_step_arguments(parser: argparse.ArgumentParser, *, blocks: int) -> None:
    """Options that a :class:`Stepper` reads."""
    parser.add_argument("--blocks", type=int, default=blocks, help="blocks of each run")
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--warmup-steps", type=int, default=5, help="steps of each run before its first block")
    parser.add_argument("--counted-steps", type=int, default=3, help="steps of each run whose operations are counted")


def count_steps(args: argparse.Namespace) -> int:
    """Of each run, the untimed ones included; the last lets the one before it end."""
    return args.warmup_steps + args.blocks * args.steps + args.counted_steps + 1


def get_median(blocks: Sequence[Sequence[float]]) -> float:
    """Of all blocks' durations."""
    return median(duration for block in blocks for duration in block)


def get_ratio_cells(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[str]:
    """The ratio of the medians, the median of the paired blocks' ratios, and the 95 % interval of that."""
    ratios = [median(own) / median(other) for own, other in zip(ours, theirs, strict=True)]
    low, high = bootstrap(ratios)
    return [f"{get_median(ours) / get_median(theirs):.3f}", f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]


def bootstrap(ratios: list[float], samples: int = 5000) -> tuple[float, float]:
    """The 95 % interval of the median of ``ratios``."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def check_losses(steppers: Mapping[str, Stepper], tolerance: float) -> float:
    """Compare the losses of all runs with those of the first, and return its last.

    Raises:
        ValueError: When they differ by more than ``tolerance``, absolute and relative.
    """
    (first, expected), *others = ((run, torch.stack(stepper.losses)) for run, stepper in steppers.items())
    for run, losses in others:
        if not torch.allclose(losses, expected, rtol=tolerance, atol=tolerance):
            difference = (losses - expected).abs().max()
            raise ValueError(
                f"The losses of {run} and {first} differ by {difference:.2e}; at most {tolerance:g} is right."
            )
    return expected[-1].item()
