"""Speed and memory of training a Llama on GPUs: our strategy, a hand-written FSDP2 loop, and Lightning's strategies.

Every variant trains the same architecture from random weights with AdamW in bf16-mixed precision on the same number of
tokens. The variants take turns, one round each, and each round starts a new model; the first steps of a round are not
timed. What is printed are medians over the timed steps of all rounds, and the ratio of each variant's tokens per second
to the hand-written loop's in the same round.

    python -m benchmarks.gpu                                   # one GPU
    torchrun --nproc-per-node 8 -m benchmarks.gpu
"""
# ruff: noqa: T201

import argparse
import gc
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy

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
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


@dataclass
class Result:
    """What the rounds of a variant have measured."""

    step_seconds: list[list[float]] = field(default_factory=list)
    """Of each round."""

    peak_bytes: int = 0


class Clock(pl.Callback):
    """Times the steps of a round, from one batch's start to the next one's, the device waited for."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.starts: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Note the time."""
        if len(self.starts) == self.warmup_steps and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        self.starts.append(time.perf_counter())

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
    for batch in make_loader(args):
        clock.on_train_batch_start()
        batch = {name: value.to(device) for name, value in batch.items()}
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_trainer(
    args: argparse.Namespace, clock: Clock, module: pl.LightningModule, strategy: Any, devices: int
) -> None:
    """Any variant of Lightning's or ours."""
    trainer = pl.Trainer(
        accelerator=get_device().type,
        devices=devices,
        strategy=strategy,
        precision="bf16-mixed" if not isinstance(strategy, ModelParallelStrategy) else "32-true",
        max_steps=count_steps(args),
        callbacks=[clock],
        use_distributed_sampler=False,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(module, make_loader(args))


def run_variant(name: str, args: argparse.Namespace) -> Clock:
    """One round of a variant."""
    clock = Clock(args.warmup_steps)
    devices = dist.get_world_size()
    config = make_config(args)
    torch.manual_seed(0)
    if name == LOOP:
        train_with_loop(args, clock)
    elif name == "ModelParallelStrategy":
        train_with_trainer(args, clock, HandShardedModule(config), ModelParallelStrategy(devices, 1), devices)
    elif name == "FSDPStrategy":
        strategy = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer})
        train_with_trainer(args, clock, PlainModule(config), strategy, devices)
    else:
        flags, loss = OURS[name]
        fields = {**config.to_dict(), "model_type": "llama"}
        module = CausalLM(config=fields, loss=loss, optimizer=make_optimizer, decay_norms_and_biases=True)
        train_with_trainer(args, clock, module, FSDP2Strategy(config=FSDP2Config(**flags)), devices)
    return clock


def measure(args: argparse.Namespace) -> dict[str, Result]:
    """Let the variants take turns."""
    results = {name: Result() for name in args.variants}
    for _ in range(args.rounds):
        for name, result in results.items():
            clock = run_variant(name, args)
            result.step_seconds.append(clock.get_durations())
            if torch.cuda.is_available():
                result.peak_bytes = max(result.peak_bytes, torch.cuda.max_memory_allocated())
            del clock
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return results


def print_report(results: dict[str, Result], args: argparse.Namespace) -> None:
    """Versions, and a Markdown table."""
    config = make_config(args)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(
        f"{dist.get_world_size()} x {device}; torch {torch.__version__}, lightning {lightning.__version__},"
        f" transformers {transformers.__version__}, Python {platform.python_version()}; Llama of"
        f" {count_parameters(config) / 1e6:.0f} million parameters, {args.batch_size} x {args.sequence_length} tokens"
        f" per rank; {args.rounds} rounds of {args.steps} timed steps.\n"
    )
    print("| variant | tokens/s per device | MFU | peak GiB | ratio to the loop |\n|---|--:|--:|--:|--:|")
    tokens = args.batch_size * args.sequence_length
    available = get_available_flops(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else None
    for name, result in results.items():
        seconds = median(duration for durations in result.step_seconds for duration in durations)
        used = tokens * count_flops_per_token(config, args.sequence_length) / seconds
        mfu = f"{used / available:.1%}" if available else ""
        peak = f"{result.peak_bytes / 2**30:.1f}" if result.peak_bytes else ""
        ratio = ""
        if LOOP in results:
            pairs = zip(results[LOOP].step_seconds, result.step_seconds, strict=True)
            ratio = f"{median(median(loop) / median(own) for loop, own in pairs):.3f}"
        print(f"| {name} | {tokens / seconds:.0f} | {mfu} | {peak} | {ratio} |")


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


def make_loader(args: argparse.Namespace) -> DataLoader[dict[str, Tensor]]:
    """Random tokens."""
    shape = (count_steps(args), args.batch_size, args.sequence_length)
    tokens = torch.randint(args.vocab_size, shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    return DataLoader([{"input_ids": batch, "labels": batch} for batch in tokens], batch_size=None, pin_memory=False)


def count_steps(args: argparse.Namespace) -> int:
    """Of a round; the last one ends the time of the one before it."""
    return args.warmup_steps + args.steps + 1


def get_device() -> torch.device:
    """This process's."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--warmup-steps", type=int, default=6, help="untimed steps of each round")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each round")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per rank")
    parser.add_argument("--sequence-length", type=int, default=4096)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    args = parse_args(arguments)
    owns_group = not dist.is_initialized()
    if owns_group:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
            os.environ.setdefault(name, value)
        if torch.cuda.is_available():
            torch.cuda.set_device(get_device())
        dist.init_process_group()
    if not torch.cuda.is_available() and "FSDPStrategy" in args.variants:
        print("FSDPStrategy needs a GPU and is left out.\n")
        args.variants.remove("FSDPStrategy")
    results = measure(args)
    if dist.get_rank() == 0:
        print_report(results, args)
    if owns_group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
