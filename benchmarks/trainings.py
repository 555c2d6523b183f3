"""Modules, data, Trainers and devices that benchmarks share."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM


class Module(pl.LightningModule):
    """LightningModule as a user would write it, with a scalar loss and without sharding code.

    Args:
        model: Model that is trained with its own loss.
        make_optimizer: Function that gets the parameters and returns an optimizer.
        losses: List to which the loss of each step is appended.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        make_optimizer: Callable[..., torch.optim.Optimizer],
        losses: list[Tensor],
    ) -> None:
        super().__init__()
        self.model, self.make_optimizer, self.losses = model, make_optimizer, losses

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class HandShardedModule(Module):
    """LightningModule for ModelParallelStrategy, which requires that the user shards the model."""

    mp_policy = MixedPrecisionPolicy(cast_forward_inputs=False)

    def configure_model(self) -> None:
        shard_by_hand(self.model, self.device_mesh["data_parallel"], self.mp_policy)


def shard_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy) -> None:
    """Shard ``model`` with the units, resharding and prefetching that ``FSDP2Strategy`` chooses automatically."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy}
    layers, embedding = list(model.model.layers), model.model.embed_tokens
    ends = [model.model.norm, model.lm_head]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=layer is not layers[-1], **options)
    if model.config.tie_word_embeddings:
        ends.insert(0, embedding)
        chain = [*layers, embedding]
    else:
        fully_shard(embedding, **options)
        embedding.set_unshard_in_backward(False)  # the gradient of an embedding does not need its weights
        chain = [embedding, *layers, ends[0]]
    fully_shard(ends, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for index, module in enumerate(chain):
        if ahead := chain[index + 1 : index + 2]:
            module.set_modules_to_forward_prefetch(ahead)
        if behind := chain[max(0, index - 2) : index]:
            module.set_modules_to_backward_prefetch(behind[::-1])


def make_trainer(
    strategy: Any,
    steps: int,
    callbacks: list[pl.Callback],
    *,
    accelerator: str,
    precision: Any = "32-true",
    **options: Any,
) -> pl.Trainer:
    """Make a Trainer on all ranks of the default group, which only trains unless ``options`` change that."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size(),
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **{**silent, **options},
    )


def make_loader(
    steps: int,
    batch_size: int,
    sequence_length: int,
    vocabulary: int,
    *,
    distinct: int | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
) -> DataLoader[dict[str, Tensor]]:
    """Make a loader of this rank's random tokens, the same at every call. Batches repeat after ``distinct`` batches.

    Tensor parallel ranks read the same batches. The ranks of a pipeline read the batches of as many ranks without one.
    """
    count = min(distinct or steps, steps)
    reader = dist.get_rank() % (dist.get_world_size() // pp_size) // tp_size
    parts = [
        torch.randint(vocabulary, (count, batch_size, sequence_length), generator=torch.Generator().manual_seed(seed))
        for seed in range(pp_size * reader, pp_size * (reader + 1))
    ]
    tokens = torch.cat(parts, dim=1)
    batches = [{"input_ids": batch, "labels": batch} for batch in tokens]
    return DataLoader([batches[step % count] for step in range(steps)], batch_size=None)


@contextmanager
def process_group(backend: str | None = None) -> Iterator[None]:
    """Start the default process group, of torchrun's ranks or of this process alone, unless it exists already."""
    if dist.is_initialized():
        yield
        return
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    select_device()
    dist.init_process_group(backend)
    yield
    dist.destroy_process_group()


def get_device() -> torch.device:
    """Return the device of this process."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def select_device() -> None:
    """Make the device of this process the current CUDA device of this thread."""
    if torch.cuda.is_available():
        torch.cuda.set_device(get_device())


def synchronize() -> None:
    """Wait until the device has finished all operations."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe_machine(*packages: str) -> str:
    """Describe the ranks, their devices, and the versions of the usual packages and of ``packages``."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({os.cpu_count()} cores in all)"
    versions = [f"{package} {version(package)}" for package in ("torch", "lightning", "transformers", *packages)]
    return f"{dist.get_world_size()} x {device}; {', '.join(versions)}, Python {platform.python_version()}"
