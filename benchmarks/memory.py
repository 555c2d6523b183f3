"""Peak memory of a training step per rank and by category: what each option of FSDP2Config and CausalLM saves.

A Llama-3-8B is trained for a step on a simulated mesh: torch's fake process group stands for the other ranks, and fake
tensors, which have shapes but no values, for this rank's (rank 0). It is the package's own step: the module is
``CausalLM``, ``FSDP2Manager`` shards it, and the token mean, clipping and AdamW follow. A dispatch mode writes down
every storage that is made, resized and freed.

A small model is then both simulated and trained: two forked ranks with real tensors and gloo. What their step adds to
the resident memory at its peak, as Linux counts it, is printed beside what the simulation says it adds.

    python benchmarks/memory.py
"""
# ruff: noqa: T201

import argparse
import ctypes
import multiprocessing
import os
import platform
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Manager, clip_grad_norm_, create_device_mesh, parallelizer
from lightning_fsdp2.mesh import DP_CP, get_mesh
from lightning_fsdp2.parallel import cp_attention
from lightning_fsdp2.parallel.loss import apply_token_mean_

SHARDED_PARAMETERS = "sharded parameters"
GATHERED_PARAMETERS = "gathered parameters"
SHARDED_GRADIENTS = "sharded gradients"
UNSHARDED_GRADIENTS = "unsharded gradients"
OPTIMIZER_STATE = "optimizer state"
COLLECTIVE_BUFFERS = "collective buffers"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
CATEGORIES = (
    SHARDED_PARAMETERS,
    SHARDED_GRADIENTS,
    OPTIMIZER_STATE,
    GATHERED_PARAMETERS,
    UNSHARDED_GRADIENTS,
    COLLECTIVE_BUFFERS,
    ACTIVATIONS,
    TEMPORARIES,
)
OFFLOADED = (SHARDED_PARAMETERS, SHARDED_GRADIENTS, OPTIMIZER_STATE)
"""What FSDP2's ``CPUOffloadPolicy`` keeps on the host, where the optimizer then runs."""

M_MMAP_THRESHOLD = -3
"""Of glibc's ``mallopt``: larger blocks go back to the system as soon as they are freed."""

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
    """A row: options of the strategy and of the module."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of FSDP2Config."""

    module: dict[str, Any] = field(default_factory=dict)
    """Arguments of CausalLM."""

    @property
    def is_offloaded(self) -> bool:
        """Whether shards and optimizer live on the host."""
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

    def __str__(self) -> str:
        tp = f" x tp {self.tp_size} + sequence parallel" if self.tp_size > 1 else ""
        return f"dp {self.ranks // self.tp_size}{tp}"


@dataclass(eq=False)
class Allocation:
    """A storage. What it is may turn out after it was made, so its category is read at the end."""

    category: str = TEMPORARIES
    size: int = 0


@dataclass(frozen=True)
class Peak:
    """The moment at which the most bytes are in use."""

    phase: str
    bytes: dict[str, int]
    """By category; they add up to the peak."""

    @property
    def total(self) -> int:
        """All categories together."""
        return sum(self.bytes.values())

    @property
    def added(self) -> int:
        """What the step adds to what is there before it."""
        return self.total - self.bytes[SHARDED_PARAMETERS] - self.bytes[OPTIMIZER_STATE]


class MemoryTracker(TorchDispatchMode):
    """Writes down every change in the bytes that storages hold, and what the storages are.

    FSDP2's own operations tell its tensors apart: what it copies in, gathers, copies out, and reduces. Of all others,
    activations are those made in forward that are alive when backward begins, the step's inputs and the model's
    buffers included; temporaries are the rest, among them what backward computes again. What tensor parallelism
    gathers or reduces is one or the other. Workspace that an operation takes for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[tuple[Allocation, int]] = []
        self._phases: dict[str, int] = {}
        self._live: dict[int, Allocation] = {}
        resize = torch.UntypedStorage.resize_

        def resize_and_observe(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._observe(storage)

        # how FSDP2 frees gathered parameters: no operation that a dispatch mode could see
        self._observe_resizes = patch.object(torch.UntypedStorage, "resize_", resize_and_observe)

    def __enter__(self) -> "MemoryTracker":
        self._observe_resizes.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._observe_resizes.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor: its local tensors come by next
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._observe(tensor.untyped_storage())
        match func._schema.name:
            case "fsdp::all_gather_copy_in":
                self.label([*args[0], args[1]], COLLECTIVE_BUFFERS)
            case "fsdp::split_with_sizes_copy":
                self.label(kwargs["out"], GATHERED_PARAMETERS)
            case "fsdp::chunk_cat":
                self.label(args[0], UNSHARDED_GRADIENTS)
                self.label([kwargs["out"]], COLLECTIVE_BUFFERS)
        return result

    def begin(self, phase: str) -> None:
        """Mark the begin of a part of the step."""
        self._phases[phase] = len(self._changes)

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what tensors are; the first word counts."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            _set_category(self._observe(local.untyped_storage()), category)

    def label_rest(self, category: str) -> None:
        """Say what all tensors are that are alive now and not labelled yet."""
        for allocation in self._live.values():
            _set_category(allocation, category)

    def find_peak(self, *, without: Iterable[str] = (), until: str | None = None) -> Peak:
        """The peak of all categories but ``without``, of the phases before ``until``."""
        current: Counter[str] = Counter()
        total, highest, peak, moment = 0, 0, Counter(current), 0
        end = None if until is None else self._phases[until]
        for index, (allocation, change) in enumerate(self._changes[:end]):
            if allocation.category in without:
                continue
            current[allocation.category] += change
            total += change
            if total > highest:
                highest, peak, moment = total, current.copy(), index
        phase = [name for name, begin in self._phases.items() if begin <= moment][-1]
        return Peak(phase, {category: peak[category] for category in CATEGORIES})

    def count(self, category: str, *, at: str) -> int:
        """Bytes of a category when a phase begins."""
        changes = self._changes[: self._phases[at]]
        return sum(change for allocation, change in changes if allocation.category == category)

    def _observe(self, storage: torch.UntypedStorage) -> Allocation:
        # torch keeps one Python object per storage, alive as long as the storage is
        if id(storage) not in self._live:
            self._live[id(storage)] = Allocation()
            weakref.finalize(storage, self._free, id(storage))
        allocation = self._live[id(storage)]
        self._change(allocation, storage.nbytes())
        return allocation

    def _free(self, key: int) -> None:
        self._change(self._live.pop(key), 0)

    def _change(self, allocation: Allocation, size: int) -> None:
        if size != allocation.size:
            self._changes.append((allocation, size - allocation.size))
            allocation.size = size


def _set_category(allocation: Allocation, category: str) -> None:
    if allocation.category == TEMPORARIES:
        allocation.category = category


def main() -> None:
    """Print the table of each simulated mesh, and that of the small model's real and simulated run."""
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
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="of the simulated mesh")
    parser.add_argument("--tp-sizes", type=int, nargs="+", default=[1, 8], help="one table each")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per data parallel rank")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    return parser.parse_args()


def print_simulation(run: Run, variants: Iterable[str]) -> None:
    """Print a row for each variant: GiB per category at the peak."""
    print(f"{run}, {run.batch_size} x {run.sequence_length} tokens per data parallel rank; GiB:\n")
    print(f"| variant | {' | '.join(CATEGORIES)} | peak | in |")
    print(f"|---|{'--:|' * (len(CATEGORIES) + 1)}---|")
    for name in variants:
        if not is_measurable(run, VARIANTS[name]):
            continue
        (peak,) = run_forked(partial(simulate, run, VARIANTS[name]), 1)
        cells = [f"{size / 2**30:.2f}" for size in (*peak.bytes.values(), peak.total)]
        print(f"| {name} | {' | '.join(cells)} | {peak.phase} |", flush=True)
    print()


def print_comparison(runs: Iterable[Run], variants: Iterable[str]) -> None:
    """Print a row for each variant of the small model, simulated and trained by processes; MiB."""
    columns = ("peak, simulated", "peak, tracked", "added, simulated", "added, resident", "simulated / resident")
    print(f"| ranks | variant | {' | '.join(columns)} |")
    print(f"|---|---|{'--:|' * len(columns)}")
    for run in runs:
        for name in variants:
            if not is_measurable(run, VARIANTS[name]) or VARIANTS[name].is_offloaded:
                continue
            (simulated,) = run_forked(partial(simulate, run, VARIANTS[name]), 1)
            with tempfile.TemporaryDirectory() as folder:
                (tracked, resident), *_ = run_forked(partial(train, run, VARIANTS[name], folder), run.ranks)
            sizes = [f"{size / 2**20:.1f}" for size in (simulated.total, tracked.total, simulated.added, resident)]
            print(f"| {run} | {name} | {' | '.join(sizes)} | {simulated.added / resident:.3f} |", flush=True)


def is_measurable(run: Run, variant: Variant) -> bool:
    """Whether the options of ``variant`` mean anything to ``run``."""
    return run.tp_size > 1 or not variant.config.get("loss_parallel")


def run_forked(function: Callable[[int], Any], ranks: int) -> list[Any]:
    """Call ``function`` with each rank in a process of its own, which inherits what was imported."""
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(function, range(ranks)))


def simulate(run: Run, variant: Variant, rank: int = 0) -> Peak:
    """The peak of one rank in a world of fake ranks and fake tensors; nothing is computed."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.ranks)
    with fake_tensors() as mode:
        step = build_step(run, variant)
        with mode:
            step()
            tracker = step()
    dist.destroy_process_group()
    if variant.is_offloaded:
        # on a CPU mesh, the only one that can be simulated without a GPU's driver, the package leaves offloading out:
        # the shards are in host memory anyway. So what the policy keeps there, and the optimizer, are taken out here.
        return tracker.find_peak(without=OFFLOADED, until="optimizer")
    return tracker.find_peak()


def train(run: Run, variant: Variant, folder: str, rank: int) -> tuple[Peak, int]:
    """The peak of a real run as tracked, and what a step added to the resident memory as Linux counted it."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    store = dist.FileStore(f"{folder}/store", run.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.ranks, timeout=timedelta(seconds=60))
    step = build_step(run, variant)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident memory begins anew
    before = read_resident_memory("VmRSS")
    tracker = step()
    added = read_resident_memory("VmHWM") - before
    dist.barrier()  # a rank that ends before its peers would make them fail
    return tracker.find_peak(), added


def read_resident_memory(name: str) -> int:
    """Bytes of this process now (``VmRSS``) or at the peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Let :func:`build_step` allocate fake tensors, and make them of the mode it yields."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    materialize = parallelizer.materialize

    def materialize_fake(*args: Any) -> None:
        with mode:
            materialize(*args)

    with (
        # until here all is on the meta device; DeviceMesh reads the values of its own tensors, so they must be real
        patch.object(parallelizer, "materialize", materialize_fake),
        # rank 0's random state, which nobody sends to the others
        patch.object(dist, "broadcast_object_list"),
        # reads positions to find packed sequences, and takes fake ones for packed
        patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        # reads what a mask lets some queries see; here it is a causal one
        patch.object(cp_attention, "_get_window", return_value=None),
    ):
        yield mode


def build_step(run: Run, variant: Variant) -> Callable[[], MemoryTracker]:
    """Shard a module as ``FSDP2Strategy`` does under ``precision="bf16-mixed"``, and return a step of its training.

    The first step makes the optimizer's state and fills the caches of DTensor; the second is one of many.
    """
    config = FSDP2Config(sequence_parallel=run.tp_size > 1, **variant.config)
    mesh = create_device_mesh(config, cp_size=run.cp_size, tp_size=run.tp_size, device_type="cpu")
    # `foreach` is what AdamW does by default on a GPU
    module = CausalLM(config=run.model, optimizer=partial(AdamW, foreach=True), **variant.module)
    with torch.device("meta"):
        module.configure_model()
    FSDP2Manager(config, mesh).parallelize(module)
    return partial(train_step, module, module.configure_optimizers(), run, get_mesh(mesh, DP_CP).get_group())


def train_step(module: CausalLM, optimizer: Optimizer, run: Run, group: dist.ProcessGroup) -> MemoryTracker:
    """What the Trainer, ``FSDP2Strategy`` and ``CausalLM`` do in a step."""
    tokens = torch.randint(run.model["vocab_size"], (run.batch_size, run.sequence_length))
    parameters = list(module.parameters())
    with MemoryTracker() as tracker:
        tracker.label(parameters, SHARDED_PARAMETERS)
        tracker.label((t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor)), OPTIMIZER_STATE)
        tracker.label([*module.buffers(), tokens], ACTIVATIONS)
        tracker.begin("forward")
        loss = module.training_step({"input_ids": tokens, "labels": tokens}, 0)
        tracker.begin("backward")
        tracker.label_rest(ACTIVATIONS)
        loss.backward()
        tracker.begin("optimizer")
        tracker.label((parameter.grad for parameter in parameters), SHARDED_GRADIENTS)
        apply_token_mean_(module, group)
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return tracker


if __name__ == "__main__":
    main()
