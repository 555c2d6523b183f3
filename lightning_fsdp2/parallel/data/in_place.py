"""Weights that a forward changes in place, such as ``self.weight.clamp_(...)`` or ``nn.Embedding(max_norm=...)``.

In its forward, a module sees FSDP2's gathered copies of its weights. FSDP2 frees these copies, and does not look
whether the forward has changed them. Here, changes are written into the shards first.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp2.compat.fsdp import GatheredWeight, GatheringRanks, watch_gathered_weights
from lightning_fsdp2.compat.torch import get_group_timeout, is_in_backward
from lightning_fsdp2.ranks.collectives import exchange, get_shard_range
from lightning_fsdp2.ranks.coordination import compare_in_store, shorten_timeout
from lightning_fsdp2.ranks.failures import list_names

_TIMEOUT = timedelta(minutes=5)
"""Longest time that a rank which has changed a weight waits for the other ranks to change it, too.

All ranks have just gathered the weight together, so they arrive within a layer's forward of each other. If the timeout
of collectives is longer than the default, it is used instead.
"""


def keep_changes_in_place(modules: Iterable[FSDPModule], *, is_pipelined: bool = False) -> None:
    """Make changes that forwards make to gathered weights in place last, as in one process, or fail by name.

    All ranks must change a weight in the same forward, as they do with the layers of one model. Each element gets the
    value to which the ranks changed it; an element that no rank changed keeps its exact value. If several ranks change
    an element, they must change it to the same value.

    A unit whose weights are not changed pays nothing: only version numbers are compared. A changed weight costs one
    exchange of the whole weight, and the host waits for its result.

    Args:
        modules: Modules that ``fully_shard`` was applied to. Nothing is done on ranks that are only simulated.
        is_pipelined: Whether the model runs once for each micro-batch of a pipeline. Changes are then refused.
    """
    for module in modules:
        if dist.is_initialized() and dist.get_backend() != "fake":
            watch_gathered_weights(module, _Keeper(is_pipelined))


class _Keeper:
    """Watcher of one unit that writes changes into the shards."""

    def __init__(self, is_pipelined: bool) -> None:
        self._is_pipelined = is_pipelined

    def check_first(self, weights: list[GatheredWeight], ranks: GatheringRanks) -> None:
        """Refuse weights that the forward replaced, or changed through ``.data``, which version numbers do not count.

        This reads the weights, so it is done only once.
        """
        _check_not_replaced(weights)
        plain = [weight for weight in weights if _is_plain(weight)]
        changed = [weight.name for weight in plain if not _is_same(*_get_own_rows(weight, ranks)).all()]
        if changed:
            raise RuntimeError(
                f"The forward has changed {list_names(changed)} through `.data`. Under FSDP2, the forward sees a copy"
                " of the weight that is freed, and torch does not count changes through `.data`, so they would be lost."
                " Change the weight itself, under `torch.no_grad()`: `self.weight.clamp_(...)`, or"
                " `self.weight.copy_(value)`."
            )

    def write_back(self, weights: list[GatheredWeight], ranks: GatheringRanks) -> None:
        """Write the changes of all ranks into this rank's shards.

        Raises:
            RuntimeError: If the forward has replaced a weight, if ranks have changed it differently, if not all ranks
                have changed it, if recomputation has changed it once more, or if the model is pipelined.
        """
        _check_not_replaced(weights)
        names = list_names([weight.name for weight in weights])
        if self._is_pipelined:
            raise RuntimeError(
                f"The forward has changed {names} in place. With pp_size > 1, it runs for several micro-batches before"
                " the first backward, so the change would be made several times, and backwards would not have the"
                " weights of their forward. Change weights between steps, as in `on_train_batch_start`, or use"
                " pp_size=1."
            )
        _wait(names, ranks.ranks)
        merged = [_merge_over_ranks(weight, ranks) for weight in weights]
        if differing := _find(weights, [result.differs for result in merged], ranks):
            raise RuntimeError(
                f"Ranks have changed {differing} in place, in the same forward, to different values. In one process"
                " there is only one value, so no rank's value is right. If the change depends on the batch, as that of"
                " a codebook does, combine what it depends on over the ranks first (`torch.distributed.all_reduce`)."
            )
        if not is_in_backward():
            for weight, result in zip(weights, merged, strict=True):
                weight.shard.copy_(result.value)
            return
        # the forward's own changes are in the shards, so what is left are those of recomputation
        repeated = [~_is_close(result.value, weight.shard) for weight, result in zip(weights, merged, strict=True)]
        if names := _find(weights, repeated, ranks):
            raise RuntimeError(
                f"Activation checkpointing has repeated a forward that changes {names} in place, and the repetition has"
                " changed the weights once more. Set activation_checkpointing=False, make the change in"
                " `on_train_batch_start`, or make it so that a repetition changes nothing, as clamping does."
            )


def _wait(names: str, ranks: list[int]) -> None:
    """Wait until all ranks have changed the same weights.

    Collectives cannot be used for that: a rank that has changed nothing goes on to the next layer's all-gather.
    """
    timeout = shorten_timeout(get_group_timeout(cast(Any, dist.group.WORLD)), _TIMEOUT)
    try:
        compare_in_store(f"change in place of {names}", "", ranks, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {dist.get_rank()} has changed {names} in place in a forward, but not every rank has{error}. All"
            " ranks hold parts of a weight, so all must change it in the same forward, and to the same value: decide on"
            " numbers that all ranks share (`torch.distributed.all_reduce`)."
        ) from error


def _check_not_replaced(weights: list[GatheredWeight]) -> None:
    if replaced := [weight.name for weight in weights if weight.is_replaced]:
        raise RuntimeError(
            f"The forward has replaced {list_names(replaced)} with another tensor: by assignment, through `.data`, or"
            " with `set_`. Under FSDP2, the forward sees a copy of the weight, so later steps would compute with wrong"
            " values. Change the weight in place, under `torch.no_grad()`: `self.weight.copy_(value)`."
        )


class _Merged(NamedTuple):
    """This rank's shard after the changes of all ranks."""

    value: Tensor
    is_changed: Tensor
    """Whether any rank has changed an element."""

    differs: Tensor
    """Whether ranks have changed an element to different values."""


def _merge_over_ranks(weight: GatheredWeight, ranks: GatheringRanks) -> _Merged:
    """Merge the values that all ranks have for this rank's shard of ``weight``."""
    if not _is_plain(weight):
        raise RuntimeError(
            f"The forward has changed {weight.name} in place, whose gathered copy is a {type(weight.whole).__name__}"
            " and cannot be written back. Change the weight in `on_train_batch_end` instead."
        )
    at_rest = weight.shard.to(weight.whole.device)  # another device with offloading
    versions = _exchange_shards(weight, ranks)
    merged = _merge(at_rest.to(weight.whole.dtype), versions)
    if ranks.replicas is not None and ranks.replicas.size() > 1:
        of_replicas = [torch.empty_like(merged.value) for _ in range(ranks.replicas.size())]
        dist.all_gather(of_replicas, merged.value.contiguous(), group=ranks.replicas)
        both = _merge(at_rest.to(weight.whole.dtype), torch.stack(of_replicas))
        merged = both._replace(differs=both.differs | merged.differs)
    # an element that did not change keeps its exact value, which the compute dtype may have rounded
    return merged._replace(value=torch.where(merged.is_changed, merged.value.to(at_rest.dtype), at_rest))


def _exchange_shards(weight: GatheredWeight, ranks: GatheringRanks) -> Tensor:
    """Return the values that the ranks of this replica have for this rank's shard, stacked along a new dim 0."""
    group = ranks.shards
    if group is None or group.size() == 1:
        return weight.whole[None]
    size = weight.whole.size(weight.dim)
    cuts = [get_shard_range(size, rank, group.size()) for rank in range(group.size())]
    sent = [weight.whole.narrow(weight.dim, *cut).flatten() for cut in cuts]
    lengths = [part.numel() for part in sent]
    received = exchange(torch.cat(sent), lengths, [weight.shard.numel()] * group.size(), group)
    return received.view(group.size(), *weight.shard.shape)  # which may be without elements


def _merge(before: Tensor, versions: Tensor) -> _Merged:
    """Merge values of an element that ranks have, where an element that is as ``before`` was not changed."""
    is_changed = ~_is_same(versions, before)
    first = is_changed.int().argmax(0, keepdim=True)
    value = versions.gather(0, first)[0]
    return _Merged(value, is_changed.any(0), (is_changed & ~_is_close(versions, value, torch.float32)).any(0))


def _is_same(tensor: Tensor, other: Tensor) -> Tensor:
    return (tensor == other) | (tensor.isnan() & other.isnan())


def _is_close(tensor: Tensor, other: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return where tensors are equal within the rounding of ``dtype``, or of their own dtype."""
    tolerance = 2 * torch.finfo(dtype or tensor.dtype).eps
    return torch.isclose(tensor, other.to(tensor), rtol=tolerance, atol=0.0, equal_nan=True)


def _find(weights: list[GatheredWeight], found: list[Tensor], ranks: GatheringRanks) -> str:
    """Return the names of the weights for which an element of ``found`` is true on any rank, as text."""
    flags = torch.stack([elements.any() for elements in found]).int()
    for group in (ranks.shards, ranks.replicas):
        if group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return list_names([weight.name for weight, flag in zip(weights, flags.tolist(), strict=True) if flag])


def _get_own_rows(weight: GatheredWeight, ranks: GatheringRanks) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the gathered weight, and the shard from which it was gathered."""
    group = ranks.shards
    start, length = (0, weight.whole.size(weight.dim))
    if group is not None:
        start, length = get_shard_range(length, group.rank(), group.size())
    return weight.whole.narrow(weight.dim, start, length), weight.shard.to(weight.whole)


def _is_plain(weight: GatheredWeight) -> bool:
    """Return whether the gathered copy is a tensor of the shard's values, and not one that a library packs."""
    return type(weight.whole) is Tensor
