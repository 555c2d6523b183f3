"""The attention kernels that torch has, beside each other."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.parts import TOY, Table, get_device_type, has_cuda, part
from benchmarks.trainings import synchronize

FLASH = SDPBackend.FLASH_ATTENTION
BACKENDS = (
    (FLASH, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION) if has_cuda() else (FLASH, SDPBackend.MATH)
)
"""The first is what context parallelism takes on a GPU."""

HEADS, TOKENS, CALLS = 32, 32768, 5
"""Heads of each call, tokens of its batch, and calls between two waits."""


@part("attention-kernels", toy=30, real=60)
def compare_kernels(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Which kernel context parallelism should call: it takes flash, where torch alone prefers cuDNN on some GPUs.

    Causal attention in bfloat16, of 32 heads and 32,768 tokens in sequences of each length. What cuDNN is faster by is
    what `attention_kernels.py` loses; the rates of flash are those that `plan/timing/rates.py` should have.
    """
    sizes, lengths, tokens = ((16,), (64, 128), 128) if args.scale == TOY else ((64, 128), (2048, 8192, 32768), TOKENS)
    names = [backend.name.removesuffix("_ATTENTION").lower() for backend in BACKENDS]
    columns = ("head size", "length", *(f"{name} {way}" for name in names for way in ("forward", "both")))
    rows: list[list[Any]] = []
    for size in sizes:
        for length in lengths:
            seconds = measure(size, length, tokens // length, args.rounds)
            flops = 2 * tokens * length * HEADS * size / 1e12
            cells = [flops * products / each if each else None for pair in seconds for each, products in pair]
            rows.append([size, length, *cells])
            yield [Table("TFLOP/s of forward, and of forward and backward", columns, rows)]


Timed = tuple[float | None, float]
"""Seconds, or None where a kernel cannot, and how many times the FLOPs of forward that is."""


def measure(size: int, length: int, batch: int, rounds: int) -> list[tuple[Timed, Timed]]:
    """Return the medians of each backend, which take turns."""
    shape = (batch, HEADS, length, size)
    make = partial(torch.randn, shape, dtype=torch.bfloat16, device=get_device_type(), requires_grad=True)
    inputs = [make() for _ in range(3)]
    calls = [(partial(attend, backend, inputs), partial(attend_both_ways, backend, inputs)) for backend in BACKENDS]
    seconds: list[tuple[list[float], list[float]]] = [([], []) for _ in BACKENDS]
    for _ in range(1 + rounds):
        for pair, measured in zip(calls, seconds, strict=True):
            for call, taken in zip(pair, measured, strict=True):
                taken += measure_calls(call)
    # the first call is slower than others
    medians = [[median(taken[1:]) if taken else None for taken in measured] for measured in seconds]
    return [((forward, 1.0), (both, 3.5)) for forward, both in medians]


def measure_calls(call: Callable[[], Any]) -> list[float]:
    """Return the seconds of a call, or nothing where there is no such kernel."""
    try:
        synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        synchronize()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return []
    return [(time.perf_counter() - started) / CALLS]


def attend(backend: SDPBackend, inputs: Sequence[Tensor]) -> Tensor:
    """Forward, with what backward will need."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*inputs, is_causal=True)


def attend_both_ways(backend: SDPBackend, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward."""
    output = attend(backend, inputs)
    return torch.autograd.grad(output, list(inputs), output.detach())
