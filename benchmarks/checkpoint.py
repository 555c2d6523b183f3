"""Measure the cost of our checkpoints, of those of Lightning's ModelParallelStrategy, and of plain writes to the disk.

Two or more CPU ranks train a transformer with AdamW through the Trainer, save, and resume in a new Trainer:

    theirs        ModelParallelStrategy(save_distributed_checkpoint=True), then fsync of its files and folders
    sync          FSDP2Strategy()
    no-checksums  the same with a hash function that does nothing, and CheckpointConfig(verify=False)
    async         FSDP2Strategy(checkpoint=CheckpointConfig(async_save=True))
    disk          no checkpoint: each rank writes as many bytes to a file in blocks of 16 MiB, then fsync

These variants take turns in the same processes and the same directory, for one round each. Each repeat starts with
another variant. Each round builds a new model, so that there is only one model at a time. The module shards itself in
``configure_model``, in the same way under both strategies. Before a save, all pending writes are flushed. Before a
load, the page cache is dropped. Sums over the bits of each tensor verify that the loaded state is the saved state.
After the first step, only one layer is trained, since steps would otherwise take most of the time.

    torchrun --standalone --nproc-per-node 2 benchmarks/checkpoint.py --directory DIR
"""
# ruff: noqa: T201

import argparse
import ctypes
import gc
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_fsdp2 import CheckpointConfig, FSDP2Strategy

THEIRS, SYNC, NO_CHECKSUMS, ASYNC, DISK = VARIANTS = ("theirs", "sync", "no-checksums", "async", "disk")

HASHER = "lightning_fsdp2.checkpoint.files.chunks.xxhash.xxh3_128"
"""Hash function for all bytes that are written to a checkpoint or read from it."""

USUAL_STEP = "a usual training step, s"
BLOCKED = "training blocked, s"
BLOCKED_FIRST = "training blocked by a run's first save, s"
LOST = "training time lost in all, s"
DURABLE = "durable after, s"
SPEED = "durable write, GB/s"
SHARE_OF_DISK = "durable write / disk"
RESUMED = "resumed after, s"
SAVE_MEMORY = "extra memory of the save / shard"
LOAD_MEMORY = "extra memory of the load / shard"
MEASURES = (
    USUAL_STEP,
    BLOCKED,
    BLOCKED_FIRST,
    LOST,
    DURABLE,
    SPEED,
    SHARE_OF_DISK,
    RESUMED,
    SAVE_MEMORY,
    LOAD_MEMORY,
)

LAYERS, HEAD_SIZE, TOKENS = 16, 64, 8
BYTES_PER_PARAMETER = 12
"""Bytes of a parameter in a checkpoint: a float32 weight and the two moments of AdamW."""

WARMUP_STEPS, NORMAL_STEPS, MOST_STEPS = 1, 3, 1000
BLOCK = 16 * 2**20
SAMPLING_SECONDS = 0.01
MOST_SECONDS_OF_A_SAVE = 600.0
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Target:
    """A limit for one measure of a variant, either absolute or as a ratio to another variant."""

    variant: str
    measure: str
    limit: float
    other: str | None = None
    is_lower_bound: bool = False


TARGETS = (
    Target(ASYNC, BLOCKED, 0.30, THEIRS),
    Target(SYNC, DURABLE, 1.0, THEIRS),
    Target(SYNC, RESUMED, 1.0, THEIRS),
    Target(SYNC, SAVE_MEMORY, 0.1),
    Target(SYNC, SPEED, 0.7, DISK, is_lower_bound=True),
    Target(SYNC, DURABLE, 1.1, NO_CHECKSUMS),
    Target(SYNC, RESUMED, 1.15, NO_CHECKSUMS),
)

Rounds = dict[str, list[dict[str, float]]]
"""Measured values of each round, by variant."""


class Watcher:
    """Watcher that reads every 10 ms how much memory this process uses, and whether a checkpoint has appeared."""

    def __init__(self) -> None:
        self.appeared: float | None = None
        self._expected: Path | None = None
        self._peak = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def expect(self, path: Path) -> None:
        """Watch for ``path``, and set ``appeared`` to the time at which it appears."""
        with self._lock:
            self._expected, self.appeared = path, None

    def take_peak(self) -> int:
        """Return the peak memory in bytes since the last call."""
        with self._lock:
            peak = max(self._peak, read_resident_memory())
            self._peak = 0
        return peak

    def _watch(self) -> None:
        while True:
            with self._lock:
                self._peak = max(self._peak, read_resident_memory())
                if self._expected is not None and self.appeared is None and self._expected.exists():
                    self.appeared = time.perf_counter()
            time.sleep(SAMPLING_SECONDS)


def read_resident_memory() -> int:
    """Return the resident bytes of this process, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Module(pl.LightningModule):
    """A transformer without embeddings that shards itself. ``seed`` determines its weights."""

    def __init__(self, parameters: float, seed: int, on_configured: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.width, self.seed, self.on_configured = get_width(parameters), seed, on_configured

    def configure_model(self) -> None:
        """Build the model on the meta device, shard it, and only then allocate its weights."""
        width, mesh = self.width, self.device_mesh["data_parallel"]
        with torch.device("meta"):
            layers = [
                nn.TransformerEncoderLayer(width, width // HEAD_SIZE, 4 * width, dropout=0.0, batch_first=True)
                for _ in range(LAYERS)
            ]
        self.model = nn.Sequential(*layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(self.seed * mesh.size() + mesh.get_local_rank())
        for parameter in self.model.parameters():
            get_local(parameter.data).normal_(std=0.02, generator=generator)
        self.on_configured()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss of all layers in the first step, which creates all optimizer states, and later of one layer."""
        return (self.model[0] if self.trainer.global_step else self.model)(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, whose states are two thirds of a checkpoint."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Step:
    """A training step, measured from the end of the previous step."""

    seconds: float
    peak: int


class Saving(pl.Callback):
    """Callback that trains some steps, saves twice, and continues until both checkpoints are durable."""

    def __init__(self, variant: str, folder: Path, watcher: Watcher) -> None:
        self.variant, self.folder, self.watcher = variant, folder, watcher
        self.measured: dict[str, float] = {}
        self.path = folder / f"{variant}-2.ckpt"
        self.saved_state: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start the measurements of :meth:`_measure`."""
        self._script = self._measure(trainer)
        next(self._script)
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Pass the step to :meth:`_measure`, which may save before the next step."""
        try:
            self._script.send(Step(time.perf_counter() - self._started, self.watcher.take_peak()))
        except StopIteration:
            trainer.should_stop = True
        self._started = time.perf_counter()

    def _measure(self, trainer: pl.Trainer) -> Generator[None, Step, None]:
        """Run all measurements. Each ``yield`` waits for a training step."""
        for _ in range(WARMUP_STEPS):
            yield  # the first step creates the optimizer states
        normal = []
        for _ in range(NORMAL_STEPS):
            free_unused_memory()  # as before a save, so that steps after a save are comparable
            normal.append((yield))
        free_unused_memory()
        before = read_resident_memory()
        save = partial(self._save, trainer, before=before, usual=get_usual(normal))
        first = yield from save(self.folder / f"{self.variant}-1.ckpt")
        remove(self.folder / f"{self.variant}-1.ckpt")
        yield
        self.saved_state = summarize_state(trainer)
        self.measured = yield from save(self.path)
        # memory that the first save allocates and later saves reuse counts, too
        self.measured[SAVE_MEMORY] = max(self.measured[SAVE_MEMORY], first[SAVE_MEMORY])
        self.measured[BLOCKED_FIRST] = first[BLOCKED]

    def _save(
        self, trainer: pl.Trainer, path: Path, *, before: int, usual: Step
    ) -> Generator[None, Step, dict[str, float]]:
        """Save once, and train until the checkpoint is durable."""
        drop_page_cache(path.parent)
        free_unused_memory()
        self.watcher.take_peak()
        self.watcher.expect(path)
        started = time.perf_counter()
        trainer.save_checkpoint(path)
        blocked = lost = durable = time.perf_counter() - started
        memory = self.watcher.take_peak() - before
        if self.variant == THEIRS:
            flush(path)
            durable = time.perf_counter() - started
        elif self.variant == ASYNC:
            steps = []
            while not is_true_everywhere(self.watcher.appeared is not None):
                if time.perf_counter() - started > MOST_SECONDS_OF_A_SAVE:
                    raise TimeoutError(f"{path} is not there after {MOST_SECONDS_OF_A_SAVE} s.")
                steps.append((yield))
            lost = time.perf_counter() - started - len(steps) * usual.seconds
            durable = self.watcher.appeared - started
            if steps:
                blocked += max(0.0, steps[0].seconds - usual.seconds)
                memory = max(memory, max(step.peak for step in steps) - usual.peak)
        return {USUAL_STEP: usual.seconds, BLOCKED: blocked, LOST: lost, DURABLE: durable, SAVE_MEMORY: memory}


def get_usual(steps: Sequence[Step]) -> Step:
    """Return the median duration and the largest peak of ``steps``."""
    return Step(median(step.seconds for step in steps), max(step.peak for step in steps))


class Resuming(pl.Callback):
    """Callback that times the resumption of a Trainer, from the sharded module to the start of the first batch."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.measured: dict[str, float] = {}
        self.loaded_state: list[int] = []

    def begin(self) -> None:
        """Start the clock when the module is built and nothing is loaded."""
        free_unused_memory()
        self.watcher.take_peak()
        self._before, self._started = read_resident_memory(), time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stop the clock when everything is loaded, and end the run after this step."""
        self.measured[RESUMED] = time.perf_counter() - self._started
        states = [value for value in tree_leaves(dict(trainer.optimizers[0].state)) if isinstance(value, Tensor)]
        needed = self._before + sum(get_local(state).nbytes for state in states)
        self.measured[LOAD_MEMORY] = max(0, self.watcher.take_peak() - needed)
        self.loaded_state = summarize_state(trainer)
        trainer.should_stop = True


def measure_checkpoint(variant: str, parameters: float, folder: Path, watcher: Watcher) -> dict[str, float]:
    """Run one round: train and save, resume in a new Trainer, and compare the states."""
    saving = Saving(variant, folder, watcher)
    fit(variant, Module(parameters, seed=0), saving)
    drop_page_cache(folder)
    resuming = Resuming(watcher)
    fit(variant, Module(parameters, seed=1, on_configured=resuming.begin), resuming, saving.path)
    if resuming.loaded_state != saving.saved_state:
        raise RuntimeError(f"{variant}: what was loaded is not what was saved.")
    remove(saving.path)
    measured = saving.measured | resuming.measured
    shard = get_checkpoint_bytes(parameters) / dist.get_world_size()
    return {name: value / (shard if name in (SAVE_MEMORY, LOAD_MEMORY) else 1) for name, value in measured.items()}


def fit(variant: str, module: Module, callback: pl.Callback, path: Path | None = None) -> None:
    """Train in a new Trainer."""
    gc.collect()  # frees the module of the previous round
    with without_checksums() if variant == NO_CHECKSUMS else nullcontext():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=make_strategy(variant),
            max_epochs=1,
            callbacks=[callback],
            use_distributed_sampler=False,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        batch = torch.randn(1, TOKENS, module.width, generator=torch.Generator().manual_seed(dist.get_rank()))
        trainer.fit(module, DataLoader([batch] * MOST_STEPS, batch_size=None), ckpt_path=path)


def make_strategy(variant: str) -> Strategy:
    """Make the strategy of a variant."""
    if variant == THEIRS:
        return ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=True)
    return FSDP2Strategy(checkpoint=CheckpointConfig(async_save=variant == ASYNC, verify=variant != NO_CHECKSUMS))


class NoHasher:
    """Replacement for ``HASHER`` that computes nothing."""

    def __init__(self, data: Any = b"") -> None:
        """Skip the bytes."""

    def update(self, data: Any) -> None:
        """Skip the bytes."""

    def hexdigest(self) -> str:
        """Return the same digest for all bytes."""
        return ""


def without_checksums() -> AbstractContextManager[Any]:
    """Return a context manager that makes checkpoints without hashes."""
    return patch(HASHER, NoHasher)


def measure_disk(variant: str, parameters: float, folder: Path, watcher: Watcher) -> dict[str, float]:
    """Run one round of plain writes to the disk."""
    path, size = folder / f"{variant}-{dist.get_rank()}", get_checkpoint_bytes(parameters) // dist.get_world_size()
    block = memoryview(os.urandom(BLOCK))
    drop_page_cache(folder)
    started = time.perf_counter()
    with open(path, "wb") as file:
        for written in range(0, size, BLOCK):
            file.write(block[: size - written])
        file.flush()
        os.fsync(file.fileno())
    sync(folder)
    dist.barrier()
    seconds = time.perf_counter() - started
    path.unlink()
    return {DURABLE: seconds}


def get_width(parameters: float) -> int:
    """Return the width at which ``LAYERS`` layers of ``12 * width**2`` weights come closest to ``parameters``."""
    return HEAD_SIZE * max(1, round((parameters / (12 * LAYERS)) ** 0.5 / HEAD_SIZE))


def get_checkpoint_bytes(parameters: float) -> int:
    """Return the bytes of a checkpoint over all ranks, without norms and biases, which are a few thousandths."""
    return BYTES_PER_PARAMETER * 12 * LAYERS * get_width(parameters) ** 2


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def summarize_state(trainer: pl.Trainer) -> list[int]:
    """Return a sum over the bits of each weight and optimizer state on this rank."""
    module, (optimizer,) = trainer.lightning_module, trainer.optimizers
    states = [optimizer.state[parameter] for parameter in module.parameters()]
    tensors = [*module.parameters(), *(state[name] for state in states for name in sorted(state))]
    return [int(get_local(tensor.detach()).view(torch.int32).sum()) for tensor in tensors]


def free_unused_memory() -> None:
    """Return freed blocks to the system, so that later allocations show, and wait for the other ranks."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()


def drop_page_cache(folder: Path) -> None:
    """Flush all pending writes, then drop cached files."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        if not can_drop_caches():
            for path in folder.rglob("*"):
                with open_descriptor(path) as descriptor:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def can_drop_caches() -> bool:
    """Drop the page cache of the whole system, and return whether that was permitted."""
    try:
        DROP_CACHES.write_text("1")
    except OSError:
        return False
    return True


def flush(path: Path) -> None:
    """Make a file or a directory durable. Each rank handles a part of the files."""
    for file in sorted(path.rglob("*"))[dist.get_rank() :: dist.get_world_size()]:
        sync(file)
    sync(path)
    sync(path.parent)
    dist.barrier()


def sync(path: Path) -> None:
    """Make a single file or directory entry durable."""
    with open_descriptor(path) as descriptor:
        os.fsync(descriptor)


@contextmanager
def open_descriptor(path: Path) -> Iterator[int]:
    """Open a descriptor of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_true_everywhere(value: bool) -> bool:
    """Return whether ``value`` is true on all ranks."""
    least = torch.tensor(int(value))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least)


def remove(path: Path) -> None:
    """Remove a checkpoint on rank 0 while all ranks wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def run_rounds(args: argparse.Namespace, folder: Path) -> Rounds:
    """Let the variants take turns. A first round with a tiny model, which pays for imports, is not counted."""
    rounds: Rounds = {variant: [] for variant in args.variants}
    watcher = Watcher()
    for repeat in range(args.repeats + 1):
        first = repeat % len(rounds)
        for variant in [*args.variants[first:], *args.variants[:first]]:
            measure = measure_disk if variant == DISK else measure_checkpoint
            values = take_slowest(measure(variant, args.parameters if repeat else 0, folder, watcher))
            if repeat:
                rounds[variant].append(values)
                report_progress(f"{repeat}/{args.repeats} {variant}: {values}")
    for measured in rounds.values():
        for values, plain in zip(measured, rounds.get(DISK, measured), strict=True):
            values[SPEED] = get_checkpoint_bytes(args.parameters) / 1e9 / values[DURABLE]
            if DISK in rounds:
                values[SHARE_OF_DISK] = plain[DURABLE] / values[DURABLE]
    return rounds


def take_slowest(values: dict[str, float]) -> dict[str, float]:
    """Return the largest of each value over all ranks."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return dict(zip(values, tensor.tolist(), strict=True))


def report_progress(text: str) -> None:
    """Print progress to stderr, apart from the report."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def print_report(rounds: Rounds, args: argparse.Namespace) -> None:
    """Print versions, the table of medians and ratios, and the targets."""
    parameters, ranks = get_checkpoint_bytes(args.parameters) // BYTES_PER_PARAMETER, dist.get_world_size()
    print(
        f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()};"
        f" {os.cpu_count()} CPU cores, {ranks} ranks of {torch.get_num_threads()} thread; {parameters / 1e6:.1f}M"
        f" parameters, shards of {get_checkpoint_bytes(args.parameters) / ranks / 2**20:.0f} MiB; {args.repeats}"
        f" repeats; page cache dropped through {DROP_CACHES if can_drop_caches() else 'posix_fadvise'}.\n"
    )
    compared = [variant for variant in rounds if THEIRS in rounds and variant not in (THEIRS, DISK)]
    columns = ["", *rounds, *(f"{variant} / {THEIRS}" for variant in compared)]
    print(f"| {' | '.join(columns)} |\n|---|{'--:|' * (len(columns) - 1)}")
    for measure in MEASURES:
        cells = [format_median(values, measure) for values in rounds.values()]
        cells += [format_ratio(rounds[variant], rounds[THEIRS], measure) for variant in compared]
        print(f"| {measure} | {' | '.join(cells)} |")
    print("\n| target | is | must be | |\n|---|--:|--:|---|")
    for target in TARGETS:
        if target.variant in rounds and (target.other or target.variant) in rounds:
            print_target(target, rounds)


def format_median(rounds: list[dict[str, float]], measure: str) -> str:
    """Format the median of all rounds; a dash if the measure was not taken."""
    return f"{get_median(rounds, measure):.3f}" if measure in rounds[0] else "-"


def format_ratio(rounds: list[dict[str, float]], others: list[dict[str, float]], measure: str) -> str:
    """Format the ratio of the medians, and the range of the ratios within single repeats."""
    if measure not in others[0] or not all(other[measure] for other in others):
        return "-"
    ratios = [values[measure] / other[measure] for values, other in zip(rounds, others, strict=True)]
    ratio = get_median(rounds, measure) / get_median(others, measure)
    return f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def get_median(rounds: list[dict[str, float]], measure: str) -> float:
    """Return the median of a measure over all rounds."""
    return median(values[measure] for values in rounds)


def print_target(target: Target, rounds: Rounds) -> None:
    """Print a row with the measured value, the limit of the target, and whether the value is within the limit."""
    value = get_median(rounds[target.variant], target.measure)
    text = f"{target.variant}: {target.measure}"
    if target.other is not None:
        value /= get_median(rounds[target.other], target.measure)
        text += f", / {target.other}"
    is_met = value >= target.limit if target.is_lower_bound else value <= target.limit
    bound = f"{'≥' if target.is_lower_bound else '≤'} {target.limit:.2f}"
    print(f"| {text} | {value:.3f} | {bound} | {'pass' if is_met else 'fail'} |")


def main() -> None:
    """Measure in a temporary folder, and remove it at the end."""
    args = parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = [tempfile.mkdtemp(prefix="checkpoints-", dir=args.directory) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        rounds = run_rounds(args, Path(names[0]))
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])
    if dist.get_rank() == 0:
        print_report(rounds, args)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=parse_directory, required=True, help="folder on the disk to measure; it must exist"
    )
    parser.add_argument("--parameters", type=float, default=500e6, help="approximate number; 12 bytes each are saved")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each variant")
    parser.add_argument("--variants", type=parse_variants, default=VARIANTS, help=",".join(VARIANTS))
    return parser.parse_args()


def parse_directory(text: str) -> Path:
    """Return ``text`` as the path of a directory that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory; make it first")
    return Path(text)


def parse_variants(text: str) -> tuple[str, ...]:
    """Parse names of variants that are separated by commas."""
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {','.join(VARIANTS)}")
    return names


if __name__ == "__main__":
    main()
