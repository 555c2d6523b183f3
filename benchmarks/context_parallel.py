"""Measure the work, traffic, memory and time of a rank under context parallelism, and compare them with lower bounds.

The first table is for a simulated mesh, as in plans. Layers of a Llama-3-8B train on one long sequence, simulated for
one rank after another. The table shows the largest value of any rank. FLOPs are those of the matrix products and of the
attention kernels. A causal call of n queries has n (n + 1) / 2 pairs of a query and a key. Bytes are the bytes that a
rank sends for attention if each collective is a ring. Activations are the tensors that are kept for backward.

The lower bounds are the work of all causal pairs, and the other products and the activations of one process, divided by
the number of ranks. The lower bound of traffic depends on the method. With ``allgather``, keys and values are sent once
in forward, and their gradients once in backward. With ``ulysses``, queries, keys, values and results are sent once in
each direction.

The second table is for documents and windows. It shows the pairs that attention computes, divided by the pairs that
queries see, and the number of calls in a layer and pass. Both are the largest values of any rank.

The third table is for two real ranks over gloo, with one thread each, which train a small model with many heads. One
rank alone and both ranks with each method take turns.

    python -m benchmarks.context_parallel
"""
# ruff: noqa: T201

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import LLAMA_3_8B, Run, Variant, make_batch, make_trainer, run_forked
from benchmarks.turns import PROCESS_CLOCKS, get_median, get_ratio_cells, join_group, time_rounds
from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.parallel.context.attention_blocks import (
    Block,
    Chunk,
    Pattern,
    SegmentBlock,
    find_documents,
    get_blocks,
    get_head_tail_chunks,
)
from lightning_fsdp2.plan.simulation.recorder import ACTIVATIONS, LOGITS
from lightning_fsdp2.plan.simulation.step import simulate as simulate_step

METHODS = ("allgather", "ulysses")
ALONE = "one process"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_PRODUCTS = {ATTENTION: 2, f"{ATTENTION}_backward": 5}
"""Number of matrix products in each attention kernel. Backward computes the scores again."""

EXCHANGES = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}
"""Functional collectives that attention uses. FSDP uses other operations, and norms and losses use all-reduces."""

TOY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Share:
    """The work of a rank in a training step, or its lower bound."""

    attention_flops: float
    """FLOPs of the attention kernels, in forward and backward."""

    product_flops: float
    """FLOPs of all other matrix products."""

    traffic: float
    """Bytes that attention sends."""

    activations: float
    """Bytes of tensors that are kept from forward to backward."""


class ShareCounter(TorchDispatchMode):
    """Dispatch mode that counts FLOPs and bytes that are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_flops = self.product_flops = self.traffic = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor: the operation comes again with its local tensors
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if func._schema.name in ATTENTION_PRODUCTS:
            names = (argument.name for argument in func._schema.arguments)
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            flops = count_attention_flops(given["query"], given["key"], is_causal=given.get("is_causal", False))
            self.attention_flops += ATTENTION_PRODUCTS[func._schema.name] * flops
        elif name in ("mm", "addmm", "bmm", "baddbmm"):
            self.product_flops += 2 * args[-2].size(-1) * result.numel()
        elif namespace == "_c10d_functional" and name in EXCHANGES:
            whole, ranks = max(args[0], result, key=Tensor.numel), dist.get_world_size()
            self.traffic += whole.numel() * whole.element_size() * (ranks - 1) // ranks
        return result


def count_attention_flops(query: Tensor, key: Tensor, *, is_causal: bool) -> int:
    """Return the FLOPs of one matrix product of attention, such as the scores, over all visible query-key pairs."""
    batch, heads, queries, dim = query.shape
    pairs = queries * (queries + 1) // 2 if is_causal else queries * key.size(2)
    return 2 * batch * heads * pairs * dim


class CountedLM(CausalLM):
    """Module that counts the work of each optimizer step, including its forward and its backward."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with ShareCounter() as self.counter:
            super().optimizer_step(*args, **kwargs)


def simulate(run: Run, method: str, rank: int) -> Share:
    """Simulate a step of one rank with fake ranks and fake tensors, and return its work. Nothing is computed."""
    module = CountedLM(config=run.model)
    trainer = make_trainer(run, Variant({"context_parallel_method": method}))
    recording = simulate_step(trainer, module, make_batch(run), world_size=run.ranks, rank=rank).recording
    backward = next(moment for moment, phase in recording.phases if phase == "backward")
    kept = sum(
        change.bytes
        for change in recording.changes
        if change.moment < backward and change.category in (ACTIVATIONS, LOGITS)
    )
    counter = module.counter
    return Share(counter.attention_flops, counter.product_flops, counter.traffic, kept)


def make_run(model: dict[str, Any], length: int, cp_size: int) -> Run:
    """Make a run with a sequence for each ``cp_size`` ranks. At least two ranks take part, so weights are gathered."""
    return Run(model, max(2, cp_size), 1, length, cp_size=cp_size)


def find_most(run: Run, method: str, worker: int = 0) -> Share:
    """Return the largest work of each kind among the ranks of a sequence."""
    shares = [astuple(simulate(run, method, rank)) for rank in range(run.cp_size)]
    return Share(*(max(values) for values in zip(*shares, strict=True)))


def compute_least(run: Run, method: str, alone: Share) -> Share:
    """Return the lower bound for the busiest rank. ``alone`` is the work of one process without context parallelism."""
    model, ranks, length = run.model, run.cp_size, run.sequence_length
    heads, key_heads = model["num_attention_heads"], model["num_key_value_heads"]
    width = model["num_hidden_layers"] * model["hidden_size"] // heads  # width of one head, summed over layers
    pairs = length * (length + 1) // 2
    flops = 2 * sum(ATTENTION_PRODUCTS.values()) * heads * width * pairs
    sent_heads = 2 * key_heads if method == "allgather" else 2 * (heads + key_heads) / ranks
    traffic = 2 * sent_heads * width * length * torch.bfloat16.itemsize * (ranks - 1) / ranks
    return Share(flops / ranks, alone.product_flops / ranks, traffic, alone.activations / ranks)


def print_shares(args: argparse.Namespace) -> None:
    """Print a row for one process, and for each number of ranks with each method."""
    model = {**LLAMA_3_8B, "num_hidden_layers": args.layers}
    print(f"{args.layers} layers of a Llama-3-8B, 1 x {args.simulated_length} tokens; the most of any rank:\n")
    columns = ("attention TFLOP", "other products TFLOP", "attention sends GiB", "activations GiB")
    print(f"| method | cp | {' | '.join(f'{column} | / minimum' for column in columns)} |")
    print(f"|---|{'--:|' * (1 + 2 * len(columns))}")
    alone = make_run(model, args.simulated_length, 1)
    (whole,) = run_forked(partial(find_most, alone, "auto"), 1)
    print_share(ALONE, 1, whole, compute_least(alone, "allgather", whole))
    for method in METHODS:
        for cp_size in args.cp_sizes:
            run = make_run(model, args.simulated_length, cp_size)
            (share,) = run_forked(partial(find_most, run, method), 1)
            print_share(method, cp_size, share, compute_least(run, method, whole))


def print_share(method: str, cp_size: int, share: Share, least: Share) -> None:
    """Print a row with the work of a rank, and its ratio to the lower bound."""
    cells = []
    for value, bound, unit in zip(astuple(share), astuple(least), (1e12, 1e12, 2**30, 2**30), strict=True):
        cells += [f"{value / unit:.2f}", f"{value / bound:.3f}" if bound else "-"]
    print(f"| {method} | {cp_size} | {' | '.join(cells)} |", flush=True)


def print_blocks(args: argparse.Namespace) -> None:
    """Print the second table: calls and pairs of attention for each pattern and method."""
    length, ranks = args.blocks_length, max(args.cp_sizes)
    print(f"\n1 x {length} tokens, cp {ranks}; the most of any rank:\n")
    print("| window | documents of | method | calls | computed / seen |\n|--:|--:|---|--:|--:|")
    for window, document in ((None, None), (128, None), (4096, None), (None, 4096), (1024, 4096)):
        for method in METHODS:
            shares = [count_blocks(length, window, document, method, rank, ranks) for rank in range(ranks)]
            calls, ratio = (max(values) for values in zip(*shares, strict=True))
            print(f"| {window or ''} | {document or ''} | {method} | {calls} | {ratio:.3f} |")


def count_blocks(
    length: int, window: int | None, document: int | None, method: str, rank: int, ranks: int
) -> tuple[int, float]:
    """Return the number of attention calls in a layer and pass, and the ratio of computed pairs to visible pairs."""
    positions, device = torch.arange(length), torch.device("cpu")
    documents = None if document is None else find_documents((positions // document)[None], device)
    chunks: tuple[Chunk, ...] = (Chunk(0, length),)
    if method == "allgather":
        chunks = get_head_tail_chunks(length, rank, ranks)
    blocks = get_blocks(chunks, Pattern(window, documents), batch_size=1, device=device)
    seen = (positions % (document or length) + 1).clamp(max=window or length)
    visible = sum(int(seen[chunk.start : chunk.end].sum()) for chunk in chunks)
    return len(blocks), sum(map(count_pairs, blocks)) / visible


def count_pairs(block: Block) -> int:
    """Return the number of query-key pairs that a block computes for each head."""
    if isinstance(block, SegmentBlock):
        return block.pairs
    queries = block.rows.stop - block.rows.start
    return queries * (queries + 1) // 2 if block.is_causal else queries * (block.keys.stop - block.keys.start)


def measure_times(args: argparse.Namespace, folder: str, rank: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of each variant's steps on the slower rank, by each clock."""
    join_group(folder, rank, 2)
    models = {ALONE: make_toy(), **{method: shard(make_toy(), method) for method in METHODS}}
    tokens = torch.randint(TOY["vocab_size"], (1, args.length), generator=torch.Generator().manual_seed(0))
    steps = {name: partial(train_step, model, tokens) for name, model in models.items() if name != ALONE or rank == 0}
    return time_rounds(list(models), steps, args.rounds)


def train_step(model: nn.Module, tokens: Tensor) -> Tensor:
    """Run forward and backward, and return the loss."""
    model.zero_grad()
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def make_toy() -> LlamaForCausalLM:
    """Make a small Llama with the same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TOY)).train()


def shard(model: nn.Module, method: str) -> nn.Module:
    """Shard a model over the context parallel ranks, in float32 like the model of one process."""
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), context_parallel_method=method)
    return FSDP2Manager(config, create_device_mesh(config, cp_size=dist.get_world_size())).parallelize(model)


def print_times(times: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    """Print the third table: medians, and ratios to one process in the same round."""
    parameters = sum(parameter.numel() for parameter in make_toy().parameters())
    print(
        f"\n{os.cpu_count()} CPU cores, 2 ranks of 1 thread, gloo; a Llama of {parameters / 1e6:.1f} million parameters"
        f" and {TOY['num_attention_heads']} heads of {TOY['head_dim']} in float32, 1 x {args.length} tokens; forward"
        f" and backward, {args.rounds} rounds.\n"
    )
    print("| method | clock | one process s | cp 2 s | of medians | median of pairs | 95 % interval |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for method in METHODS:
        for clock in PROCESS_CLOCKS:
            alone, split = ([[seconds[clock]] for seconds in times[name]] for name in (ALONE, method))
            cells = [f"{get_median(alone):.3f}", f"{get_median(split):.3f}", *get_ratio_cells(split, alone)]
            print(f"| {method} | {clock} | {' | '.join(cells)} |")


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp-sizes", type=int, nargs="+", default=[2, 4, 8], help="sizes of the simulated meshes")
    parser.add_argument("--layers", type=int, default=4, help="layers of the simulated model")
    parser.add_argument("--simulated-length", type=int, default=32768, help="length of the simulated sequence")
    parser.add_argument("--blocks-length", type=int, default=131072, help="length for the second table")
    parser.add_argument("--length", type=int, default=4096, help="length of the timed sequence")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each variant")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, measure and report."""
    args = parse_args(arguments)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}\n")
    print_shares(args)
    print_blocks(args)
    with tempfile.TemporaryDirectory() as folder:
        times, _ = run_forked(partial(measure_times, args, folder), 2)
    print_times(times, args)


if __name__ == "__main__":
    main()
