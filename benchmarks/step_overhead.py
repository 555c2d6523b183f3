"""Compare the cost of a training step under FSDP2Strategy with plain FSDP2 and Lightning's ModelParallelStrategy.

Three runs train the same Llama-architecture model from the same weights on the same batches over the same two ranks:

    a  Trainer(strategy=FSDP2Strategy())
    b  a hand-written torch loop: fully_shard by hand, in the same units
    c  Trainer(strategy=ModelParallelStrategy()), with the same fully_shard calls in configure_model

The runs take turns, as ``turns.py`` describes. The losses of all three runs must be equal.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.step_overhead
"""
# ruff: noqa: T201

import argparse
import os
import platform
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.trainings import HandShardedModule, Module, make_loader, make_trainer, process_group, shard_by_hand
from benchmarks.turns import (
    CLOCKS,
    COLLECTIVES,
    HOST_READS,
    OPERATIONS,
    Stepper,
    Turns,
    add_step_arguments,
    check_losses,
    count_steps,
    get_median,
    get_ratio_cells,
)
from lightning_fsdp2 import FSDP2Strategy

RUNS = {"a": "FSDP2Strategy", "b": "torch loop", "c": "ModelParallelStrategy"}
VOCABULARY, SEQUENCE_LENGTH = 512, 64
make_optimizer = partial(torch.optim.AdamW, lr=1e-3)


def run_trainer(module_class: type[Module], strategy: Any, stepper: Stepper) -> None:
    """Train with a Trainer, for runs a and c."""
    module = module_class(make_model(stepper.args), make_optimizer, stepper.losses)
    trainer = make_trainer(strategy, count_steps(stepper.args), [stepper], accelerator="cpu")
    trainer.fit(module, make_batches(stepper.args))


def run_torch_loop(stepper: Stepper) -> None:
    """Train in a torch loop, for run b."""
    model = make_model(stepper.args)
    shard_by_hand(model, init_device_mesh("cpu", (dist.get_world_size(),)), HandShardedModule.mp_policy)
    optimizer = make_optimizer(model.parameters())
    for batch in make_batches(stepper.args):
        stepper.on_train_batch_start()
        loss = model(**batch, use_cache=False).loss
        stepper.losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_batches(args: argparse.Namespace) -> DataLoader[dict[str, Tensor]]:
    """Make the batches of a run."""
    return make_loader(count_steps(args), args.batch_size, SEQUENCE_LENGTH, VOCABULARY)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Make a Llama with the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
    )
    return LlamaForCausalLM(config).train()


def print_report(steppers: dict[str, Stepper], args: argparse.Namespace) -> None:
    """Print versions and two Markdown tables: times and counts per run, and ratios of the times."""
    parameters = sum(parameter.numel() for parameter in make_model(args).parameters())
    print(
        f"torch {torch.__version__}, lightning {lightning.__version__}, transformers {transformers.__version__}, Python"
        f" {platform.python_version()}; {os.cpu_count()} CPU cores, {dist.get_world_size()} ranks of"
        f" {torch.get_num_threads()} thread, {dist.get_backend()}; {parameters / 1e6:.1f}M parameters,"
        f" {args.batch_size} x {SEQUENCE_LENGTH} tokens per rank; {args.blocks} blocks of {args.steps} steps.\n"
    )
    columns = [*COLLECTIVES, HOST_READS, OPERATIONS]
    print(f"| run | {' | '.join(f'{clock} ms' for clock in CLOCKS)} | {' | '.join(columns)} |")
    print(f"|---|{'--:|' * (len(CLOCKS) + len(columns))}")
    for run, stepper in steppers.items():
        cells = [f"{get_median(stepper.get_durations(clock)) * 1e3:.2f}" for clock in CLOCKS]
        cells += [f"{stepper.count_per_step(column):g}" for column in columns]
        print(f"| {run}: {RUNS[run]} | {' | '.join(cells)} |")
    print("\n| ratio | clock | of medians | median of paired blocks | 95 % interval |\n|---|---|--:|--:|--:|")
    for other in ("b", "c"):
        for clock in CLOCKS:
            cells = get_ratio_cells(*(steppers[run].get_durations(clock) for run in ("a", other)))
            print(f"| a/{other} | {clock} | {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the three trainings in turns, and compare them."""
    args = parse_args(arguments)
    warnings.filterwarnings("ignore")
    with process_group("gloo"):
        turns = Turns(list(RUNS))
        steppers = {run: Stepper(run, turns, args) for run in RUNS}
        mps = ModelParallelStrategy(dist.get_world_size(), 1)
        turns.run(
            {
                "a": partial(run_trainer, Module, FSDP2Strategy(), steppers["a"]),
                "b": partial(run_torch_loop, steppers["b"]),
                "c": partial(run_trainer, HandShardedModule, mps, steppers["c"]),
            }
        )
        last = check_losses(steppers, tolerance=1e-5)
        if dist.get_rank() == 0:
            print_report(steppers, args)
            print(f"\nThe losses of the three runs are equal; the last is {last:.4f}.")


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_arguments(parser, blocks=60)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of 64 tokens per rank")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
