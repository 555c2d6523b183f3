"""Parallel styles for embeddings. They shard the weight over the vocabulary or over the features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from lightning_fsdp2.compat.torch import assert_async
from lightning_fsdp2.parallel.tensor.parameters import Layout, Slot, get_slots
from lightning_fsdp2.parallel.tensor.scopes import Scope
from lightning_fsdp2.parallel.tensor.styles.base import Style
from lightning_fsdp2.ranks.collectives import gather_shards, get_shard_range


@dataclass(unsafe_hash=True)
class VocabularyEmbedding(Style):
    """Style of an embedding whose vocabulary is sharded over the ranks."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        _check_embedding(self, module)
        # For the other parameters, such as the weight of a norm, each rank computes a partial gradient from the tokens
        # in its part of the vocabulary. These partial gradients must be summed over the ranks.
        others = dict.fromkeys(get_slots(module.modules()), Layout(is_partial=True))
        return {**others, (module, "weight"): Layout(placement=Shard(0), is_uneven=True)}

    def run(self, module: Any, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        ids = args[0]
        size = module.num_embeddings
        assert_async(
            ((ids >= 0) & (ids < size)).all(), f"A token id is not in the embedding's range of 0 to {size - 1}."
        )
        start, length = get_shard_range(size, scope.group.rank(), scope.group.size())
        if length == 0:  # the vocabulary is so small that this rank holds no part of it
            nothing = module.weight.sum() + module.weight.new_zeros((*ids.shape, module.embedding_dim))
            return scope.leave_whole(nothing)
        is_elsewhere = (ids < start) | (ids >= start + length)
        padding = module.padding_idx
        module.padding_idx = None
        if padding is not None and start <= padding < start + length:
            module.padding_idx = padding - start
        try:
            output = forward((ids - start).masked_fill(is_elsewhere, 0), *args[1:], **kwargs)
        finally:
            module.padding_idx = padding
        return scope.leave_whole(output.masked_fill(is_elsewhere.unsqueeze(-1), 0))


@dataclass(unsafe_hash=True)
class FeatureEmbedding(Style):
    """Style of an embedding whose features are sharded over the ranks. Each rank holds some features of every token."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        _check_embedding(self, module)
        if len(get_slots(module.modules())) > 1:
            raise TypeError(
                f"{type(module).__name__} has other parameters besides its weight, and these need all features of the"
                " embedding on every rank."
            )
        return {(module, "weight"): Layout(placement=Shard(1), is_uneven=True)}

    def run(self, module: Any, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return gather_shards(forward(*args, **kwargs), -1, module.embedding_dim, scope.group)


def reads_token_ids(module: nn.Module) -> bool:
    """Return whether an embedding has parameters besides its weight, which may be for certain token ids only."""
    return isinstance(module, nn.Embedding) and any(name != "weight" for name in module._parameters)


def _check_embedding(style: Style, module: nn.Module) -> None:
    if hasattr(module, "base_layer"):
        raise TypeError("adapters on an embedding do not work under tensor parallelism; remove the adapter.")
    if not isinstance(module, nn.Embedding):
        raise TypeError(f"{type(module).__name__} is not an nn.Embedding; the style {type(style).__name__} needs one.")
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise TypeError("nn.Embedding with max_norm, sparse or scale_grad_by_freq needs the whole weight on each rank.")
    if reads_token_ids(module):
        raise TypeError(
            f"{type(module).__name__} has separate parameters for some token ids, and a rank that holds only a part of"
            " the vocabulary does not see these ids; use the style 'replicate' for this module."
        )
