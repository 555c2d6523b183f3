"""Parts that compare plans with real steps of one rank of a mesh, whose collectives do nothing."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.page import get_gpu
from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import LLAMA_3_70B, QWEN3_30B_A3B, TINY, TINY_MIXTURE
from benchmarks.memory import CHUNKED, FULL, LLAMA_3_8B, Run, Variant, build_step, make_batch, make_module, run_forked
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
"""Number of timed steps. Two steps come before them, and the first of these creates the optimizer states."""

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Step:
    """Figures of a step, either measured or planned."""

    collectives: int
    flops: int
    allocated: int
    reserved: int
    """Bytes that torch's allocator reserves, or should reserve by its rules."""

    held: tuple[int, ...]
    """Bytes that the process holds, including CUDA and libraries. A plan has the two ends of a range."""

    seconds: tuple[float, ...]
    """Seconds of a step without its collectives. A plan has a lower bound and an estimate."""


@part("plan-8b", toy=60, real=120)
def compare_8b(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check a plan: 8B on 8 data parallel ranks, 2 x 8,192 tokens each, selective checkpointing.

    Allocated memory must match the plan to within a few percent, and reserved memory must not exceed the plan.
    Otherwise, the rules in `plan/simulation/reserved.py` need a correction. The process holds no memory of NCCL here,
    but the plan counts it. The step time without collectives must be above the plan's lower bound. It shows which rates
    `plan/timing/rates.py` should have.
    """
    run = Run(TINY, 2, 1, 64) if args.scale == TOY else Run(LLAMA_3_8B, 8, 1, 8192, batch_size=2)
    yield from compare(run, Variant(SELECTIVE))


@part("plan-8b-tp", toy=60, real=150)
def compare_8b_tp(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check a plan with tensor and sequence parallelism: 8B on 8 shards x tp 8, 8 x 8,192 tokens, selective AC.

    This also shows the cost of small products, since each of the 8 ranks has an eighth of every matrix.
    """
    run = Run(TINY, 4, 2, 64) if args.scale == TOY else Run(LLAMA_3_8B, 64, 8, 8192, batch_size=8)
    yield from compare(run, Variant(SELECTIVE))


@part("plan-70b", toy=60, real=300)
def compare_70b(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check a plan of one of 256 ranks that train 70B: 32 shards x tp 8, 8 x 8,192 tokens, full checkpointing."""
    run = Run(TINY, 8, 2, 64) if args.scale == TOY else Run(LLAMA_3_70B, 256, 8, 8192, batch_size=8)
    yield from compare(run, Variant(FULL))


@part("plan-30b-a3b", toy=60, real=120)
def compare_30b_a3b(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check a plan with expert parallelism: Qwen3-30B-A3B on 64 shards with ep 8, 2 x 4,096 tokens, full AC.

    Each expert gets the same number of tokens, in the plan and in the step. The step also shows the cost of many small
    products, since each rank computes an eighth of the experts.
    """
    run = Run(TINY_MIXTURE, 4, 1, 64, ep_size=2) if args.scale == TOY else Run(QWEN3_30B_A3B, 64, 1, 4096, 2, ep_size=8)
    yield from compare(run, Variant(FULL, CHUNKED))


def compare(run: Run, variant: Variant) -> Iterator[Sequence[Table]]:
    """Plan the step of rank 0, run it, and compare both."""
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
    """Return the device for plans: this GPU, or an H100 if plans do not know this GPU or there is none."""
    name = get_gpu()[0].lower() if get_gpu() else ""  # type: ignore[index]
    return get_device(next((known for known in DEVICES if known in name), "h100"))


def plan(run: Run, variant: Variant, device: Device, worker: int) -> Step:
    """Plan rank 0 as :func:`lightning_fsdp2.plan.plan_run` does, and return its figures."""
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
    """Run the same step with real tensors, and return its figures. Gathered tensors have arbitrary values."""
    has_gpu = torch.cuda.is_available()
    with simulate_world(run.ranks):
        step = build_step(run, variant, get_device_type(), has_even_routing=True)
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
    """Return the peaks of allocated and of reserved bytes, and the bytes that are in use on the GPU."""
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free


def build_table(planned: Step, measured: Step | None) -> Table:
    """Build a table with a row for each figure."""
    names = ("collectives", "TFLOP", "allocated MiB", "reserved MiB", "held MiB: from", "to", "s: at least", "about")
    rows = zip(names, list_figures(planned), list_figures(measured), strict=True)
    return Table(
        "A step of rank 0",
        ("figure", "plan", "measured", "measured / plan"),
        [[name, figure, found, found / figure if found else None] for name, figure, found in rows],
    )


def list_figures(step: Step | None) -> list[float | None]:
    """List the figures of a table's column. A single value fills both ends of a range; memory of 0 was not measured."""
    if step is None:
        return [None] * 8
    memory = [size / _MIB or None for size in (step.allocated, step.reserved, step.held[0], step.held[-1])]
    return [step.collectives, step.flops / 1e12, *memory, step.seconds[0], step.seconds[-1]]
