"""Plans beside real steps: one rank of a mesh computes on this machine, and its collectives do nothing."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.page import get_gpu
from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import LLAMA_3_70B, TINY
from benchmarks.memory import FULL, LLAMA_3_8B, Run, Variant, build_step, make_batch, make_module, run_forked
from benchmarks.memory import make_trainer as make_planned_trainer
from benchmarks.trainings import synchronize
from lightning_fsdp2.compat.torch_simulation import simulate_world
from lightning_fsdp2.plan.rank import get_overlapped_axes
from lightning_fsdp2.plan.result import RankPlan, build_rank_plan
from lightning_fsdp2.plan.simulation.recorder import StepRecorder
from lightning_fsdp2.plan.simulation.reserved import play_through
from lightning_fsdp2.plan.simulation.step import simulate
from lightning_fsdp2.plan.timing.devices import DEVICES, Device, get_device

SELECTIVE = {"activation_checkpointing": "selective"}
STEPS = 3
"""Timed; two come before them, of which the first makes the optimizer's states."""

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Step:
    """What a step took, or what its plan says."""

    collectives: int
    flops: int
    allocated: int
    reserved: int
    """By torch's allocator; of a plan, by the allocator's rules."""

    held: tuple[int, ...]
    """By the process, with what CUDA and libraries take; of a plan, the range that it gives."""

    seconds: tuple[float, ...]
    """Of a step without its collectives; planned at least, and about."""


@part("plan-8b", toy=60, real=120)
def compare_8b(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Whether a plan may be believed: 8B on 8 data parallel ranks, 2 x 8,192 tokens each, selective checkpointing.

    What is allocated must be the plan's to some percent, and what is reserved no more than it says, or the rules of the
    allocator in `plan/simulation/reserved.py` are to be mended. What the process holds has no NCCL here, which the plan
    counts.
    The step's seconds, without collectives, must be above the bound, and tell what `plan/timing/rates.py` should say.
    """
    run = Run(TINY, 2, 1, 64) if args.scale == TOY else Run(LLAMA_3_8B, 8, 1, 8192, batch_size=2)
    yield from compare(run, Variant(SELECTIVE))


@part("plan-8b-tp", toy=60, real=150)
def compare_8b_tp(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """The same of tensor and sequence parallelism: 8B on 8 shards x tp 8, 8 x 8,192 tokens, selective checkpointing.

    It tells, too, what small products cost: each of the 8 ranks has an eighth of every matrix.
    """
    run = Run(TINY, 4, 2, 64) if args.scale == TOY else Run(LLAMA_3_8B, 64, 8, 8192, batch_size=8)
    yield from compare(run, Variant(SELECTIVE))


@part("plan-70b", toy=60, real=300)
def compare_70b(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """The same of one rank of 256 that train 70B: 32 shards x tp 8, 8 x 8,192 tokens, full checkpointing."""
    run = Run(TINY, 8, 2, 64) if args.scale == TOY else Run(LLAMA_3_70B, 256, 8, 8192, batch_size=8)
    yield from compare(run, Variant(FULL))


def compare(run: Run, variant: Variant) -> Iterator[Sequence[Table]]:
    """Plan the step of rank 0, and run it."""
    device = find_device()
    (planned,) = run_forked(partial(plan, run, variant, device), 1)
    yield [build_table(planned, None)]
    if get_gpu() and planned.allocated > device.memory:
        raise ValueError(f"The plan's {planned.allocated / _GIB:.1f} GiB do not fit this GPU; nothing was run.")
    (measured,) = run_forked(partial(measure, run, variant), 1)
    yield [build_table(planned, measured)]
    if get_gpu() is None and (measured.flops, measured.collectives) != (planned.flops, planned.collectives):
        raise ValueError("The plan's products or collectives are not those of the step.")


def find_device() -> Device:
    """What plans are told: this GPU, or an H100 where there is none that they know."""
    name = get_gpu()[0].lower() if get_gpu() else ""  # type: ignore[index]
    return get_device(next((known for known in DEVICES if known in name), "h100"))


def plan(run: Run, variant: Variant, device: Device, worker: int) -> Step:
    """What :func:`lightning_fsdp2.plan.plan_run` says of rank 0, with its operations."""
    trainer = make_planned_trainer(run, variant)
    recording = simulate(trainer, make_module(run, variant), make_batch(run), world_size=run.ranks).recording
    axes = get_overlapped_axes(trainer.strategy.config)  # type: ignore[attr-defined]
    rank: RankPlan = build_rank_plan(0, recording, device, overlapped_axes=axes)
    return Step(
        collectives=len(recording.collectives),
        flops=rank.flops,
        allocated=rank.peak_bytes,
        reserved=play_through(recording.changes),
        held=(rank.reserved.least, rank.reserved.most),
        seconds=(rank.time.compute, rank.reached.compute),
    )


def measure(run: Run, variant: Variant, worker: int) -> Step:
    """Run the same step with real tensors; what is gathered is what the memory happens to hold."""
    has_gpu = torch.cuda.is_available()
    with simulate_world(run.ranks):
        step = build_step(run, variant, get_device_type())
        for _ in range(2):
            step()
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize()
        seconds = (time.perf_counter() - started) / STEPS
        memory = measure_memory() if has_gpu else (0, 0, 0)
        with StepRecorder({}) as recorder:
            step()
        recording = recorder.get_recording()
    allocated, reserved, held = memory
    return Step(len(recording.collectives), recording.flops, allocated, reserved, (held,), (seconds,))


def measure_memory() -> tuple[int, int, int]:
    """Return the bytes that were allocated and reserved at the most, and those that the GPU has given away."""
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free


def build_table(planned: Step, measured: Step | None) -> Table:
    """A row for each figure."""
    names = ("collectives", "TFLOP", "allocated MiB", "reserved MiB", "held MiB: from", "to", "s: at least", "about")
    rows = zip(names, list_figures(planned), list_figures(measured), strict=True)
    return Table(
        "A step of rank 0",
        ("figure", "plan", "measured", "measured / plan"),
        [[name, figure, found, found / figure if found else None] for name, figure, found in rows],
    )


def list_figures(step: Step | None) -> list[float | None]:
    """As in the table; a figure in the place of a range stands for both ends, and 0 was not measured."""
    if step is None:
        return [None] * 8
    memory = [size / _MIB or None for size in (step.allocated, step.reserved, step.held[0], step.held[-1])]
    return [step.collectives, step.flops / 1e12, *memory, step.seconds[0], step.seconds[-1]]
