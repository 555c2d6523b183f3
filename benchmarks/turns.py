"""Trainings that take turns in the same processes, for one block of steps each, so that noise hits all of them alike.

Each training is a Python thread, and events control which thread may run. A step lasts from the start of one batch to
the start of the next, including Lightning's loop. Collectives and dispatched operations are counted in separate steps.
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
from datetime import timedelta
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.trainings import select_device, synchronize

CLOCKS = {"wall": time.perf_counter, "CPU": time.thread_time}
PROCESS_CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}
"""Clocks of a run that has a process to itself: its CPU time is that of all of the process's threads."""

COLLECTIVES = {
    "all-gathers": ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"),
    "reduce-scatters": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    "all-reduces": ("allreduce_", "allreduce_coalesced_"),
    "broadcasts": ("broadcast_",),
}
"""Names of torch's operations, by kind of collective."""

OPERATIONS, HOST_READS = "operations", "host reads"
_KINDS = {f"c10d::{name}": kind for kind, names in COLLECTIVES.items() for name in names}
_KINDS["aten::_local_scalar_dense"] = HOST_READS


class OperationCounter(TorchDispatchMode):
    """Dispatch mode that counts operations, except the profiler's marks, and collectives and host reads by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.counts[OPERATIONS] += not name.startswith("profiler::")
        self.counts[_KINDS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


class Turns:
    """Events that let one run continue while all other runs wait."""

    def __init__(self, runs: Sequence[str]) -> None:
        self._events = {run: threading.Event() for run in runs}
        self._next = dict(zip(runs, [*runs[1:], runs[0]], strict=True))
        self._events[runs[0]].set()

    def run(self, bodies: Mapping[str, Callable[[], None]]) -> None:
        """Run all bodies to their ends. Each body must pass its turn on equally often."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            pool.map(self._run_one, bodies, bodies.values())

    def let_others_go_first(self, run: str) -> None:
        """Wait until each of the other runs has had its turn."""
        self._pass_on(run)
        self._events[run].wait()

    def _run_one(self, run: str, body: Callable[[], None]) -> None:
        try:
            self._events[run].wait()
            torch.set_num_threads(1)
            select_device()
            body()
            self._pass_on(run)
        except BaseException:  # the other runs would wait forever
            traceback.print_exc()
            os._exit(1)

    def _pass_on(self, run: str) -> None:
        self._events[run].clear()
        self._events[self._next[run]].set()


class Stepper(pl.Callback):
    """Callback that times the steps of one run, and passes the turn on after each block."""

    def __init__(self, run: str, turns: Turns, args: argparse.Namespace) -> None:
        self.run, self.turns, self.args = run, turns, args
        self.blocks: list[dict[str, list[float]]] = []
        self.losses: list[Tensor] = []
        self.counter = OperationCounter()
        self.started: dict[str, float] = {}
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        """End the last step, let the other runs have their turns after a block, and begin the next step."""
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
        """Return the seconds of each step, by block."""
        return [block[clock] for block in self.blocks]

    def count_per_step(self, kind: str) -> float:
        """Return how often operations of a kind occur in a step."""
        return self.counter.counts[kind] / self.args.counted_steps


def read_clocks() -> dict[str, float]:
    """Return the current time of each clock in seconds."""
    return {clock: read() for clock, read in CLOCKS.items()}


def add_step_arguments(parser: argparse.ArgumentParser, *, blocks: int) -> None:
    """Add the options that a :class:`Stepper` reads."""
    parser.add_argument("--blocks", type=int, default=blocks, help="blocks of each run")
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--warmup-steps", type=int, default=5, help="steps of each run before its first block")
    parser.add_argument("--counted-steps", type=int, default=3, help="steps of each run whose operations are counted")


def count_steps(args: argparse.Namespace) -> int:
    """Return the number of steps of each run, including untimed steps and a last step that ends the one before it."""
    return args.warmup_steps + args.blocks * args.steps + args.counted_steps + 1


def join_group(folder: str, rank: int, ranks: int) -> None:
    """Start the default group of forked ranks over gloo, with one thread each, and a store in ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))


def time_rounds(
    names: Sequence[str], steps: Mapping[str, Callable[[], Tensor]], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Let variants take turns, one step each in every round, and return the seconds of the slower rank, by each clock.

    Args:
        names: Variants, the same on every rank of the default group. An untimed round comes first.
        steps: Step of each variant in which this rank takes part. It returns the loss, which must be the same for all
            variants.
        rounds: Number of timed rounds.
    """
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    losses: dict[str, Tensor] = {}
    for _ in range(1 + rounds):
        for name in names:
            dist.barrier()
            started = {clock: read() for clock, read in PROCESS_CLOCKS.items()}
            if name in steps:
                losses[name] = steps[name]()
            seconds = torch.tensor([read() - started[clock] for clock, read in PROCESS_CLOCKS.items()])
            seconds *= name in steps
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name].append(dict(zip(PROCESS_CLOCKS, seconds.tolist(), strict=True)))
    for loss in losses.values():
        torch.testing.assert_close(loss, losses[names[-1]], rtol=1e-5, atol=1e-5)
    dist.barrier()  # a rank that exits early would make its peers fail
    return {name: seconds[1:] for name, seconds in times.items()}


def get_median(blocks: Sequence[Sequence[float]]) -> float:
    """Return the median of the durations in all blocks."""
    return median(duration for block in blocks for duration in block)


def get_ratio_cells(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[str]:
    """Format the ratio of the medians, the median ratio of paired blocks, and its 95 % interval."""
    ratios = [median(own) / median(other) for own, other in zip(ours, theirs, strict=True)]
    low, high = bootstrap(ratios)
    return [f"{get_median(ours) / get_median(theirs):.3f}", f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]


def bootstrap(ratios: list[float], samples: int = 5000) -> tuple[float, float]:
    """Return the 95 % interval of the median of ``ratios``, by resampling."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def check_losses(steppers: Mapping[str, Stepper], tolerance: float) -> float:
    """Compare the losses of all runs with the losses of the first run, and return the last of these.

    Raises:
        ValueError: When losses differ by more than ``tolerance``, absolute and relative.
    """
    (first, expected), *others = ((run, torch.stack(stepper.losses)) for run, stepper in steppers.items())
    for run, losses in others:
        if not torch.allclose(losses, expected, rtol=tolerance, atol=tolerance):
            difference = (losses - expected).abs().max()
            raise ValueError(
                f"The losses of {run} and {first} differ by {difference:.2e}; at most {tolerance:g} is right."
            )
    return expected[-1].item()
