"""Checks that the ranks of a model replica, which share its layers or its sequences, read the same batches."""

import hashlib
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.ranks.coordination import gather_objects


def check_first_batch(model: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Check in the first training forward of ``model`` that all ranks of its replica call it with the same batch.

    The check then removes itself. Forwards without gradients, as in generation, and compiled forwards are not checked.

    Args:
        model: Model that is called with the same whole batch on all ranks of its replica.
        groups: See :func:`check_same_batch`.
    """

    def check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            handle.remove()
            check_same_batch((args, kwargs), groups)

    # before FSDP2's own hook, which copies and casts the arguments
    handle = model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)


def check_same_batch(batch: Any, groups: Sequence[dist.ProcessGroup]) -> None:
    """Check that all ranks of a replica have the same batch.

    Tensors of integers and bools, such as token ids and masks, must be equal. Of all other tensors, only the shapes are
    compared, because another model may have computed their values, with other rounding errors on each rank.

    Args:
        batch: Batch, or arguments of a forward, with tensors in any mappings and collections.
        groups: Groups of the ranks along each axis of the replica.

    Raises:
        ValueError: On every rank of the replica, when the batches differ.
    """
    found = {get_batch_fingerprint([_without_floats(tensor) for tensor in _iterate_tensors(batch)])}
    for group in groups:
        found = set().union(*gather_objects(found, group))
    if len(found) > 1:
        raise ValueError(
            "The ranks of one model replica train on different first batches, but must read the same batches, because"
            " they share layers (tensor or pipeline parallel) or sequences (context parallel). Give the"
            " DistributedSampler num_replicas=ranks.size() and rank=ranks.get_local_rank() of"
            ' ranks = get_mesh(mesh, "data_parallel") from lightning_fsdp2.mesh, not those of the world,'
            " and use the same seed for shuffling on all ranks."
        )


def get_batch_fingerprint(batch: Any) -> str:
    """Return a hash of a batch's content, including the values of its tensors."""
    digest = hashlib.sha256()
    _update_digest(digest, batch)
    return digest.hexdigest()


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value`` whose content can be read, so neither DTensors nor fake tensors."""
    if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iterate_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_tensors(item)


def _without_floats(tensor: Tensor) -> Any:
    return tuple(tensor.shape) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _update_digest(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        digest.update(f"tensor {data.dtype} {tuple(data.shape)}".encode())
        digest.update(data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    elif isinstance(value, Mapping):  # the BatchEncoding of a tokenizer is a Mapping but not a dict
        digest.update(f"mapping of {len(value)}".encode())
        for key in value:
            digest.update(pickle.dumps(key))
            _update_digest(digest, value[key])
    elif isinstance(value, Collection) and not isinstance(value, str | bytes):
        digest.update(f"collection of {len(value)}".encode())
        for item in value:
            _update_digest(digest, item)
    else:
        digest.update(pickle.dumps(value))
