"""Part that measures the first of two pipeline stages, on a simulated rank whose transfers do nothing."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.parts import TOY, Table, get_device_type, has_cuda, part
from benchmarks.gpu.shapes import LLAMA_1_5B, TINY
from benchmarks.trainings import synchronize
from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.compat.torch_simulation import simulate_world
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.batches import divide_batch
from lightning_fsdp2.parallel.pipeline.schedule import build_orders, compute_bubble

RANKS = 2
NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of micro-batches."""


@part("pipeline", toy=90, real=90)
def compare_micro_batches(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Measure what small micro-batches cost: the first half of a Llama of 1.5B computes 16 x 2,048 tokens.

    The rank never waits for another one, so a step would be as fast with any number of micro-batches if smaller ones
    cost nothing. They shorten the bubble, which the table gives for two ranks. So the best number of micro-batches has
    the smallest `ms / (1 - bubble)`. Memory shows what each schedule keeps.
    """
    fields, rows, length = (TINY, 4, 16) if args.scale == TOY else (LLAMA_1_5B, 16, 2048)
    batch = torch.randint(fields["vocab_size"], (rows, length), device=get_device_type())
    settings = [("1f1b", number) for number in NUMBERS if number <= rows] + [("gpipe", rows)]
    with simulate_world(RANKS):
        model = build_stage(fields)
        runs = [build_run(model, batch, schedule, number) for schedule, number in settings]
        readings = measure(runs, args.rounds)
    table: list[list[Any]] = []
    for (schedule, number), (seconds, allocated) in zip(settings, readings, strict=True):
        bubble = compute_bubble(build_orders(schedule, ranks=RANKS, micro_batches=number))
        cells = [seconds * 1e3, seconds / readings[0][0], f"{bubble:.0%}", seconds * 1e3 / (1 - bubble)]
        table.append([schedule, number, *cells, allocated / 2**30 or None])
    columns = ("schedule", "micro-batches", "ms", "ms / first", "bubble", "ms / (1 - bubble)", "allocated GiB")
    yield [Table(f"The first of {RANKS} stages, {rows} x {length} tokens", columns, table)]


def build_stage(fields: dict[str, Any]) -> Any:
    """Build a Llama with weights in float32 and computation in bfloat16, of which this rank has the first stage."""
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    mesh = create_device_mesh(config, pp_size=RANKS, device_type=get_device_type())
    with torch.device(get_device_type()):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    return FSDP2Manager(config, mesh).parallelize(model)


def build_run(model: Any, batch: Tensor, schedule: str, number: int) -> Callable[[], None]:
    """Build a function that computes the gradients of a batch."""

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    orders = build_orders(schedule, ranks=RANKS, micro_batches=number)
    micro_batches = divide_batch(batch, number)
    return partial(get_pipeline(model).execute, orders, step, micro_batches, key=micro_batches[0].shape)


def measure(runs: Sequence[Callable[[], None]], rounds: int) -> list[tuple[float, int]]:
    """Return the median seconds and the allocated bytes of each run. The runs take turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    allocated = [0 for _ in runs]
    for _ in range(1 + rounds):
        for index, run in enumerate(runs):
            if has_cuda():
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            started = time.perf_counter()
            run()
            synchronize()
            seconds[index].append(time.perf_counter() - started)
            allocated[index] = torch.cuda.max_memory_allocated() if has_cuda() else 0
    return [(median(taken[1:]), size) for taken, size in zip(seconds, allocated, strict=True)]
