"""Compare strategies: time, collectives and memory of a training step, and time and size of a checkpoint.

The model of configs/quickstart.yaml trains on random tokens, from the same weights under each of these strategies:

    FSDP2Strategy
    MegatronFSDPStrategy    only with a CUDA device, since Megatron-FSDP does not support CPUs
    DDPStrategy
    Lightning's DDPStrategy
    ModelParallelStrategy   Lightning's, with the fully_shard calls of FSDP2Strategy in configure_model

The strategies take turns, as ``turns.py`` describes: first in blocks of steps, then in saves with
``Trainer.save_checkpoint``. After each save, all files get an fsync. The module is a plain LightningModule with a
scalar loss. The losses must be equal.

On CUDA, memory is the peak of one step, including the state of the run (``torch.cuda.max_memory_allocated``). CPUs have
no such counter. There, memory is the size of parameters, gradients and optimizer states just before an optimizer step,
without activations, gathered parameters and the buckets of DDP.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.strategies
    python -m benchmarks.strategies --precision bf16-mixed                # one GPU
"""
# ruff: noqa: T201

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.checkpoint import flush
from benchmarks.trainings import (
    HandShardedModule,
    Module,
    describe_machine,
    get_device,
    make_loader,
    make_trainer,
    process_group,
    synchronize,
)
from benchmarks.turns import (
    CLOCKS,
    COLLECTIVES,
    Stepper,
    Turns,
    add_step_arguments,
    check_losses,
    count_steps,
    get_median,
    get_ratio_cells,
)
from lightning_fsdp2 import DDPStrategy, FSDP2Strategy, MegatronFSDPStrategy

FSDP2, MEGATRON_FSDP, DDP = "FSDP2Strategy", "MegatronFSDPStrategy", "DDPStrategy"
LIGHTNING_DDP, MODEL_PARALLEL = "Lightning's DDPStrategy", "ModelParallelStrategy"
STRATEGIES: dict[str, Callable[[], Any]] = {
    FSDP2: FSDP2Strategy,
    MEGATRON_FSDP: MegatronFSDPStrategy,
    DDP: DDPStrategy,
    LIGHTNING_DDP: LightningDDPStrategy,
    MODEL_PARALLEL: lambda: ModelParallelStrategy(dist.get_world_size(), 1),
}
BASELINES = {FSDP2: MODEL_PARALLEL, MEGATRON_FSDP: MODEL_PARALLEL, DDP: LIGHTNING_DDP, MODEL_PARALLEL: LIGHTNING_DDP}
"""The strategy that each strategy is compared with, by name."""

NOT_RUN = "not run: needs a CUDA device"
SAVE = "save"
QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
LOSS_TOLERANCES = {"32-true": 1e-4, "bf16-mixed": 2e-2}
"""Tolerances by precision, absolute and relative. DDP's autocast and FSDP2's casts round in different places."""

make_optimizer = partial(torch.optim.AdamW, lr=1e-3)


class Recorder(Stepper):
    """Callback that measures the steps, the memory and the saves of one run."""

    def __init__(self, run: str, turns: Turns, args: argparse.Namespace, folder: Path) -> None:
        super().__init__(run, turns, args)
        self.folder = folder
        self.memory_bytes = self.others_bytes = self.checkpoint_bytes = 0
        self.save_seconds: list[float] = []

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        """Record the memory that the other runs hold."""
        if torch.cuda.is_available():
            self.others_bytes = torch.cuda.memory_allocated()

    def on_train_batch_start(self, *args: Any) -> None:
        """Measure the peak of the last step before the first block, during which no other run has a turn."""
        if torch.cuda.is_available() and self.batches == self.args.warmup_steps - 1:
            torch.cuda.reset_peak_memory_stats()
        if torch.cuda.is_available() and self.batches == self.args.warmup_steps:
            self.memory_bytes = torch.cuda.max_memory_allocated() - self.others_bytes
        super().on_train_batch_start(*args)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Count the bytes of the run's tensors if there is no CUDA device."""
        if not torch.cuda.is_available() and self.batches == self.args.warmup_steps:
            self.memory_bytes = count_held_bytes(optimizer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Save after the last step, in turns with the other runs."""
        if self.batches < count_steps(self.args):
            return
        for index in range(self.args.saves):
            self.turns.let_others_go_first(self.run)
            path = self.folder / f"{self.run}-{index}.ckpt"
            synchronize()
            dist.barrier()
            started = time.perf_counter()
            trainer.save_checkpoint(path)
            flush(path)
            self.save_seconds.append(time.perf_counter() - started)
        self.checkpoint_bytes = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())

    def get_samples(self, measure: str) -> list[list[float]]:
        """Return seconds by a clock, or of each save, in blocks that are paired with the blocks of other runs."""
        return [[seconds] for seconds in self.save_seconds] if measure == SAVE else self.get_durations(measure)


def count_held_bytes(optimizer: Optimizer) -> int:
    """Count the bytes of parameters, gradients and optimizer states on this rank, by their storages."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    sizes = {}
    for tensor in [*parameters, *(parameter.grad for parameter in parameters), *states]:
        if isinstance(tensor, Tensor):
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def train(strategy: str, recorder: Recorder) -> None:
    """Train under one strategy."""
    args, precision = recorder.args, recorder.args.precision
    module_class = HandShardedModule if strategy == MODEL_PARALLEL else Module
    module = module_class(make_model(), make_optimizer, recorder.losses)
    if isinstance(module, HandShardedModule) and precision == "bf16-mixed":
        # Lightning's strategy leaves mixed precision to the user's fully_shard
        precision = "32-true"
        module.mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    trainer = make_trainer(
        STRATEGIES[strategy](), count_steps(args), [recorder], accelerator=get_device().type, precision=precision
    )
    vocabulary = module.model.config.vocab_size
    trainer.fit(module, make_loader(count_steps(args), args.batch_size, args.sequence_length, vocabulary))


def make_model() -> LlamaForCausalLM:
    """Make the quickstart's model with the same weights at every call."""
    torch.manual_seed(0)
    fields = yaml.safe_load(QUICKSTART.read_text())["model"]["init_args"]["config"]
    return LlamaForCausalLM(LlamaConfig(**{name: value for name, value in fields.items() if name != "model_type"}))


def print_report(recorders: dict[str, Recorder], args: argparse.Namespace) -> None:
    """Print versions and two Markdown tables: the needs of each strategy, and ratios of the times."""
    parameters = sum(parameter.numel() for parameter in make_model().parameters())
    packages = ["megatron-fsdp"] if MEGATRON_FSDP in recorders else []
    print(
        f"{describe_machine(*packages)}; {parameters / 1e6:.2f}M parameters, {args.batch_size} x"
        f" {args.sequence_length} tokens per rank, {args.precision}; {args.blocks} blocks of {args.steps} steps,"
        f" {args.saves} saves. Rank 0:\n"
    )
    # on CUDA, backward runs in another thread, so the CPU time of this thread does not include it
    clocks = ["wall"] if torch.cuda.is_available() else list(CLOCKS)
    memory = "peak MiB" if torch.cuda.is_available() else "parameters, gradients and optimizer state MiB"
    columns = [*(f"{clock} ms" for clock in clocks), *COLLECTIVES, memory, "save ms", "checkpoint MiB"]
    print(f"| strategy | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
    for strategy in STRATEGIES:
        cells = [NOT_RUN, *[""] * (len(columns) - 1)]
        if recorder := recorders.get(strategy):
            cells = [f"{get_median(recorder.get_samples(clock)) * 1e3:.2f}" for clock in clocks]
            cells += [f"{recorder.count_per_step(kind):g}" for kind in COLLECTIVES]
            cells += [f"{recorder.memory_bytes / 2**20:.2f}", f"{get_median(recorder.get_samples(SAVE)) * 1e3:.1f}"]
            cells += [f"{recorder.checkpoint_bytes / 2**20:.2f}"]
        print(f"| {strategy} | {' | '.join(cells)} |")
    print("\n| ratio | of | of medians | median of pairs | 95 % interval |\n|---|---|--:|--:|--:|")
    for ours, theirs in BASELINES.items():
        for measure in (*clocks, SAVE):
            if ours in recorders:
                cells = get_ratio_cells(*(recorders[run].get_samples(measure) for run in (ours, theirs)))
                print(f"| {ours} / {theirs} | {measure} | {' | '.join(cells)} |")


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a temporary folder that all ranks share, since all are on one machine."""
    names = [tempfile.mkdtemp(prefix="strategies-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Let the strategies take turns, compare their losses, and print the report."""
    args = parse_args(arguments)
    warnings.filterwarnings("ignore")
    runs = [strategy for strategy in STRATEGIES if strategy != MEGATRON_FSDP or torch.cuda.is_available()]
    with process_group(), shared_folder() as folder:
        turns = Turns(runs)
        recorders = {run: Recorder(run, turns, args, folder) for run in runs}
        turns.run({run: partial(train, run, recorder) for run, recorder in recorders.items()})
        last = check_losses(recorders, LOSS_TOLERANCES[args.precision])
        if dist.get_rank() == 0:
            print_report(recorders, args)
            print(f"\nThe losses of all are equal; the last is {last:.4f}.")


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_arguments(parser, blocks=40)
    parser.add_argument("--saves", type=int, default=10, help="checkpoints of each run")
    parser.add_argument("--precision", choices=LOSS_TOLERANCES, default="32-true")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per rank")
    parser.add_argument("--sequence-length", type=int, default=128)
    args = parser.parse_args(arguments)
    if args.warmup_steps < 2:
        parser.error(
            "--warmup-steps must be 2 or more: memory is that of the last, and the first has no optimizer state."
        )
    if args.saves < 1:
        parser.error("--saves must be 1 or more.")
    return args


if __name__ == "__main__":
    main()
