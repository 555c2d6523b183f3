"""Trainings of a Llama to compare ("arms"): a hand-written FSDP2 loop, Lightning's strategies, and our strategies.

All arms train the same architecture from random weights on the same number of tokens, with fused AdamW and gradients
clipped to a norm of 1. Weights are in float32 with compute in bfloat16, or everything is in bfloat16.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.trainings import (
    HandShardedModule,
    Module,
    get_device,
    make_loader,
    make_trainer,
    process_group,
    shard_by_hand,
    synchronize,
)
from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy

LOOP, MODEL_PARALLEL, LIGHTNING_FSDP, OURS = "torch loop", "ModelParallelStrategy", "FSDPStrategy", "FSDP2Strategy"
MAX_NORM = 1.0

make_optimizer: Callable[..., torch.optim.Optimizer] = partial(AdamW, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Workload:
    """The model, the batches and the numbers of steps, which are the same for each arm."""

    model: dict[str, Any]
    batch_size: int
    sequence_length: int
    is_bfloat16: bool = False
    """Whether weights and optimizer states are in bfloat16, too."""

    checkpoints: bool = False
    """Whether every layer is recomputed in backward."""

    warmup_steps: int = 4
    blocks: int = 3
    steps: int = 4
    """Number of steps in a block. As many steps again are timed one by one."""

    distinct: int | None = None
    """Number of different batches, which then repeat. None for a new batch in every step."""

    tp_size: int = 1
    """Number of tensor parallel ranks. If there are several, sequence parallelism is on, too."""

    pp_size: int = 1
    """Number of pipeline parallel ranks, which read as many times ``batch_size`` sequences."""

    @property
    def all_steps(self) -> int:
        """Number of steps of a run. The last step only ends the time of the step before it."""
        return self.warmup_steps + (self.blocks + 1) * self.steps + 1

    @property
    def precision(self) -> str:
        """The Trainer's name for the precision."""
        return "bf16-true" if self.is_bfloat16 else "bf16-mixed"

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Mixed precision of units that are sharded by hand."""
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def make_batches(self) -> DataLoader[dict[str, Tensor]]:
        """Make the batches of all steps."""
        shape = (self.batch_size, self.sequence_length, self.model["vocab_size"])
        return make_loader(self.all_steps, *shape, distinct=self.distinct, tp_size=self.tp_size, pp_size=self.pp_size)

    def make_model(self) -> LlamaForCausalLM:
        """Make the model with random weights on the device."""
        dtype = torch.bfloat16 if self.is_bfloat16 else torch.float32
        with get_device():
            model = LlamaForCausalLM._from_config(AutoConfig.for_model(**self.model), dtype=dtype).train()
        if self.checkpoints:
            model.model.layers = nn.ModuleList(map(checkpoint_wrapper, model.model.layers))
        return model


@dataclass
class Reading:
    """The time and the memory of one run of an arm."""

    block_seconds: list[float] = field(default_factory=list)
    """Seconds per step, for each block of steps. The host waits for the device only at the end of a block."""

    step_seconds: list[float] = field(default_factory=list)
    """Seconds of each step at whose end the host waits for the device."""

    allocated: int = 0
    """Allocated bytes at the peak."""

    reserved: int = 0
    losses: list[float] = field(default_factory=list)
    """Mean loss over all ranks for each step, if the strategy computes it."""


class Clock(pl.Callback):
    """Callback that times blocks of steps and single steps. Loops without a Trainer call it at each batch's start."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.reading = workload, Reading()
        self._batches = 0
        self._started = 0.0
        self._losses: list[Tensor] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Stop the clock at the end of a block or single step, and start it again."""
        workload, reading = self.workload, self.reading
        step = self._batches - workload.warmup_steps
        self._batches += 1
        in_blocks = workload.blocks * workload.steps
        if step < 0 or (step < in_blocks and step % workload.steps):
            return
        synchronize()
        now = time.perf_counter()
        if 0 < step <= in_blocks:
            reading.block_seconds.append((now - self._started) / workload.steps)
        elif step > in_blocks:
            reading.step_seconds.append(now - self._started)
        if torch.cuda.is_available():
            self._read_memory(is_first=step == 0)
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Keep the mean loss of the step over all ranks."""
        if mean := getattr(trainer.strategy, "token_mean", None):
            self._losses.append(mean.loss)

    def read(self) -> Reading:
        """Return the measurements of the whole run."""
        return replace(self.reading, losses=[loss.item() for loss in self._losses])

    def _read_memory(self, *, is_first: bool) -> None:
        if is_first:
            torch.cuda.reset_peak_memory_stats()
        self.reading.allocated = torch.cuda.max_memory_allocated()
        self.reading.reserved = torch.cuda.max_memory_reserved()


Arm = Callable[[Workload, Clock], None]


def run_loop(workload: Workload, clock: Clock) -> None:
    """Train in a loop that a user of torch would write, with the units and the prefetching of FSDP2Strategy."""
    device = get_device()
    model = workload.make_model()
    shard_by_hand(model, init_device_mesh(device.type, (dist.get_world_size(),)), workload.mp_policy)
    optimizer = make_optimizer(model.parameters())
    for batch in workload.make_batches():
        clock.on_train_batch_start()
        batch = {name: value.to(device) for name, value in batch.items()}
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def run_model_parallel(workload: Workload, clock: Clock) -> None:
    """Train under Lightning's ModelParallelStrategy, for which the user's code shards and sets the precision."""
    module = HandShardedModule(workload.make_model(), make_optimizer, [])
    module.mp_policy = workload.mp_policy
    run_trainer(workload, clock, module, ModelParallelStrategy(dist.get_world_size(), 1), precision="32-true")


class ClippedByFSDP(Module):
    """LightningModule for FSDPStrategy, which cannot clip gradients to a norm: only FSDP's outermost module can."""

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip with the method of the wrapped model."""
        self.trainer.strategy.model.clip_grad_norm_(MAX_NORM)  # type: ignore[operator, union-attr]


def run_lightning_fsdp(workload: Workload, clock: Clock) -> None:
    """Train under Lightning's FSDPStrategy, which uses the first version of FSDP."""
    module = ClippedByFSDP(workload.make_model(), make_optimizer, [])
    strategy = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer})
    run_trainer(workload, clock, module, strategy, precision=workload.precision)


def run_ours(
    workload: Workload,
    clock: Clock,
    *,
    strategy: Any = None,
    loss: Any = "full",
    precision: str | None = None,
    **flags: Any,
) -> None:
    """Train ``CausalLM`` under ``FSDP2Strategy`` with some ``flags``, or under another strategy."""
    if workload.checkpoints:
        flags.setdefault("activation_checkpointing", "full")
    module = CausalLM(config=workload.model, loss=loss, optimizer=make_optimizer, decay_norms_and_biases=True)
    if strategy is None:
        config = FSDP2Config(sequence_parallel=workload.tp_size > 1, **flags)
        strategy = FSDP2Strategy(tp_size=workload.tp_size, config=config)
    run_trainer(workload, clock, module, strategy, precision=precision or workload.precision)


def run_trainer(workload: Workload, clock: Clock, module: pl.LightningModule, strategy: Any, *, precision: str) -> None:
    """Train a module under any strategy with a Trainer."""
    trainer = make_trainer(
        strategy,
        workload.all_steps,
        [clock],
        accelerator=get_device().type,
        precision=precision,
        gradient_clip_val=MAX_NORM,
    )
    trainer.fit(module, workload.make_batches())


BASELINES: dict[str, Arm] = {
    LOOP: run_loop,
    MODEL_PARALLEL: run_model_parallel,
    LIGHTNING_FSDP: run_lightning_fsdp,
    OURS: run_ours,
}
"""Arms by name. All other arms are compared with the first one."""

OPTIONS: dict[str, Arm] = {
    OURS: run_ours,
    "compiled": partial(run_ours, enable_compile=True),
    "compiled, selective checkpointing": partial(run_ours, enable_compile=True, activation_checkpointing="selective"),
    "full checkpointing": partial(run_ours, activation_checkpointing="full"),
    "chunked loss": partial(run_ours, loss="chunked"),
    "compiled, chunked loss": partial(run_ours, enable_compile=True, loss="chunked"),
}
OFFLOADED: dict[str, Arm] = {OURS: run_ours, "offloaded": partial(run_ours, offload_policy=True)}
NEED_CUDA = {LIGHTNING_FSDP}
"""Arms that need a GPU."""


def read_arm(arm: Arm, workload: Workload, worker: int = 0) -> Reading:
    """Run an arm in this process, as a rank of the process group or alone."""
    with process_group():
        clock = Clock(workload)
        torch.manual_seed(0)
        arm(workload, clock)
        return clock.read()


def order(names: list[str], round_number: int) -> Iterator[str]:
    """Yield the names in order, reversed in every second round, so that no arm always has the warmer GPU."""
    yield from names if round_number % 2 == 0 else reversed(names)
