"""Part that compares the speed of torch's attention kernels."""

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
"""Kernels to compare. Context parallelism uses the first one on a GPU."""

HEADS, TOKENS, CALLS = 32, 32768, 5
"""Numbers of heads in a call, of tokens in a call, and of calls between two waits for the device."""


@part("attention-kernels", toy=30, real=60)
def compare_kernels(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Compare attention kernels: context parallelism calls flash, although torch prefers cuDNN on some GPUs.

    The calls are causal attention in bfloat16 with 32 heads and 32,768 tokens, in sequences of each length. If cuDNN is
    faster, `attention_kernels.py` loses the difference. `plan/timing/rates.py` should have the rates of flash.
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
"""Seconds of a call, or None without a kernel for it, and the call's FLOPs as a multiple of forward's FLOPs."""


def measure(size: int, length: int, batch: int, rounds: int) -> list[tuple[Timed, Timed]]:
    """Return the median seconds of each backend. The backends take turns."""
    shape = (batch, HEADS, length, size)
    make = partial(torch.randn, shape, dtype=torch.bfloat16, device=get_device_type(), requires_grad=True)
    inputs = [make() for _ in range(3)]
    calls = [(partial(attend, backend, inputs), partial(attend_both_ways, backend, inputs)) for backend in BACKENDS]
    seconds: list[tuple[list[float], list[float]]] = [([], []) for _ in BACKENDS]
    for _ in range(1 + rounds):
        for pair, measured in zip(calls, seconds, strict=True):
            for call, taken in zip(pair, measured, strict=True):
                taken += measure_calls(call)
    # the first measurement of each is slower than the others
    medians = [[median(taken[1:]) if taken else None for taken in measured] for measured in seconds]
    return [((forward, 1.0), (both, 3.5)) for forward, both in medians]


def measure_calls(call: Callable[[], Any]) -> list[float]:
    """Return the seconds of a call in a list, which is empty if the backend has no kernel for it."""
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
    """Run forward with one backend."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*inputs, is_causal=True)


def attend_both_ways(backend: SDPBackend, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run forward and backward with one backend."""
    output = attend(backend, inputs)
    return torch.autograd.grad(output, list(inputs), output.detach())
