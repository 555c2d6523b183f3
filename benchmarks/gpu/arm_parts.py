"""Parts that compare trainings ("arms") in turns: tokens per second, utilisation, memory and ratios of times."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.arms import (
    BASELINES,
    LIGHTNING_FSDP,
    NEED_CUDA,
    OFFLOADED,
    OPTIONS,
    Arm,
    Reading,
    Workload,
    order,
    read_arm,
)
from benchmarks.gpu.page import get_gpu
from benchmarks.gpu.parts import TOY, Table, has_cuda, part
from benchmarks.gpu.shapes import LLAMA_1_5B, TINY
from benchmarks.memory import LLAMA_3_8B, run_forked
from benchmarks.turns import get_median, get_ratio_cells
from lightning_fsdp2.callbacks.model_flops import get_flops_per_token, get_peak_flops_of

COLUMNS = (
    "arm",
    "tokens/s",
    "MFU",
    "ms per step",
    "waited for",
    "allocated GiB",
    "reserved GiB",
    "time / first",
    "95 % interval",
)
TOY_WORKLOAD = Workload(TINY, 1, 16, warmup_steps=1, blocks=2, steps=1)


@part("baselines", toy=120, real=240)
def compare_baselines(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Measure what `FSDP2Strategy` costs or saves, against a hand-written FSDP2 loop: Llama of 1.5B, 2 x 4,096 tokens.

    If a ratio is above 1 and its interval does not include 1, the strategy, the Trainer or `CausalLM` takes this time.
    If single steps show a larger ratio than blocks of steps, the time is on the host, where a GPU usually hides it.
    """
    workload = TOY_WORKLOAD if args.scale == TOY else Workload(LLAMA_1_5B, 2, 4096)
    yield from take_turns(BASELINES, workload, args.rounds)


@part("baselines-8b", toy=120, real=320)
def compare_baselines_8b(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Compare strategies on Llama 3 8B, with 1 x 4,096 tokens on one GPU of 80 GB, where the host has time to spare.

    Weights, gradients and both moments of AdamW are in bfloat16 and take 60 GiB. Every layer is recomputed in backward.
    `FSDPStrategy` is left out, since it keeps all weights gathered on one GPU.
    """
    workload = Workload(LLAMA_3_8B, 1, 4096, is_bfloat16=True, checkpoints=True, warmup_steps=3, blocks=2, steps=3)
    if args.scale == TOY:
        workload = Workload(TINY, 1, 16, is_bfloat16=True, checkpoints=True, warmup_steps=1, blocks=2, steps=1)
    arms = {name: arm for name, arm in BASELINES.items() if name != LIGHTNING_FSDP}
    yield from take_turns(arms, workload, args.rounds)


@part("options", toy=180, real=500)
def compare_options(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Compare options to see which a recipe should set: a Llama of 1.5B with 2 x 4,096 tokens.

    An option that saves time and costs no memory becomes a default of the recipes. For all other options, the page on
    layouts states how much time each GiB costs.
    """
    workload = TOY_WORKLOAD if args.scale == TOY else Workload(LLAMA_1_5B, 2, 4096)
    yield from take_turns(OPTIONS, workload, args.rounds)


@part("offload", toy=60, real=150)
def compare_offload(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Measure the time that offloading to host memory costs a Llama of 1.5B, which plans do not predict."""
    workload = TOY_WORKLOAD if args.scale == TOY else Workload(LLAMA_1_5B, 2, 4096, warmup_steps=1, blocks=2, steps=1)
    yield from take_turns(OFFLOADED, workload, 1)


def take_turns(arms: Mapping[str, Arm], workload: Workload, rounds: int) -> Iterator[Sequence[Table]]:
    """Run each arm ``rounds`` times in separate processes. The other arms continue if one fails."""
    left_out = [] if has_cuda() else [name for name in arms if name in NEED_CUDA]
    readings: dict[str, list[Reading]] = {name: [] for name in arms if name not in left_out}
    errors: dict[str, str] = {}
    for number in range(rounds):
        for name in order([name for name in readings if name not in errors], number):
            try:
                # the offloaded optimizer uses all cores; this process has started no thread that an arm could wait for
                readings[name] += run_forked(partial(read_arm, arms[name], workload), 1, threads=os.cpu_count() or 1)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            yield [build_table(readings, workload, errors | dict.fromkeys(left_out, "needs CUDA"))]
    if errors:
        raise ValueError("; ".join(f"{name}: {error}" for name, error in errors.items()))


def build_table(readings: Mapping[str, list[Reading]], workload: Workload, reasons: Mapping[str, str]) -> Table:
    """Build a table with a row for each arm. An arm that has not run has the reason instead of figures."""
    read = {name: own for name, own in readings.items() if own and name not in reasons}
    rows = [[name, *build_cells(own, next(iter(read.values())), workload)] for name, own in read.items()]
    rows += [[f"{name}: {reason}", *[None] * (len(COLUMNS) - 1)] for name, reason in reasons.items()]
    return Table(f"{describe(workload)}, {max(map(len, readings.values()))} rounds", COLUMNS, rows)


def build_cells(own: Sequence[Reading], first: Sequence[Reading], workload: Workload) -> list[Any]:
    """Build the cells of an arm, with ratios to the first arm in the same rounds."""
    tokens = workload.batch_size * workload.sequence_length / workload.tp_size
    seconds = get_median([reading.block_seconds for reading in own])
    memory = [max(getattr(reading, name) for reading in own) / 2**30 or None for name in ("allocated", "reserved")]
    ratio: list[Any] = [None, None]
    if own is not first:
        pairs = [list(zip(a.block_seconds, b.block_seconds, strict=True)) for a, b in zip(own, first, strict=False)]
        ours, theirs = ([[pair[side]] for block in pairs for pair in block] for side in (0, 1))
        _, *ratio = get_ratio_cells(ours, theirs)
    waited = get_median([reading.step_seconds for reading in own])
    return [tokens / seconds, get_utilisation(workload, seconds), seconds * 1e3, waited * 1e3, *memory, *ratio]


def get_utilisation(workload: Workload, seconds: float) -> str | None:
    """Return the model FLOPs utilisation relative to the GPU's peak in bfloat16; None without a GPU."""
    gpu = get_gpu()
    if gpu is None:
        return None
    tokens = workload.batch_size * workload.sequence_length / workload.tp_size
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**workload.model))
    flops = get_flops_per_token(model, workload.sequence_length) * tokens
    return f"{flops / seconds / get_peak_flops_of(gpu[0], torch.bfloat16):.1%}"


def describe(workload: Workload) -> str:
    """Describe a workload in one line."""
    layers, size = workload.model["num_hidden_layers"], workload.model["hidden_size"]
    dtype = "weights in bfloat16" if workload.is_bfloat16 else "bf16-mixed"
    tp_size = f", tp_size {workload.tp_size}" if workload.tp_size > 1 else ""
    tokens = f"{workload.batch_size} x {workload.sequence_length} tokens"
    kind = "Llama" if workload.model["model_type"] == "llama" else f"mixture of {workload.model['num_experts']} experts"
    return f"{kind}, {layers} layers, {size} wide, {tokens}, {dtype}{tp_size}"
