"""Measure the traffic, memory and time of a rank under expert parallelism.

The first two tables are plans (``lightning_fsdp2.plan``) of Qwen3-30B-A3B on 64 ranks: what a rank sends in a step, by
collective and axis, and what it holds at the peak. Routing is even in a plan: each expert gets the same number of
tokens.

The third table is for two real ranks over gloo, with one thread each, which train a small mixture of experts. Data
parallelism alone (``ep_size=1``) and expert parallelism (``ep_size=2``) take turns.

    python -m benchmarks.expert_parallel
"""
# ruff: noqa: T201

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.memory import CHUNKED, FULL, Run, Variant, plan, run_forked
from benchmarks.turns import PROCESS_CLOCKS, get_median, get_ratio_cells, join_group, time_rounds
from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.plan import RankPlan
from lightning_fsdp2.plan.simulation.recorder import CATEGORIES

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
TOY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
TRAFFIC = (
    ("all-gather", "dp_shard"),
    ("reduce-scatter", "dp_shard"),
    ("all-gather", "efsdp"),
    ("reduce-scatter", "efsdp"),
    ("all-to-all", "ep"),
)
"""Kind and axis of the collectives that have a column of their own. The others send a few bytes."""

VARIANT = Variant(FULL, CHUNKED)
GIB = 2**30


def make_run(model: dict[str, Any], ranks: int, ep_size: int, args: argparse.Namespace) -> Run:
    """Make a run with one micro-batch in each step."""
    return Run(model, ranks, 1, args.sequence_length, args.batch_size, ep_size=ep_size)


def count_sent(planned: RankPlan) -> dict[tuple[str, str], float]:
    """Return the bytes that a rank sends to other ranks in a step, by kind of collective and axis.

    For each collective here, a rank sends all of the tensor except its own part.
    """
    return {(entry.kind, entry.axis): entry.bytes * (1 - 1 / entry.ranks) for entry in planned.traffic}


def print_plans(plans: dict[int, RankPlan], args: argparse.Namespace) -> None:
    """Print the first two tables, with a row for each ``ep_size``."""
    print(f"{args.ranks} ranks, {args.batch_size} x {args.sequence_length} tokens per rank. A rank sends, in GiB:\n")
    print(f"| ep_size | {' | '.join(f'{kind} over {axis}' for kind, axis in TRAFFIC)} | all |")
    print(f"|--:|{'--:|' * (len(TRAFFIC) + 1)}")
    for ep_size, planned in plans.items():
        sent = count_sent(planned)
        cells = [sent.get(column, 0.0) / GIB for column in TRAFFIC]
        print(f"| {ep_size} | {' | '.join(f'{cell:.2f}' for cell in (*cells, sum(sent.values()) / GIB))} |")
    print("\nA rank holds at the peak, in GiB:\n")
    print(f"| ep_size | {' | '.join(CATEGORIES)} | peak | in |")
    print(f"|--:|{'--:|' * (len(CATEGORIES) + 1)}---|")
    for ep_size, planned in plans.items():
        cells = [size / GIB for size in (*planned.peak.values(), planned.peak_bytes)]
        print(f"| {ep_size} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {planned.peak_at} |")


def measure_times(args: argparse.Namespace, folder: str, rank: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of steps without and with expert parallelism on the slower rank, by each clock."""
    join_group(folder, rank, 2)
    models = {f"ep_size {ep_size}": shard(make_toy(), ep_size) for ep_size in (1, 2)}
    shape, generator = (args.toy_batch_size, args.toy_length), torch.Generator().manual_seed(rank)
    tokens = torch.randint(TOY["vocab_size"], shape, generator=generator)
    steps = {name: partial(train_step, model, tokens) for name, model in models.items()}
    return time_rounds(list(models), steps, args.rounds)


def train_step(model: Qwen3MoeForCausalLM, tokens: Tensor) -> Tensor:
    """Run forward and backward, and return the loss."""
    model.zero_grad()
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def make_toy() -> Qwen3MoeForCausalLM:
    """Make a small mixture of experts with the same weights at every call."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TOY)).train()


def shard(model: Qwen3MoeForCausalLM, ep_size: int) -> Any:
    """Shard a model over all ranks in float32, with ``ep_size`` expert parallel ranks."""
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
    return FSDP2Manager(config, create_device_mesh(config, ep_size=ep_size)).parallelize(model)


def print_times(times: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    """Print the third table: medians, and ratios of paired steps."""
    millions = sum(parameter.numel() for parameter in make_toy().parameters()) / 1e6
    print(
        f"\n{os.cpu_count()} CPU cores, 2 ranks of 1 thread, gloo; a mixture of {millions:.1f} million parameters with"
        f" {TOY['num_experts']} experts in float32, {args.toy_batch_size} x {args.toy_length} tokens per rank;"
        f" forward and backward, {args.rounds} rounds.\n"
    )
    names, (without, with_experts) = list(times), times.values()
    print(f"| clock | {names[0]} s | {names[1]} s | of medians | median of pairs | 95 % interval |")
    print("|---|--:|--:|--:|--:|--:|")
    for clock in PROCESS_CLOCKS:
        theirs, ours = ([[seconds[clock]] for seconds in own] for own in (without, with_experts))
        cells = [f"{get_median(theirs):.3f}", f"{get_median(ours):.3f}", *get_ratio_cells(ours, theirs)]
        print(f"| {clock} | {' | '.join(cells)} |")


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the plans")
    parser.add_argument("--ep-sizes", type=int, nargs="+", default=[1, 4, 8], help="sizes that are planned")
    parser.add_argument("--layers", type=int, default=QWEN3_30B_A3B["num_hidden_layers"], help="layers in the plans")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per rank in the plans")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens of a sequence in the plans")
    parser.add_argument("--toy-batch-size", type=int, default=4, help="sequences per rank that are timed")
    parser.add_argument("--toy-length", type=int, default=256, help="tokens of a sequence that is timed")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each variant")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, measure and report."""
    args = parse_args(arguments)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}\n")
    model = {**QWEN3_30B_A3B, "num_hidden_layers": args.layers}
    print_plans({size: plan(make_run(model, args.ranks, size, args), VARIANT) for size in args.ep_sizes}, args)
    with tempfile.TemporaryDirectory() as folder:
        times, _ = run_forked(partial(measure_times, args, folder), 2)
    print_times(times, args)


if __name__ == "__main__":
    main()
