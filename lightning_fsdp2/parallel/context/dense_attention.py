"""Computation of dense blocks of attention, and the exact merging of their results.

One call of a fused attention kernel computes a block, and also returns the logarithm of the softmax's denominator. With
these logarithms, the results of the blocks are merged into the result of one softmax over all keys. In backward, the
kernel takes the merged result and returns the block's contribution to the gradients (https://arxiv.org/abs/2310.01889,
https://arxiv.org/abs/2205.14135).
"""

import torch
from torch import Tensor

from lightning_fsdp2.compat.attention_kernels import attend, attend_backward
from lightning_fsdp2.parallel.context.attention_blocks import DenseBlock


def merge(output: Tensor, normalizer: Tensor, rows: slice, part: Tensor, part_normalizer: Tensor) -> None:
    """Merge the attention to one more block of keys into ``output`` and ``normalizer``, in place.

    Args:
        output: [batch, heads, queries, value dim], float32: attention to the keys of all blocks merged so far.
        normalizer: [batch, heads, queries], float32: logarithm of the softmax's denominator for ``output``.
        rows: Queries of the new block.
        part: [batch, heads, rows, value dim]: attention to only the keys of the new block.
        part_normalizer: [batch, heads, rows]: logarithm of the softmax's denominator for ``part``.
    """
    total = torch.logaddexp(normalizer[:, :, rows], part_normalizer)
    output[:, :, rows] *= (normalizer[:, :, rows] - total).exp_().unsqueeze(-1)
    output[:, :, rows] += part * (part_normalizer - total).exp_().unsqueeze(-1)
    normalizer[:, :, rows] = total


def attend_dense(query: Tensor, keys: Tensor, values: Tensor, block: DenseBlock, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the attention of one dense block.

    Args:
        query: [batch, heads, queries, dim].
        keys: [batch, key-value heads, positions, dim].
        values: [batch, key-value heads, positions, value dim].
        block: Block of queries and keys.
        scale: Factor by which scores are multiplied.

    Returns:
        The result, [batch, heads, rows, value dim], and the logarithm of the softmax's denominator, [batch, heads,
        rows].
    """
    query = query[:, :, block.rows]
    inputs = _match_heads(query, keys, values, block)
    mask = _make_mask(block, query)
    output, normalizer = attend(*inputs, is_causal=block.is_causal, mask=mask, scale=scale)
    return output.reshape(*query.shape[:-1], -1), normalizer.reshape(query.shape[:-1])


def add_dense_gradients(
    sums: tuple[Tensor, ...],
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    normalizer: Tensor,
    block: DenseBlock,
    scale: float,
) -> None:
    """Add one dense block's contribution to the gradients of queries, keys and values.

    Args:
        sums: Gradients of ``query``, ``keys`` and ``values``, summed over the blocks so far. They are float32, and are
            changed in place.
        gradient: Gradient of ``output``.
        query: See :func:`attend_dense`.
        keys: See :func:`attend_dense`.
        values: See :func:`attend_dense`.
        output: [batch, heads, queries, value dim], result merged from all blocks.
        normalizer: [batch, heads, queries], logarithm of the softmax's denominator over the keys of all blocks.
        block: Block of queries and keys.
        scale: Factor by which scores are multiplied.
    """
    rows = block.rows
    own = query[:, :, rows]
    folded, key, value = _match_heads(own, keys, values, block)
    shape = folded.shape[:-1]
    parts = attend_backward(
        gradient[:, :, rows].reshape(*shape, -1),
        folded,
        key,
        value,
        output[:, :, rows].reshape(*shape, -1),
        normalizer[:, :, rows].reshape(shape),
        is_causal=block.is_causal,
        mask=_make_mask(block, own),
        scale=scale,
    )
    heads = keys.size(1)
    of_key, of_value = (part.unflatten(1, (heads, -1)).sum(2) if part.size(1) != heads else part for part in parts[1:])
    sums[0][:, :, rows] += parts[0].reshape(own.shape)
    sums[1][:, :, block.keys] += of_key
    sums[2][:, :, block.keys] += of_value


def _make_mask(block: DenseBlock, query: Tensor) -> Tensor | None:
    return None if block.mask is None else block.mask.make(query.size(2), block.keys, query.device)


def _match_heads(query: Tensor, keys: Tensor, values: Tensor, block: DenseBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries and the block's keys and values with the same number of heads.

    If every query sees all keys, the query heads that share a key-value head are joined into one head. In other blocks,
    the keys and values are repeated for each query head, which is cheap because such blocks are small.
    """
    key, value = keys[:, :, block.keys], values[:, :, block.keys]
    heads = keys.size(1)
    if query.size(1) == heads:
        return query, key, value
    if not block.is_causal and block.mask is None:
        return query.reshape(query.size(0), heads, -1, query.size(-1)), key, value
    shared = query.size(1) // heads
    return query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
