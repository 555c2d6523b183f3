"""Show how much peak memory each option of FSDP2Config and CausalLM saves in a training step, by category.

First, a Llama-3-8B is planned (``lightning_fsdp2.plan``): a step of the Trainer runs on torch's fake process group with
fake tensors, and every allocation is recorded.

Then a small model is both planned and trained, by two forked ranks with real tensors and gloo. The table compares the
resident memory that a step adds at its peak, as Linux counts it, with the memory that the plan predicts.

    python benchmarks/memory.py
"""
# ruff: noqa: T201

import argparse
import ctypes
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Manager, FSDP2Strategy, clip_grad_norm_, create_device_mesh
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.parallel.loss.token_mean import apply_token_mean_
from lightning_fsdp2.plan import RankPlan, plan_run
from lightning_fsdp2.plan.simulation.even_routing import assume_even_routing
from lightning_fsdp2.plan.simulation.recorder import CATEGORIES, OPTIMIZER_STATES, WEIGHTS
from lightning_fsdp2.sizes import DP_CP

M_MMAP_THRESHOLD = -3
"""Option of glibc's ``mallopt``. Blocks above this size return to the system as soon as they are freed."""

PR_SET_THP_DISABLE = 41
"""Option of Linux's ``prctl``. Of a huge page (2 MiB), all would count as resident as soon as one byte is used."""

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    **LLAMA_3_8B,
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Variant:
    """A row of a table: options of the strategy and of the module."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of FSDP2Config."""

    module: dict[str, Any] = field(default_factory=dict)
    """Arguments of CausalLM."""

    @property
    def is_offloaded(self) -> bool:
        """Whether shards and optimizer states are on the host."""
        return bool(self.config.get("offload_policy"))


FULL = {"activation_checkpointing": "full"}
CHUNKED = {"loss": "chunked"}
VARIANTS = {
    "baseline": Variant(),
    "selective AC": Variant({"activation_checkpointing": "selective"}),
    "full AC": Variant(FULL),
    "full AC, loss parallel": Variant({**FULL, "loss_parallel": True}),
    "full AC, chunked loss": Variant(FULL, CHUNKED),
    "full AC, chunked loss, offload": Variant({**FULL, "offload_policy": True}, CHUNKED),
}


@dataclass(frozen=True)
class Run:
    """A model and the ranks that train it."""

    model: dict[str, Any]
    ranks: int
    tp_size: int
    sequence_length: int
    batch_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes, as arguments of strategies and of ``create_device_mesh``."""
        return {"tp_size": self.tp_size, "cp_size": self.cp_size, "ep_size": self.ep_size}

    def __str__(self) -> str:
        tp = f" x tp {self.tp_size} + sequence parallel" if self.tp_size > 1 else ""
        return f"dp {self.ranks // self.tp_size}{tp}"


def main() -> None:
    """Print a table for each simulated mesh, and a table that compares plans and real runs of the small model."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}\n")
    for tp_size in arguments.tp_sizes:
        model = {**LLAMA_3_8B, "num_hidden_layers": arguments.layers}
        print_simulation(
            Run(model, arguments.ranks, tp_size, arguments.sequence_length, arguments.batch_size), arguments.variants
        )
    print_comparison([Run(SMALL, 2, tp_size, 2048) for tp_size in (1, 2)], arguments.variants)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the simulated mesh")
    parser.add_argument(
        "--tp-sizes", type=int, nargs="+", default=[1, 8], help="tensor parallel sizes, with one table each"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per data parallel rank")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    return parser.parse_args()


def print_simulation(run: Run, variants: Iterable[str]) -> None:
    """Print the planned GiB of each category at the peak, with a row for each variant."""
    print(f"{run}, {run.batch_size} x {run.sequence_length} tokens per data parallel rank; GiB:\n")
    print(f"| variant | {' | '.join(CATEGORIES)} | peak | in |")
    print(f"|---|{'--:|' * (len(CATEGORIES) + 1)}---|")
    for name in variants:
        if not is_measurable(run, VARIANTS[name]):
            continue
        planned = plan(run, VARIANTS[name])
        cells = [f"{size / 2**30:.2f}" for size in (*planned.peak.values(), planned.peak_bytes)]
        print(f"| {name} | {' | '.join(cells)} | {planned.peak_at} |", flush=True)
    print()


def print_comparison(runs: Iterable[Run], variants: Iterable[str]) -> None:
    """Print the planned and the measured MiB of the small model, with a row for each variant."""
    columns = ("peak, planned", "added, planned", "added, resident", "planned / resident")
    print(f"| ranks | variant | {' | '.join(columns)} |")
    print(f"|---|---|{'--:|' * len(columns)}")
    for run in runs:
        for name in variants:
            if not is_measurable(run, VARIANTS[name]) or VARIANTS[name].is_offloaded:
                continue
            planned = plan(run, VARIANTS[name])
            with tempfile.TemporaryDirectory() as folder:
                resident, *_ = run_forked(partial(train, run, VARIANTS[name], folder), run.ranks)
            sizes = [f"{size / 2**20:.1f}" for size in (planned.peak_bytes, count_added(planned), resident)]
            print(f"| {run} | {name} | {' | '.join(sizes)} | {count_added(planned) / resident:.3f} |", flush=True)


def is_measurable(run: Run, variant: Variant) -> bool:
    """Return whether the options of ``variant`` have an effect in ``run``."""
    return run.tp_size > 1 or not variant.config.get("loss_parallel")


def run_forked(function: Callable[[int], Any], ranks: int, *, threads: int = 1) -> list[Any]:
    """Call ``function`` with each rank in a separate forked process, which need not import modules again.

    A forked process has none of its parent's OpenMP threads. If the parent has started some, a forked process with
    more than one of ``threads`` would wait for them forever.
    """
    set_threads = partial(torch.set_num_threads, threads)
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork"), set_threads) as pool:
        return list(pool.map(function, range(ranks)))


def plan(run: Run, variant: Variant) -> RankPlan:
    """Plan rank 0 of a run."""
    trainer = make_trainer(run, variant)
    return plan_run(trainer, make_module(run, variant), make_batch(run), world_size=run.ranks, suggest=False).ranks[0]


def make_trainer(run: Run, variant: Variant) -> Trainer:
    """Make the Trainer of a run that is planned."""
    strategy = FSDP2Strategy(**run.sizes, config=make_config(run, variant))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_steps": 1}
    return Trainer(
        accelerator="cpu", devices=1, strategy=strategy, precision="bf16-mixed", gradient_clip_val=1.0, **options
    )


def count_added(planned: RankPlan) -> int:
    """Return the bytes that a planned step adds to weights, optimizer states and gradients, which exist before it."""
    return planned.peak_bytes - 2 * planned.peak[WEIGHTS] - planned.peak[OPTIMIZER_STATES]


def train(run: Run, variant: Variant, folder: str, rank: int) -> int:
    """Run a real step, and return the bytes that it adds to the resident memory at its peak, as Linux counts them."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    store = dist.FileStore(f"{folder}/store", run.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.ranks, timeout=timedelta(seconds=60))
    step = build_step(run, variant)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory
    before = read_resident_memory("VmRSS")
    step()
    added = read_resident_memory("VmHWM") - before
    dist.barrier()  # a rank that exits early would make its peers fail
    return added


def read_resident_memory(name: str) -> int:
    """Return the resident bytes of this process: now (``VmRSS``) or at the peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def make_config(run: Run, variant: Variant) -> FSDP2Config:
    """Make the config of the strategy for a variant."""
    return FSDP2Config(sequence_parallel=run.tp_size > 1, **variant.config)


def make_module(run: Run, variant: Variant) -> CausalLM:
    """Make the module of a variant, which builds its model later."""
    # `foreach` is the default of AdamW on a GPU, but not on a CPU
    return CausalLM(config=run.model, optimizer=partial(AdamW, foreach=True), **variant.module)


def make_batch(run: Run, device_type: str = "cpu") -> dict[str, Tensor]:
    """Make a random batch of one data parallel rank."""
    tokens = torch.randint(run.model["vocab_size"], (run.batch_size, run.sequence_length), device=device_type)
    return {"input_ids": tokens, "labels": tokens}


def build_step(
    run: Run, variant: Variant, device_type: str = "cpu", *, has_even_routing: bool = False
) -> Callable[[], None]:
    """Shard a module as ``FSDP2Strategy`` does under ``precision="bf16-mixed"``, and return a step of its training.

    The first step creates the optimizer states and fills the caches of DTensor. All later steps are alike. With
    ``has_even_routing``, expert parallel ranks exchange as many tokens as a plan assumes.
    """
    config = make_config(run, variant)
    mesh = create_device_mesh(config, **run.sizes, device_type=device_type)
    module = make_module(run, variant)
    with torch.device("meta"):
        module.configure_model()
    FSDP2Manager(config, mesh).parallelize(module)
    if has_even_routing:
        assume_even_routing(module)
    batch, group = make_batch(run, device_type), get_mesh(mesh, DP_CP).get_group()
    return partial(train_step, module, module.configure_optimizers(), batch, group)


def train_step(module: CausalLM, optimizer: Optimizer, batch: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Run a training step by hand, as the Trainer, ``FSDP2Strategy`` and ``CausalLM`` do together."""
    loss = module.training_step(batch, 0)
    optimizer.zero_grad()
    loss.backward()
    apply_token_mean_(module, group)
    clip_grad_norm_([*module.parameters()], 1.0)
    optimizer.step()


if __name__ == "__main__":
    main()
