"""Speed and memory of training a Llama on GPUs: our strategy, a hand-written FSDP2 loop, and Lightning's strategies.

Every variant trains the same architecture from random weights with AdamW in bf16-mixed precision on the same number of
tokens. The variants take turns, one round each, and each round starts a new model; the first steps of a round are not
timed. What is printed are medians over the timed steps of all rounds, and the ratio of each variant's tokens per second
to the hand-written loop's in the same round.

With ``--strategy`` FSDP2Strategy and one other strategy of the package take turns instead, with the same weights and
batches, which repeat, so that there is something to learn. Their losses must be equal within bfloat16's noise, or the
script fails. The measure of it is how far FSDP2Strategy is from itself in float32: two runs that are both no farther
from float32 than that differ by twice as much at most. ``--strategy fsdp2`` compares it with itself.

    python -m benchmarks.gpu                                   # one GPU
    torchrun --nproc-per-node 8 -m benchmarks.gpu
    python -m benchmarks.gpu --strategy megatron_fsdp
"""
# ruff: noqa: T201

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.trainings import (
    describe_machine,
    get_device,
    make_loader,
    make_trainer,
    process_group,
    synchronize,
)
from lightning_fsdp2 import CausalLM, DDPStrategy, FSDP2Config, FSDP2Strategy, MegatronFSDPStrategy

LOOP = "torch loop"
OURS: dict[str, tuple[dict[str, Any], str]] = {
    "FSDP2Strategy": ({}, "full"),
    "compile": ({"enable_compile": True}, "full"),
    "compile, selective AC": ({"enable_compile": True, "activation_checkpointing": "selective"}, "full"),
    "compile, selective AC, chunked loss": (
        {"enable_compile": True, "activation_checkpointing": "selective"},
        "chunked",
    ),
}
"""Flags, and the loss of ``CausalLM``."""

VARIANTS = (LOOP, "ModelParallelStrategy", "FSDPStrategy", *OURS)
COMPARED: dict[str, Callable[[], Any]] = {
    "fsdp2": FSDP2Strategy,
    "megatron_fsdp": MegatronFSDPStrategy,
    "ddp": DDPStrategy,
}
"""With FSDP2Strategy, by ``--strategy``."""

DISTINCT_BATCHES = 4
"""Of a comparison; then they repeat."""

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


@dataclass
class Result:
    """What the rounds of a variant have measured."""

    step_seconds: list[list[float]] = field(default_factory=list)
    """Of each round."""

    losses: list[list[float]] = field(default_factory=list)
    """Of the steps of each round, where the strategy knows them."""

    peak_bytes: int = 0


class Clock(pl.Callback):
    """Times the steps of a round, from one batch's start to the next one's, the device waited for; keeps losses."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.starts: list[float] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Note the time."""
        if len(self.starts) == self.warmup_steps and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Keep the mean loss of all ranks, where the strategy knows it."""
        if mean := getattr(trainer.strategy, "token_mean", None):
            self.losses.append(mean.loss)

    def get_durations(self) -> list[float]:
        """Of the steps behind the first ones, in seconds."""
        starts = self.starts[self.warmup_steps :]
        return [end - start for start, end in pairwise(starts)]


class PlainModule(pl.LightningModule):
    """A user's own module, for Lightning's strategies."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss."""
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as everywhere here."""
        return make_optimizer(self.parameters())


class HandShardedModule(PlainModule):
    """What ModelParallelStrategy asks for: the user shards."""

    def configure_model(self) -> None:
        """Shard, once."""
        shard_by_hand(self.model, self.device_mesh["data_parallel"])


def shard_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """The units that FSDP2Strategy finds by itself."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=POLICY, reshard_after_forward=layer is not model.model.layers[-1])
    fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=POLICY)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)


def train_with_loop(args: argparse.Namespace, clock: Clock) -> None:
    """The hand-written loop."""
    device = get_device()
    model = LlamaForCausalLM(make_config(args)).to(device).train()
    shard_by_hand(model, init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = make_optimizer(model.parameters())
    for batch in make_batches(args):
        clock.on_train_batch_start()
        batch = {name: value.to(device) for name, value in batch.items()}
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_trainer(
    args: argparse.Namespace, clock: Clock, module: pl.LightningModule, strategy: Any, precision: str = "bf16-mixed"
) -> None:
    """Any variant of Lightning's or ours."""
    accelerator = get_device().type
    trainer = make_trainer(strategy, count_steps(args), [clock], accelerator=accelerator, precision=precision)
    trainer.fit(module, make_batches(args))


def train_causal_lm(
    args: argparse.Namespace, clock: Clock, strategy: Any, *, loss: Any = "full", precision: str = "bf16-mixed"
) -> None:
    """Any variant of ours."""
    fields = {**make_config(args).to_dict(), "model_type": "llama"}
    module = CausalLM(config=fields, loss=loss, optimizer=make_optimizer, decay_norms_and_biases=True)
    train_with_trainer(args, clock, module, strategy, precision)


def run_variant(name: str, args: argparse.Namespace) -> Clock:
    """One round of a variant."""
    clock = Clock(args.warmup_steps)
    config = make_config(args)
    torch.manual_seed(0)
    if name == LOOP:
        train_with_loop(args, clock)
    elif name == "ModelParallelStrategy":
        strategy = ModelParallelStrategy(dist.get_world_size(), 1)
        train_with_trainer(args, clock, HandShardedModule(config), strategy, "32-true")
    elif name == "FSDPStrategy":
        train_with_trainer(args, clock, PlainModule(config), FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}))
    else:
        flags, loss = OURS[name]
        train_causal_lm(args, clock, FSDP2Strategy(config=FSDP2Config(**flags)), loss=loss)
    return clock


def run_strategy(make_strategy: Callable[[], Any], precision: str, args: argparse.Namespace) -> Clock:
    """One round of a comparison."""
    clock = Clock(args.warmup_steps)
    torch.manual_seed(0)
    train_causal_lm(args, clock, make_strategy(), precision=precision)
    return clock


def measure(variants: Mapping[str, Callable[[], Clock]], rounds: int) -> dict[str, Result]:
    """Let the variants take turns."""
    results = {name: Result() for name in variants}
    for _ in range(rounds):
        for name, result in results.items():
            clock = variants[name]()
            result.step_seconds.append(clock.get_durations())
            result.losses.append([float(loss) for loss in clock.losses])
            if torch.cuda.is_available():
                result.peak_bytes = max(result.peak_bytes, torch.cuda.max_memory_allocated())
            del clock
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return results


def compare(args: argparse.Namespace) -> bool:
    """Let FSDP2Strategy and another strategy take turns, report, and tell whether their losses are equal."""
    make_strategy = COMPARED[args.strategy]
    # less memory, the same numbers
    make_reference = partial(FSDP2Strategy, config=FSDP2Config(activation_checkpointing=True))
    (reference,) = measure({"": partial(run_strategy, make_reference, "32-true", args)}, rounds=1).values()
    ours, theirs = measure(
        {
            "FSDP2Strategy": partial(run_strategy, FSDP2Strategy, "bf16-mixed", args),
            args.strategy: partial(run_strategy, make_strategy, "bf16-mixed", args),
        },
        args.rounds,
    ).values()
    in_float32 = reference.losses * args.rounds
    noise, other_noise = (get_largest_difference(result.losses, in_float32) for result in (ours, theirs))
    difference = get_largest_difference(theirs.losses, ours.losses)
    if dist.get_rank() == 0:
        print_comparison(ours, theirs, args)
        losses = ours.losses[0]
        print(
            f"\nFSDP2Strategy's losses fall from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps. Those of"
            f" {args.strategy} differ from them by {difference:.2e} at most. From those of float32 they differ by"
            f" {noise:.2e} and {other_noise:.2e}."
        )
    return difference <= 2 * noise


def get_largest_difference(losses: list[list[float]], others: list[list[float]]) -> float:
    """Of any step; NaN where there is one."""
    return (torch.tensor(losses) - torch.tensor(others)).abs().max().item()


def print_comparison(ours: Result, theirs: Result, args: argparse.Namespace) -> None:
    """Versions, and a Markdown table."""
    print_heading(args, *(["megatron-fsdp"] if args.strategy == "megatron_fsdp" else []))
    print("| strategy | ms per step | / FSDP2Strategy (lowest to highest round) | peak GiB |\n|---|--:|--:|--:|")
    for name, result in (("FSDP2Strategy", ours), (args.strategy, theirs)):
        seconds = median(duration for durations in result.step_seconds for duration in durations)
        pairs = zip(result.step_seconds, ours.step_seconds, strict=True)
        ratios = [median(own) / median(other) for own, other in pairs]
        ratio = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {name} | {seconds * 1e3:.1f} | {ratio} | {format_peak(result)} |")


def print_report(results: dict[str, Result], args: argparse.Namespace) -> None:
    """Versions, and a Markdown table."""
    config = make_config(args)
    print_heading(args)
    print("| variant | tokens/s per device | MFU | peak GiB | ratio to the loop |\n|---|--:|--:|--:|--:|")
    tokens = args.batch_size * args.sequence_length
    available = get_available_flops(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else None
    for name, result in results.items():
        seconds = median(duration for durations in result.step_seconds for duration in durations)
        used = tokens * count_flops_per_token(config, args.sequence_length) / seconds
        mfu = f"{used / available:.1%}" if available else ""
        ratio = ""
        if LOOP in results:
            pairs = zip(results[LOOP].step_seconds, result.step_seconds, strict=True)
            ratio = f"{median(median(loop) / median(own) for loop, own in pairs):.3f}"
        print(f"| {name} | {tokens / seconds:.0f} | {mfu} | {format_peak(result)} | {ratio} |")


def print_heading(args: argparse.Namespace, *packages: str) -> None:
    """Versions, also of ``packages``, and what is trained."""
    print(
        f"{describe_machine(*packages)}; Llama of {count_parameters(make_config(args)) / 1e6:.0f} million parameters,"
        f" {args.batch_size} x {args.sequence_length} tokens per rank; {args.rounds} rounds of {args.steps} timed"
        " steps.\n"
    )


def format_peak(result: Result) -> str:
    """In GiB, if known."""
    return f"{result.peak_bytes / 2**30:.1f}" if result.peak_bytes else ""


def count_parameters(config: LlamaConfig) -> int:
    """Of a model of that architecture."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())


def count_flops_per_token(config: LlamaConfig, sequence_length: int) -> int:
    """Of forward and backward, without what is computed twice (PaLM, https://arxiv.org/abs/2204.02311, appendix B)."""
    weights = count_parameters(config) - config.vocab_size * config.hidden_size
    return 6 * weights + 12 * config.num_hidden_layers * config.hidden_size * sequence_length


def make_config(args: argparse.Namespace) -> LlamaConfig:
    """The shape of Llama-3.2-1B, but for what the arguments say, with a head of its own."""
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // args.head_size,
        num_key_value_heads=max(1, args.hidden_size // args.head_size // 4),
        tie_word_embeddings=False,
    )


def make_optimizer(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same everywhere."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def make_batches(args: argparse.Namespace) -> DataLoader[dict[str, Tensor]]:
    """Of all steps of a round."""
    distinct = DISTINCT_BATCHES if args.strategy else None
    return make_loader(count_steps(args), args.batch_size, args.sequence_length, args.vocab_size, distinct=distinct)


def count_steps(args: argparse.Namespace) -> int:
    """Of a round; the last one ends the time of the one before it."""
    return args.warmup_steps + args.steps + 1


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--strategy", choices=COMPARED, help="compare it with FSDP2Strategy; default: the variants")
    runs.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--warmup-steps", type=int, default=6, help="untimed steps of each round")
    parser.add_argument("--steps", type=int, help="timed steps of each round; 10, with --strategy 50")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per rank")
    parser.add_argument("--sequence-length", type=int, default=4096)
    args = parser.parse_args(arguments)
    args.steps = args.steps or (50 if args.strategy else 10)
    if args.strategy == "megatron_fsdp" and not torch.cuda.is_available():
        parser.error("--strategy megatron_fsdp needs a CUDA device, and there is none; run it where there is one.")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    args = parse_args(arguments)
    with process_group():
        if args.strategy:
            is_equal = compare(args)
        else:
            is_equal = True
            measure_variants(args)
    if not is_equal:
        sys.exit("The losses differ by more than twice the noise of bfloat16.")


def measure_variants(args: argparse.Namespace) -> None:
    """Let them take turns, and report."""
    if not torch.cuda.is_available() and "FSDPStrategy" in args.variants:
        print("FSDPStrategy needs a GPU and is left out.\n")
        args.variants.remove("FSDPStrategy")
    results = measure({name: partial(run_variant, name, args) for name in args.variants}, args.rounds)
    if dist.get_rank() == 0:
        print_report(results, args)


if __name__ == "__main__":
    main()
