"""What a training step costs in our Trainer run, against plain FSDP2 and against Lightning's ModelParallelStrategy.

Three runs train the same Llama-architecture model from the same weights on the same batches over the same two ranks::

    a  Trainer(strategy=FSDP2Strategy())
    b  a hand-written torch loop: fully_shard by hand, in the same units
    c  Trainer(strategy=ModelParallelStrategy()), with the same fully_shard calls in configure_model

All three live in the same processes and take turns, one block of steps each (a b c a b c ...), so that the machine's
noise hits them alike: each run is a Python thread, and a token decides whose turn it is. A step lasts from the start
of one batch to the start of the next, Lightning's loop included. Collectives and dispatched operations are counted in
separate steps at the end, which are not timed. The losses of the three runs must be equal at every step.

    torchrun --standalone --nproc-per-node 2 benchmarks/step_overhead.py
"""

import argparse
import os
import platform
import random
import statistics
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fsdp2 import FSDP2Strategy

RUNS = ("a", "b", "c")
TITLES = {"a": "FSDP2Strategy", "b": "torch loop", "c": "ModelParallelStrategy"}
COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}
VOCABULARY = 512


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Random tokens; item i is the batch of step i, different on every rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.length = total_steps(args)
        self.shape = (args.batch_size, args.sequence_length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(VOCABULARY, self.shape, generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Relay:
    """Hands the turn from run to run: one works, the others wait."""

    def __init__(self) -> None:
        self._events = {run: threading.Event() for run in RUNS}
        self._events[RUNS[0]].set()

    def wait(self, run: str) -> None:
        self._events[run].wait()

    def pass_on(self, run: str) -> None:
        self._events[run].clear()
        self._events[RUNS[(RUNS.index(run) + 1) % len(RUNS)]].set()


class OperationCounter(TorchDispatchMode):
    """Counts what reaches the dispatcher: operations, and collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["operations"] += func.namespace != "profiler"
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            self.counts[COLLECTIVES.get(name, name)] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            self.counts["host sync"] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Stepper:
    """One run's clock: told of every batch start, it keeps the times of its blocks and passes the turn between them."""

    run: str
    relay: Relay
    args: argparse.Namespace
    blocks: list[list[float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    counter: OperationCounter = field(default_factory=OperationCounter)
    batches: int = 0
    started: float = 0.0

    def on_batch_start(self) -> None:
        args, now = self.args, time.perf_counter()
        timed = self.batches - args.warmup_steps
        if timed > 0 and timed <= args.blocks * args.steps:
            self.blocks[-1].append(now - self.started)
        if timed == args.blocks * args.steps:
            self.relay.pass_on(self.run)
            self.relay.wait(self.run)
            self.counter.__enter__()
        elif timed % args.steps == 0 and 0 <= timed < args.blocks * args.steps:
            self.relay.pass_on(self.run)
            self.relay.wait(self.run)
            self.blocks.append([])
            dist.barrier()
        elif self.batches == total_steps(args) - 1:
            # the last step only lets the one before it end
            self.counter.__exit__(None, None, None)
        self.batches += 1
        self.started = time.perf_counter()


class StepperCallback(pl.Callback):
    """Connects a :class:`Stepper` to a Trainer."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper

    def on_train_batch_start(self, *args: Any) -> None:
        self.stepper.on_batch_start()


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
        return make_optimizer(self.model)


class HandShardedModule(Module):
    """What ModelParallelStrategy asks for: the user shards."""

    def configure_model(self) -> None:
        shard_by_hand(self.model, self.device_mesh["data_parallel"])


def run_trainer(make_module: Callable[..., Module], strategy: Any, stepper: Stepper, args: argparse.Namespace) -> None:
    trainer = pl.Trainer(
        accelerator=dist_device_type(),
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=total_steps(args),
        callbacks=[StepperCallback(stepper)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(make_module(args, stepper.losses), DataLoader(TokenDataset(args), batch_size=None))


def run_torch_loop(stepper: Stepper, args: argparse.Namespace) -> None:
    model = make_model(args)
    device = torch.device(dist_device_type())
    shard_by_hand(model.to(device), init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = make_optimizer(model)
    for batch in DataLoader(TokenDataset(args), batch_size=None):
        stepper.on_batch_start()
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        stepper.losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def shard_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """The units, the reshard rules and the prefetch chain that ``FSDP2Strategy`` finds by itself."""
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)}
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


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
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


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def dist_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def total_steps(args: argparse.Namespace) -> int:
    return args.warmup_steps + args.blocks * args.steps + args.counted_steps + 1


def bootstrap(ratios: list[float], samples: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the median of ``ratios``."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def print_report(steppers: dict[str, Stepper], args: argparse.Namespace) -> None:
    parameters = sum(parameter.numel() for parameter in make_model(args).parameters())
    print(
        f"torch {torch.__version__}, lightning {lightning.__version__}, transformers {transformers.__version__}, Python"
        f" {platform.python_version()}; {dist.get_world_size()} ranks, {dist.get_backend()}, {torch.get_num_threads()}"
        f" thread per rank; {parameters / 1e6:.1f}M parameters, {args.batch_size} x {args.sequence_length} tokens per"
        f" rank; {args.blocks} blocks of {args.steps} steps per run\n"
    )
    kinds = sorted({kind for stepper in steppers.values() for kind in stepper.counter.counts} - {"operations"})
    print(f"| run | median step (ms) | {' | '.join([*kinds, 'operations'])} |")
    print(f"|---|--:|{'--:|' * (len(kinds) + 1)}")
    medians = {run: statistics.median(sum(stepper.blocks, [])) for run, stepper in steppers.items()}
    for run, stepper in steppers.items():
        counts = [f"{stepper.counter.counts[kind] / args.counted_steps:g}" for kind in [*kinds, "operations"]]
        print(f"| {run}: {TITLES[run]} | {medians[run] * 1e3:.2f} | {' | '.join(counts)} |")
    print("\n| ratio | of medians | paired by block, median | 95 % interval |\n|---|--:|--:|--:|")
    for other in ("b", "c"):
        blocks = zip(steppers["a"].blocks, steppers[other].blocks, strict=True)
        ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in blocks]
        low, high = bootstrap(ratios)
        ratio = medians["a"] / medians[other]
        print(f"| a/{other} | {ratio:.4f} | {statistics.median(ratios):.4f} | {low:.4f} to {high:.4f} |")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group()
    relay = Relay()
    steppers = {run: Stepper(run, relay, args) for run in RUNS}
    world_size = dist.get_world_size()
    bodies: dict[str, Callable[[], None]] = {
        "a": lambda: run_trainer(Module, FSDP2Strategy(), steppers["a"], args),
        "b": lambda: run_torch_loop(steppers["b"], args),
        "c": lambda: run_trainer(HandShardedModule, ModelParallelStrategy(world_size, 1), steppers["c"], args),
    }

    def take_turns(run: str) -> None:
        try:
            torch.set_num_threads(1)
            relay.wait(run)
            bodies[run]()
            relay.pass_on(run)
        except BaseException:  # the other runs would wait for ever
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=take_turns, args=(run,)) for run in RUNS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses = {run: torch.stack(stepper.losses) for run, stepper in steppers.items()}
    for run in ("b", "c"):
        torch.testing.assert_close(losses["a"], losses[run], rtol=1e-5, atol=1e-5)
    if dist.get_rank() == 0:
        print_report(steppers, args)
        print(f"\nThe losses of the three runs are equal; the last one is {losses['a'][-1]:.4f}.")
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each run")
    parser.add_argument("--steps", type=int, default=20, help="steps per block")
    parser.add_argument("--warmup-steps", type=int, default=5, help="steps of each run before the first block")
    parser.add_argument("--counted-steps", type=int, default=3, help="steps of each run whose operations are counted")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--sequence-length", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
