"""Attention within all segments of a block in one operation, which uses a variable-length kernel if there is one.

Forward and backward are custom operators of torch (``torch.library``), so that FLOP counters and ``torch.compile`` see
one operation for all segments. :mod:`~lightning_fsdp2.plan.simulation.flops` computes the FLOPs of this operation from
its argument ``pairs``.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp2.compat.attention_kernels import (
    attend_segments_by_flash,
    attend_segments_by_flash_backward,
    has_flash,
)
from lightning_fsdp2.parallel.context.attention_blocks import DenseBlock, get_masked_blocks
from lightning_fsdp2.parallel.context.dense_attention import add_dense_gradients, attend_dense, merge


@torch.library.custom_op("lightning_fsdp2::segment_attention", mutates_args=())
def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_starts: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    window: int | None,
    scale: float,
    pairs: int,
) -> tuple[Tensor, Tensor]:
    """Compute the attention within each segment of a block.

    The arguments from ``key_starts`` on, except ``scale``, are fields of a
    :class:`~lightning_fsdp2.parallel.context.attention_blocks.SegmentBlock`.

    Args:
        query: [queries, heads, dim], in the order of the segments.
        key: [batch, positions, key-value heads, dim].
        value: [batch, positions, key-value heads, value dim].
        key_starts: [batch], position of the first key that the block needs in each sequence.
        query_ends: [segments + 1], 0 followed by the cumulative number of queries up to the end of each segment.
        key_ends: [segments + 1], 0 followed by the cumulative number of needed keys up to the end of each segment.
        most_queries: Largest number of queries in a segment.
        most_keys: Largest number of keys in a segment.
        window: Largest number of keys that a query sees, including its own. None if a query sees all keys of its
            segment up to its own.
        scale: Factor by which scores are multiplied.
        pairs: Number of query-key pairs that attention computes. Only FLOP counters use it.

    Returns:
        The attention, [queries, heads, value dim], and the logarithm of the softmax's denominator, [heads, queries],
        float32.
    """
    key, value = _pack(key, key_starts), _pack(value, key_starts)
    if has_flash(query):
        ends, most = (query_ends, key_ends), (most_queries, most_keys)
        return attend_segments_by_flash(query, key, value, ends, most, window=window, scale=scale)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    shape = queries.shape[:-1]
    output = query.new_zeros((*shape, value.size(-1)), dtype=torch.float32)
    normalizer = torch.full(shape, -torch.inf, dtype=torch.float32, device=query.device)
    for block in _get_blocks(query_ends, key_ends, window):
        merge(output, normalizer, block.rows, *attend_dense(queries, keys, values, block, scale))
    return output[0].transpose(0, 1).to(query.dtype).contiguous(), normalizer[0]


@segment_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    queries, heads, _ = query.shape
    return query.new_empty(queries, heads, value.size(-1)), query.new_empty(heads, queries, dtype=torch.float32)


@torch.library.custom_op("lightning_fsdp2::segment_attention_backward", mutates_args=())
def segment_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizer: Tensor,
    key_starts: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    window: int | None,
    scale: float,
    pairs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given the gradient of :func:`segment_attention`'s output.

    ``output`` and ``normalizer`` may have been merged with the attention to other keys. The gradients then contain only
    the contributions of the given keys.
    """
    keys, values = _pack(key, key_starts), _pack(value, key_starts)
    saved = (gradient, query, keys, values, output, normalizer)
    parts: tuple[Tensor, ...]
    if has_flash(query):
        ends, most = (query_ends, key_ends), (most_queries, most_keys)
        parts = attend_segments_by_flash_backward(*saved, ends, most, window=window, scale=scale)
    else:
        parts = _compute_gradients(*saved, _get_blocks(query_ends, key_ends, window), scale)
    of_query, of_key, of_value = parts
    return of_query.contiguous(), _unpack(of_key, key, key_starts), _unpack(of_value, value, key_starts)


@segment_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _compute_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizer: Tensor,
    blocks: list[DenseBlock],
    scale: float,
) -> tuple[Tensor, ...]:
    given = (gradient, query, key, value, output)
    of_output, queries, keys, values, outputs = (tensor.transpose(0, 1)[None] for tensor in given)
    sums = tuple(torch.zeros_like(tensor, dtype=torch.float32) for tensor in (queries, keys, values))
    for block in blocks:
        add_dense_gradients(sums, of_output, queries, keys, values, outputs, normalizer[None], block, scale)
    return tuple(total[0].transpose(0, 1).to(query.dtype) for total in sums)


def _pack(tensor: Tensor, starts: Tensor) -> Tensor:
    """Concatenate the keys or values that a block needs from all sequences of a batch.

    If the needed positions start at the same position in all sequences, the result is a view where possible, and not a
    copy.

    Args:
        tensor: [batch, positions, heads, dim].
        starts: [batch], first needed position in each sequence.

    Returns:
        [needed positions of all sequences, heads, dim].
    """
    first, *others = starts.tolist()
    if all(other == first for other in others):
        return tensor[:, first:].flatten(0, 1)
    return torch.cat([sequence[start:] for sequence, start in zip(tensor, (first, *others), strict=True)])


def _unpack(packed: Tensor, like: Tensor, starts: Tensor) -> Tensor:
    """Undo :func:`_pack`. The positions that :func:`_pack` left out become zeros."""
    result = packed.new_zeros(like.shape)
    lengths = [like.size(1) - start for start in starts.tolist()]
    for sequence, start, part in zip(result, starts.tolist(), packed.split(lengths), strict=True):
        sequence[start:] = part
    return result


def _get_blocks(query_ends: Tensor, key_ends: Tensor, window: int | None) -> list[DenseBlock]:
    """Return dense blocks that together compute all segments.

    The CPU waits for the values of ``query_ends`` and ``key_ends`` from the device.
    """
    blocks: list[DenseBlock] = []
    for (first, end), (first_key, last_key) in zip(
        pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True
    ):
        # queries and keys end at the same position, so the key at the first query's position is found from the end
        rows, own = slice(first, end), last_key - (end - first)
        if window is not None and window < last_key - first_key:
            blocks += get_masked_blocks(rows, own, window, first_key=first_key)
            continue
        if own > first_key:
            blocks.append(DenseBlock(rows, slice(first_key, own)))
        blocks.append(DenseBlock(rows, slice(own, last_key), is_causal=True))
    return blocks
