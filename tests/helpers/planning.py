"""A small Llama, to be planned and to be trained; and what processes that train it really send and allocate."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from helpers import user_modules
from helpers.collectives import COLLECTIVE_KINDS
from helpers.ranks import run_ranks
from lightning_fsdp2 import CausalLM
from lightning_fsdp2.compat.torch_simulation import get_process_group
from lightning_fsdp2.mesh import _wait_for_threads

VOCABULARY, WIDTH, KEY_VALUE_WIDTH, MLP_WIDTH, LAYERS = 4096, 64, 32, 128, 2
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": MLP_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
BATCH, LENGTH = 2, 512
STEPS = 4

Call = tuple[str, int, int]
"""Kind, ranks of the group, bytes."""


def make_module(layers: int = LAYERS, **options: Any) -> CausalLM:
    # `foreach` is what AdamW does by default on a GPU, and a plan takes it for
    config = {**LLAMA, "num_hidden_layers": layers}
    return CausalLM(config=config, optimizer=partial(AdamW, foreach=True), **options)


def make_batch(size: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.ones(size, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


make_trainer = partial(
    user_modules.make_trainer,
    max_steps=STEPS,
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    use_distributed_sampler=True,
)


class CollectiveLog(TorchDispatchMode):
    """The collectives of its block over groups of the mesh."""

    def __init__(self, *control_groups: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.control_groups = {group.group_name for group in control_groups if group is not None}
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = COLLECTIVE_KINDS.get(func._schema.name.split("::")[1])
        if kind is not None and func._schema.name.startswith(("c10d::", "_c10d_functional::")):
            group = get_process_group(args)
            if group.group_name not in self.control_groups:  # of a few bytes, in host memory
                sizes = [
                    sum(t.nbytes for t in tree_leaves(value) if isinstance(t, Tensor)) for value in (*args, result)
                ]
                self.calls.append((kind.replace("_", "-"), group.size(), max(sizes)))
        return result


class CollectiveRests(TorchDispatchMode):
    """A rest after each collective of its block, in which gloo's threads let go of what they have sent and received.

    Without it, a peak counts some of these tensors, more of them the slower the machine.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.startswith(("c10d::", "_c10d_functional::")):
            _wait_for_threads()  # not for a fixed time, since a busy machine may not give them a turn for long
        return result


class Watch(pl.Callback):
    """Logs the collectives of the second step, and how much the third and the fourth allocate at their peaks."""

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        self.added: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step, micro_batch = divmod(batch_idx, self.accumulation)
        if micro_batch > 0 or step == 0:
            return
        self.inside = ExitStack()
        if step == 1:
            world = trainer.strategy.world
            self.log = self.inside.enter_context(CollectiveLog(world.control_group, world.pipeline_control))
        else:
            self.allocations = self.inside.enter_context(
                profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            )
            self.inside.enter_context(CollectiveRests())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, micro_batch = divmod(batch_idx, self.accumulation)
        if micro_batch < self.accumulation - 1 or step == 0:
            return
        self.inside.close()
        if step == 1:
            self.calls = self.log.calls
        else:
            self.added.append(find_peak(self.allocations))


def find_peak(run: profile) -> int:
    """Bytes that torch's allocator has given out at the most, above those at the begin of the profile."""

    def walk(events: Any) -> Any:
        for event in events:
            if event.tag == _EventType.Allocation:
                yield event.start_time_ns, event.extra_fields.alloc_size
            yield from walk(event.children)

    total = peak = 0
    for _, size in sorted(walk(run.profiler.kineto_results.experimental_event_tree())):  # type: ignore[union-attr]
        total += size
        peak = max(peak, total)
    return peak


def measure_peak(make_strategy: Callable[[], Any], ranks: int, config: dict[str, Any], batch: dict[str, Tensor]) -> int:
    """The most bytes of a rank in a run, from before its module is made."""

    def run() -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as whole:
            trainer = make_trainer(make_strategy())
            module = CausalLM(config=config, optimizer=partial(AdamW, foreach=True))
            sequence = {name: tensor[0] for name, tensor in batch.items()}
            trainer.fit(module, DataLoader([sequence] * ranks * STEPS, 1))
        return find_peak(whole)

    return min(run_ranks(run, ranks, group=False))


def train(
    make_strategy: Callable[[], Any], ranks: int, *, module: dict[str, Any] | None = None, **options: Any
) -> tuple[list[Call], int]:
    """Rank 0's collectives of a step, and the bytes that a step adds to what is there before it."""
    results = train_ranks(make_strategy, ranks, module=module, **options)
    # a thread of gloo may still let go of what it has sent a moment late, which adds to a peak
    return results[0][0], min(added for _, added in results)


def train_ranks(
    make_strategy: Callable[[], Any],
    ranks: int,
    *,
    module: dict[str, Any] | None = None,
    batch_size: int = BATCH,
    **options: Any,
) -> list[tuple[list[Call], int]]:
    """Each rank's collectives of a step, and the bytes that a step adds to what is there before it."""
    accumulation = options.get("accumulate_grad_batches", 1)

    def run() -> tuple[list[Call], list[int]]:
        watch = Watch(accumulation)
        trainer = make_trainer(make_strategy(), callbacks=[watch], **options)
        sequence = {name: tensor[0] for name, tensor in make_batch().items()}
        samples = batch_size * ranks * accumulation * STEPS
        trainer.fit(make_module(**(module or {})), DataLoader([sequence] * samples, batch_size))
        return watch.calls, watch.added

    return [(calls, min(added)) for calls, added in run_ranks(run, ranks, group=False)]
