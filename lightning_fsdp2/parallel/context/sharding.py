"""Sharding of a model's input sequences over the ranks of a context parallel group."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.parallel.context.attention import Method, install_attention, uninstall_attention
from lightning_fsdp2.parallel.context.attention_blocks import Chunk, get_head_tail_chunks
from lightning_fsdp2.ranks.collectives import gather_for_ranks


class SequenceSharding:
    """Sharding of one Hugging Face model's input sequences over ranks. It can be switched on and off.

    Attributes:
        group: Process group of the context parallel ranks.
        method: ``"allgather"`` or ``"ulysses"``.
        divisor: Number by which the length of a sequence must be divisible.
        is_active: Whether the sequences are currently split.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        method: Method,
        inputs: Mapping[str, int | None],
        divisor: int,
        assumes_unpacked: bool,
    ) -> None:
        self.model = model
        self.group = group
        self.method = method
        self.inputs = inputs
        self.divisor = divisor
        self.assumes_unpacked = assumes_unpacked
        self.is_active = False

    def activate(self) -> None:
        """Make the model split its input sequences over the ranks."""
        if not self.is_active:
            for config in _get_attention_configs(self.model):
                install_attention(config)
        self.is_active = True

    def deactivate(self) -> None:
        """Make the model compute whole sequences on every rank, with its original attention."""
        if self.is_active:
            for config in _get_attention_configs(self.model):
                uninstall_attention(config)
        self.is_active = False

    def get_chunks(self, length: int) -> tuple[Chunk, ...]:
        """Return this rank's chunks of a sequence with ``length`` positions.

        Raises:
            ValueError: If ``length`` is not divisible by ``divisor``.
        """
        if length % self.divisor:
            lower = length // self.divisor * self.divisor
            lengths = " or ".join(str(other) for other in (lower, lower + self.divisor) if other)
            raise ValueError(
                f"cp_size={self.group.size()} needs sequences whose length is divisible by {self.divisor} (2 x cp_size,"
                f" times tp_size with sequence_parallel), but this batch has {length} positions; use {lengths}, or pad"
                " (labels with -100), as TextDataModule(pad_to_multiple_of=...) does."
            )
        if self.method == "allgather":
            return get_head_tail_chunks(length, self.group.rank(), self.group.size())
        size = length // self.group.size()
        return (Chunk(self.group.rank() * size, size),)

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that holds whole sequences along ``dim``."""
        chunks = self.get_chunks(tensor.size(dim))
        return torch.cat([tensor.narrow(dim, chunk.start, chunk.length) for chunk in chunks], dim)

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather ``tensor`` from all ranks along ``dim``, and restore the order of positions in the sequences."""
        whole = gather_for_ranks(tensor.contiguous(), dim, self.group)
        if self.method == "ulysses":
            return whole
        parts = whole.chunk(2 * self.group.size(), dim)
        return torch.cat([*parts[::2], *parts[:0:-2]], dim)


def _get_attention_configs(model: Any) -> list[Any]:
    configs = [model.config, model.config.get_text_config()]
    return list({id(config): config for config in configs}.values())
