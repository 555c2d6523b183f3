"""Run the arms of ``speed`` on all ranks of torchrun, or compare another strategy of the package with FSDP2Strategy.

With ``--strategy``, FSDP2Strategy and another strategy take turns, with the same weights and batches. The batches
repeat, so that there is something to learn. The losses of both must be equal within the noise of bfloat16, or the
script fails. The noise is the difference between FSDP2Strategy and a run of FSDP2Strategy in float32. If two runs are
both within the noise of the float32 run, they differ by at most twice the noise. ``--strategy fsdp2`` compares
FSDP2Strategy with itself. With ``--tp-size``, all of them have as many tensor parallel ranks, and sequence parallelism.
With ``--ep-size``, the model is a mixture of experts, and the compared FSDP2Strategy has as many expert parallel ranks.
With ``--pp-size``, the compared FSDP2Strategy has as many pipeline stages, and trains on the same global batches.

    torchrun --nproc-per-node 8 -m benchmarks.gpu.many
    python -m benchmarks.gpu.many --strategy megatron_fsdp      # one GPU
    torchrun --nproc-per-node 4 -m benchmarks.gpu.many --strategy megatron_fsdp --tp-size 2
    torchrun --nproc-per-node 8 -m benchmarks.gpu.many --strategy fsdp2 --ep-size 8
    torchrun --nproc-per-node 8 -m benchmarks.gpu.many --strategy fsdp2 --pp-size 2 --pp-schedule interleaved_1f1b
"""
# ruff: noqa: T201

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.arm_parts import build_table
from benchmarks.gpu.arms import (
    BASELINES,
    NEED_CUDA,
    OPTIONS,
    OURS,
    Arm,
    Reading,
    Workload,
    order,
    read_arm,
    run_ours,
)
from benchmarks.gpu.page import build_lines
from benchmarks.gpu.shapes import LLAMA_1_5B, make_mixture
from benchmarks.trainings import describe_machine, get_device, process_group
from lightning_fsdp2 import DDPStrategy, FSDP2Config, FSDP2Strategy, MegatronFSDPConfig, MegatronFSDPStrategy
from lightning_fsdp2.parallel.megatron import wrap
from lightning_fsdp2.parallel.pipeline.schedule import SCHEDULES

ARMS: dict[str, Arm] = BASELINES | OPTIONS
COMPARED: dict[str, Callable[..., Any]] = {
    "fsdp2": FSDP2Strategy,
    "megatron_fsdp": MegatronFSDPStrategy,
    "ddp": DDPStrategy,
}
"""Strategies to compare with FSDP2Strategy, by the value of ``--strategy``."""

TENSOR_PARALLEL: dict[str, type[Any]] = {"fsdp2": FSDP2Config, "megatron_fsdp": MegatronFSDPConfig}
"""Configs of the strategies that have tensor parallelism."""

DISTINCT_BATCHES = 4
"""Number of different batches in a comparison of losses, which then repeat."""

Readings = Mapping[str, Sequence[Reading]]


def measure(arms: Mapping[str, Arm], workload: Workload, rounds: int) -> dict[str, list[Reading]]:
    """Let the arms take turns on the ranks of the default group."""
    readings: dict[str, list[Reading]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in order(list(arms), number):
            readings[name].append(read_arm(arms[name], workload))
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return readings


def compare(args: argparse.Namespace, workload: Workload) -> bool:
    """Let FSDP2Strategy and another strategy take turns, print a report, and return whether their losses are equal."""
    # checkpointing needs less memory and gives the same numbers
    strategy, rounds = args.strategy, args.rounds
    exact = {"float32": partial(run_ours, precision="32-true", activation_checkpointing="full")}
    in_float32 = get_losses(measure(exact, workload, 1), "float32") * rounds
    other = replace(workload, pp_size=args.pp_size)
    arms: dict[str, Arm] = {
        OURS: run_ours,
        strategy: lambda _, clock: run_ours(other, clock, strategy=make_strategy(args)),
    }
    readings = measure(arms, workload, rounds)
    ours, theirs = (get_losses(readings, name) for name in arms)
    noise, other_noise = (get_largest_difference(losses, in_float32) for losses in (ours, theirs))
    difference = get_largest_difference(theirs, ours)
    if dist.get_rank() == 0:
        print_report(readings, workload, {}, *(["megatron-fsdp"] if strategy == "megatron_fsdp" else []))
        print(
            f"{OURS}'s losses fall from {ours[0][0]:.4f} to {ours[0][-1]:.4f} in {len(ours[0])} steps. Those of"
            f" {strategy} differ from them by {difference:.2e} at most. From those of float32 they differ by"
            f" {noise:.2e} and {other_noise:.2e}."
        )
    return difference <= 2 * noise


def make_strategy(args: argparse.Namespace) -> Any:
    """Make a strategy to compare."""
    sizes = {name: size for name in ("tp_size", "ep_size", "pp_size") if (size := getattr(args, name)) > 1}
    flags: dict[str, Any] = {"sequence_parallel": True} if args.tp_size > 1 else {}
    if args.pp_size > 1:
        flags |= {"pp_schedule": args.pp_schedule}
    options = {"config": TENSOR_PARALLEL[args.strategy](**flags)} if flags else {}
    return COMPARED[args.strategy](**sizes, **options)


def get_losses(readings: Readings, name: str) -> list[list[float]]:
    """Return the losses of an arm's steps, by round."""
    return [reading.losses for reading in readings[name]]


def get_largest_difference(losses: list[list[float]], others: list[list[float]]) -> float:
    """Return the largest difference of any step; NaN if any loss is NaN."""
    return (torch.tensor(losses) - torch.tensor(others)).abs().max().item()


def print_report(readings: Readings, workload: Workload, reasons: Mapping[str, str], *packages: str) -> None:
    """Print the machine, versions including those of ``packages``, and a Markdown table."""
    table = build_table(readings, workload, reasons)
    print(f"{describe_machine(*packages)}; per rank, {table.title}:\n")
    print("\n".join(build_lines(table.columns, table.rows)))


def build_workload(args: argparse.Namespace) -> Workload:
    """Build the workload from the command line: a Llama with the given sizes, or a mixture of experts."""
    heads = args.hidden_size // args.head_size
    model = {
        **LLAMA_1_5B,
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": 4 * args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
    }
    return Workload(
        make_mixture(model, max(args.ep_size, 8)) if args.ep_size > 1 else model,
        args.batch_size,
        args.sequence_length,
        warmup_steps=args.warmup_steps,
        blocks=args.blocks,
        steps=args.steps,
        distinct=DISTINCT_BATCHES if args.strategy else None,
        tp_size=args.tp_size,
    )


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--strategy", choices=COMPARED, help="strategy to compare; default: run the arms")
    runs.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME")
    parser.add_argument("--tp-size", type=int, default=1, help="tensor parallel ranks, with --strategy; default: 1")
    parser.add_argument("--ep-size", type=int, default=1, help="expert parallel ranks, with --strategy; default: 1")
    parser.add_argument("--pp-size", type=int, default=1, help="pipeline parallel ranks, with --strategy; default: 1")
    parser.add_argument("--pp-schedule", choices=SCHEDULES, default="1f1b", help="default: 1f1b")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm")
    parser.add_argument("--warmup-steps", type=int, default=6, help="untimed steps of each round")
    parser.add_argument("--blocks", type=int, help="timed blocks of each round; default: 3, or 12 with --strategy")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block; as many again are timed singly")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per data parallel rank")
    parser.add_argument("--sequence-length", type=int, default=4096)
    args = parser.parse_args(arguments)
    args.blocks = args.blocks or (12 if args.strategy else 3)
    if args.tp_size != 1 and args.strategy not in TENSOR_PARALLEL:
        parser.error(f"--tp-size {args.tp_size} needs --strategy {' or '.join(TENSOR_PARALLEL)}.")
    if args.ep_size != 1 and args.strategy != "fsdp2":
        parser.error(f"--ep-size {args.ep_size} needs --strategy fsdp2.")
    if args.pp_size != 1 and args.strategy != "fsdp2":
        parser.error(f"--pp-size {args.pp_size} needs --strategy fsdp2.")
    if args.strategy == "megatron_fsdp" and get_device().type not in wrap.DEVICE_TYPES:
        parser.error("--strategy megatron_fsdp needs a CUDA device, and there is none; run it where there is one.")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a report."""
    args = parse_args(arguments)
    workload = build_workload(args)
    with process_group():
        if args.strategy:
            if not compare(args, workload):
                sys.exit("The losses differ by more than twice the noise of bfloat16.")
            return
        left_out = [name for name in args.arms if name in NEED_CUDA and not torch.cuda.is_available()]
        arms = {name: ARMS[name] for name in args.arms if name not in left_out}
        readings = measure(arms, workload, args.rounds)
        if dist.get_rank() == 0:
            print_report(readings, workload, dict.fromkeys(left_out, "needs CUDA"))


if __name__ == "__main__":
    main()
