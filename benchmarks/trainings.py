"""What benchmarks train, and on which device: a plain LightningModule around a Llama, sharded by hand or not at all."""

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
    """A user's own: a scalar loss, and no sharding code.

    Args:
        model: Trained by its own loss.
        make_optimizer: Called with its parameters.
        losses: What the loss of each step is added to.
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
    """What ModelParallelStrategy asks for: the user shards."""

    mp_policy = MixedPrecisionPolicy(cast_forward_inputs=False)

    def configure_model(self) -> None:
        shard_by_hand(self.model, self.device_mesh["data_parallel"], self.mp_policy)


def shard_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy) -> None:
    """The units, reshard rules and prefetch chain that ``FSDP2Strategy`` finds by itself."""
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
        embedding.set_unshard_in_backward(False)  # its gradient does not need its weights
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
    """A Trainer that does nothing but train, unless ``options`` say otherwise, on all ranks of the default group."""
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
    steps: int, batch_size: int, sequence_length: int, vocabulary: int, *, distinct: int | None = None
) -> DataLoader[dict[str, Tensor]]:
    """This rank's random tokens, the same at every call; batches repeat after ``distinct`` ones."""
    count = min(distinct or steps, steps)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(vocabulary, (count, batch_size, sequence_length), generator=generator)
    batches = [{"input_ids": batch, "labels": batch} for batch in tokens]
    return DataLoader([batches[step % count] for step in range(steps)], batch_size=None)


@contextmanager
def process_group(backend: str | None = None) -> Iterator[None]:
    """The default group, of torchrun's ranks or of this process alone, unless there is one."""
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
    """This process's."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def select_device() -> None:
    """Let this thread's operations on CUDA be on this process's device."""
    if torch.cuda.is_available():
        torch.cuda.set_device(get_device())


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe_machine(*packages: str) -> str:
    """Ranks, their devices and versions, also of ``packages``."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({os.cpu_count()} cores in all)"
    versions = [f"{package} {version(package)}" for package in ("torch", "lightning", "transformers", *packages)]
    return f"{dist.get_world_size()} x {device}; {', '.join(versions)}, Python {platform.python_version()}"
