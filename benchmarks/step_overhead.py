"""What a training step costs in our Trainer run, against plain FSDP2 and against Lightning's ModelParallelStrategy.

Three runs train the same Llama-architecture model from the same weights on the same batches over the same two ranks:

    a  Trainer(strategy=FSDP2Strategy())
    b  a hand-written torch loop: fully_shard by hand, in the same units
    c  Trainer(strategy=ModelParallelStrategy()), with the same fully_shard calls in configure_model

All three live in the same processes and take turns, one block of steps each (a b c a b c ...), so that the machine's
noise hits them alike: each run is a Python thread, and events say whose turn it is. A step lasts from the start of
one batch to the start of the next, Lightning's loop included. Collectives and dispatched operations are counted in
steps of their own at the end. The losses of the three runs must be equal.

    torchrun --standalone --nproc-per-node 2 benchmarks/step_overhead.py
"""
# ruff: noqa: T201

import argparse
import os
import platform
import random
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fsdp2 import FSDP2Strategy

RUNS = {"a": "FSDP2Strategy", "b": "torch loop", "c": "ModelParallelStrategy"}
CLOCKS = {"wall": time.perf_counter, "CPU": time.thread_time}
COUNTED = {
    "c10d::_allgather_base_": "all-gathers",
    "c10d::_reduce_scatter_base_": "reduce-scatters",
    "c10d::allreduce_": "all-reduces",
    "c10d::broadcast_": "broadcasts",
    "aten::_local_scalar_dense": "host reads",
}
VOCABULARY, SEQUENCE_LENGTH = 512, 64
LEARNING_RATE = 1e-3


class OperationCounter(TorchDispatchMode):
    """Counts what reaches the dispatcher, but for the profiler's marks; by name what is in ``COUNTED``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.counts["operations"] += not name.startswith("profiler::")
        self.counts[COUNTED.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


class Stepper(pl.Callback):
    """One run's clock: it is told of every batch start, keeps the durations, and passes the turn after each block."""

    def __init__(self, run: str, turns: dict[str, threading.Event], args: argparse.Namespace) -> None:
        self.run, self.turns, self.args = run, turns, args
        self.blocks: list[dict[str, list[float]]] = []
        self.losses: list[Tensor] = []
        self.counter = OperationCounter()
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        """End the time of the last step, let the others have their turn, start that of the next."""
        now = {clock: read() for clock, read in CLOCKS.items()}
        step, timed_steps = self.batches - self.args.warmup_steps, self.args.blocks * self.args.steps
        self.batches += 1
        if 0 < step <= timed_steps:
            for clock, started in self.started.items():
                self.blocks[-1][clock].append(now[clock] - started)
        if 0 <= step <= timed_steps and step % self.args.steps == 0:
            pass_turn(self.turns, self.run)
            self.turns[self.run].wait()
            self.blocks.append({clock: [] for clock in CLOCKS})
            dist.barrier()
        if step == timed_steps:
            del self.blocks[-1]
            self.counter.__enter__()
        if self.batches == count_steps(self.args):
            self.counter.__exit__(None, None, None)
        self.started = {clock: read() for clock, read in CLOCKS.items()}


def pass_turn(turns: dict[str, threading.Event], run: str) -> None:
    """End this run's turn and begin that of the next."""
    turns[run].clear()
    turns[{"a": "b", "b": "c", "c": "a"}[run]].set()


class Module(pl.LightningModule):
    """A plain LightningModule with a scalar loss, and no sharding code."""

    def __init__(self, args: argparse.Namespace, losses: list[Tensor]) -> None:
        super().__init__()
        self.model = make_model(args)
        self.losses = losses

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)


class HandShardedModule(Module):
    """What ModelParallelStrategy asks for: the user shards."""

    def configure_model(self) -> None:
        shard_by_hand(self.model, self.device_mesh["data_parallel"])


def run_trainer(module: Module, strategy: Any, stepper: Stepper) -> None:
    """Runs a and c."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=count_steps(stepper.args),
        callbacks=[stepper],
        use_distributed_sampler=False,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(module, make_loader(stepper.args))


def run_torch_loop(model: LlamaForCausalLM, stepper: Stepper) -> None:
    """Run b."""
    shard_by_hand(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in make_loader(stepper.args):
        stepper.on_train_batch_start()
        loss = model(**batch).loss
        stepper.losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def shard_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """The units, reshard rules and prefetch chain that ``FSDP2Strategy`` finds by itself."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    layers = list(model.model.layers)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=layer is not layers[-1], **options)
    fully_shard(model.model.embed_tokens, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    # an untied embedding's gradient does not need its weights
    model.model.embed_tokens.set_unshard_in_backward(False)
    chain = [model.model.embed_tokens, *layers, model.model.norm]
    for index, module in enumerate(chain):
        if ahead := chain[index + 1 : index + 2]:
            module.set_modules_to_forward_prefetch(ahead)
        if behind := chain[max(0, index - 2) : index]:
            module.set_modules_to_backward_prefetch(behind[::-1])


def make_loader(args: argparse.Namespace) -> DataLoader[dict[str, Tensor]]:
    """This rank's random tokens, the same at every call."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (count_steps(args), args.batch_size, SEQUENCE_LENGTH))
    return DataLoader([{"input_ids": batch, "labels": batch} for batch in tokens], batch_size=None)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """The same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def count_steps(args: argparse.Namespace) -> int:
    """Of each run, the untimed ones included; the last lets the one before it end."""
    return args.warmup_steps + args.blocks * args.steps + args.counted_steps + 1


def bootstrap(ratios: list[float], samples: int = 5000) -> tuple[float, float]:
    """The 95 % interval of the median of ``ratios``."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def print_report(steppers: dict[str, Stepper], args: argparse.Namespace) -> None:
    """Print versions and two Markdown tables: times and counts per run, ratios of the times."""
    parameters = sum(parameter.numel() for parameter in make_model(args).parameters())
    print(
        f"torch {torch.__version__}, lightning {lightning.__version__}, transformers {transformers.__version__}, Python"
        f" {platform.python_version()}; {os.cpu_count()} CPU cores, {dist.get_world_size()} ranks of"
        f" {torch.get_num_threads()} thread, {dist.get_backend()}; {parameters / 1e6:.1f}M parameters,"
        f" {args.batch_size} x {SEQUENCE_LENGTH} tokens per rank; {args.blocks} blocks of {args.steps} steps.\n"
    )
    columns = [*COUNTED.values(), "operations"]
    print(f"| run | {' | '.join(f'{clock} ms' for clock in CLOCKS)} | {' | '.join(columns)} |")
    print(f"|---|{'--:|' * (len(CLOCKS) + len(columns))}")
    times = {
        (run, clock): median(duration for block in stepper.blocks for duration in block[clock])
        for run, stepper in steppers.items()
        for clock in CLOCKS
    }
    for run, stepper in steppers.items():
        cells = [f"{times[run, clock] * 1e3:.2f}" for clock in CLOCKS]
        cells += [f"{stepper.counter.counts[column] / args.counted_steps:g}" for column in columns]
        print(f"| {run}: {RUNS[run]} | {' | '.join(cells)} |")
    print("\n| ratio | clock | of medians | median of paired blocks | 95 % interval |\n|---|---|--:|--:|--:|")
    for other in ("b", "c"):
        for clock in CLOCKS:
            pairs = zip(steppers["a"].blocks, steppers[other].blocks, strict=True)
            ratios = [median(ours[clock]) / median(theirs[clock]) for ours, theirs in pairs]
            low, high = bootstrap(ratios)
            cells = [
                f"{times['a', clock] / times[other, clock]:.3f}",
                f"{median(ratios):.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
            print(f"| a/{other} | {clock} | {' | '.join(cells)} |")


def main() -> None:
    """Start the three runs, let them take turns, compare them."""
    args = parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    turns = {run: threading.Event() for run in RUNS}
    turns["a"].set()
    steppers = {run: Stepper(run, turns, args) for run in RUNS}
    mps = ModelParallelStrategy(dist.get_world_size(), 1)
    bodies: dict[str, Callable[[], None]] = {
        "a": lambda: run_trainer(Module(args, steppers["a"].losses), FSDP2Strategy(), steppers["a"]),
        "b": lambda: run_torch_loop(make_model(args), steppers["b"]),
        "c": lambda: run_trainer(HandShardedModule(args, steppers["c"].losses), mps, steppers["c"]),
    }

    def take_turns(run: str) -> None:
        try:
            turns[run].wait()
            torch.set_num_threads(1)
            bodies[run]()
            pass_turn(turns, run)
        except BaseException:  # the other runs would wait for ever
            traceback.print_exc()
            os._exit(1)

    with ThreadPoolExecutor(len(RUNS)) as pool:
        pool.map(take_turns, RUNS)
    losses = [torch.stack(stepper.losses) for stepper in steppers.values()]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-5, atol=1e-5)
    if dist.get_rank() == 0:
        print_report(steppers, args)
        print(f"\nThe losses of the three runs are equal; the last is {losses[0][-1]:.4f}.")
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60, help="blocks of each run")
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--warmup-steps", type=int, default=5, help="steps of each run before its first block")
    parser.add_argument("--counted-steps", type=int, default=3, help="steps of each run whose operations are counted")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of 64 tokens per rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
