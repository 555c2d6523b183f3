"""Cross entropy of each token, for logits that are whole or sharded over the vocabulary by tensor parallelism."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.compat.torch import assert_async
from lightning_fsdp2.labels import IGNORE_INDEX, shift_left
from lightning_fsdp2.modules.structure import is_hf_model
from lightning_fsdp2.ranks.collectives import get_shard_range

_BACKEND_ATTRIBUTE = "_lightning_fsdp2_loss_backend"
"""Name of the attribute that holds the backend of ``torch.compile`` on modules with compiled losses."""

_KEEPS_SHARDS_ATTRIBUTE = "_lightning_fsdp2_keeps_shards"
"""Name of the attribute that marks an output head inside :func:`keep_logits_sharded`."""


def token_cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX, model: nn.Module | None = None
) -> Tensor:
    """Return the cross entropy of each position, or 0 where there is no label: [batch, sequence], float32.

    Args:
        logits: [batch, sequence, vocabulary], any float dtype. A DTensor with a sharded vocabulary
            (``FSDP2Config.loss_parallel``) is not gathered.
        labels: [batch, sequence], int64. Position t holds the label for the logits at position t.
        ignore_index: Value of ``labels`` at positions without a label.
        model: Model that returned the logits. If the model's layers are compiled (``FSDP2Config.enable_compile``), the
            loss is compiled too, except for a sharded vocabulary. None if the loss should not be compiled.
    """
    if isinstance(logits, DTensor):
        return _vocabulary_parallel_cross_entropy(logits, labels, ignore_index)
    backend = getattr(model, _BACKEND_ATTRIBUTE, None)
    compute = _cross_entropy if backend is None else _compile_cross_entropy(backend)
    return compute(logits, labels, ignore_index)


def compile_losses(model: nn.Module, backend: str) -> None:
    """Make :func:`token_cross_entropy` use a compiled loss for ``model`` and for the Hugging Face models in it.

    Args:
        model: Any module.
        backend: Backend of ``torch.compile``.
    """
    for module in (model, *filter(is_hf_model, model.modules())):
        module.__dict__[_BACKEND_ATTRIBUTE] = backend


def _cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return losses.view_as(labels)


@cache
def _compile_cross_entropy(backend: str) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return the compiled loss, which needs one kernel for forward and one for backward.

    Unlike the uncompiled loss, it stores neither a float32 copy of the logits nor their log-softmax in memory.
    """
    return torch.compile(_cross_entropy, backend=backend)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the same loss as transformers' ``ForCausalLMLoss``, but also support logits with a sharded vocabulary.

    Args:
        logits: [batch, sequence, vocabulary].
        labels: [batch, sequence], not shifted yet.
        vocab_size: Not used; transformers passes it.
        num_items_in_batch: Number by which the sum of the token losses is divided. None for the number of labels in
            this batch.
        ignore_index: Value of the labels at positions without a label.
        shift_labels: [batch, sequence], labels that are already shifted, which are used instead of ``labels``.
        **kwargs: Arguments that transformers passes to other losses. They are ignored.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("The loss of a causal language model needs `labels` or `shift_labels`.")
        shift_labels = shift_left(labels, ignore_index)
    losses = token_cross_entropy(logits, shift_labels.to(logits.device), ignore_index=ignore_index)
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum()
    return losses.sum() / num_items_in_batch


@contextmanager
def keep_logits_sharded(head: nn.Module) -> Iterator[None]:
    """Make a tensor parallel output head return logits with a sharded vocabulary inside the block."""
    head.__dict__[_KEEPS_SHARDS_ATTRIBUTE] = True
    try:
        yield
    finally:
        del head.__dict__[_KEEPS_SHARDS_ATTRIBUTE]


def keeps_logits_sharded(head: nn.Module) -> bool:
    """Return whether the caller is inside a :func:`keep_logits_sharded` block for ``head``."""
    return _KEEPS_SHARDS_ATTRIBUTE in head.__dict__


def _vocabulary_parallel_cross_entropy(logits: DTensor, labels: Tensor, ignore_index: int) -> Tensor:
    (placement,) = logits.placements
    if placement != Shard(logits.ndim - 1):
        raise ValueError(
            f"The logits are sharded as {placement}, not over the vocabulary; gather them with `.full_tensor()`."
        )
    group = logits.device_mesh.get_group()
    size = logits.size(-1)
    start, _ = get_shard_range(size, group.rank(), group.size())
    return _VocabularyParallelCrossEntropy.apply(logits.to_local(), labels, start, size, ignore_index, group)


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits with a sharded vocabulary (https://arxiv.org/abs/1909.08053).

    Forward needs two all-reduces of one or two numbers per token. Backward needs no communication.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, size: int, ignore_index: int, group: dist.ProcessGroup
    ) -> Tensor:
        wide = logits.float()
        has_label = labels != ignore_index
        in_range = (labels >= 0) & (labels < size)
        assert_async((in_range | ~has_label).all(), f"A label is not in the vocabulary's range of 0 to {size - 1}.")
        is_own = has_label & (labels >= start) & (labels < start + logits.size(-1))
        index = (labels - start).where(is_own, 0).unsqueeze(-1)
        # handle a vocabulary that is so small that this rank holds no part of it
        largest = wide.amax(-1) if logits.size(-1) else wide.new_full(labels.shape, -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (wide - largest.unsqueeze(-1)).exp_()
        own = wide.gather(-1, index).squeeze(-1) - largest if logits.size(-1) else torch.zeros_like(largest)
        totals = torch.stack([exponentials.sum(-1), own.where(is_own, 0)])
        dist.all_reduce(totals, group=group)
        denominator, target = totals.unbind()
        ctx.save_for_backward(exponentials.div_(denominator.unsqueeze(-1)), index, is_own, has_label)
        ctx.dtype = logits.dtype
        return (denominator.log() - target).where(has_label, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, index, is_own, has_label = ctx.saved_tensors
        gradient = gradient.where(has_label, 0).unsqueeze(-1)
        result = probabilities * gradient
        if result.size(-1):
            result.scatter_add_(-1, index, -gradient.where(is_own.unsqueeze(-1), 0))
        return result.to(ctx.dtype), None, None, None, None, None
