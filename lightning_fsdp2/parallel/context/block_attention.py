"""Attention from some queries of a sequence to all of its keys, computed block by block.

A rank of a context parallel group holds one or two *chunks* of each sequence. The chunks' queries and the keys that
they may see are divided into blocks (:mod:`~lightning_fsdp2.parallel.context.attention_blocks`). Keys that no query may
see are skipped. The results of the blocks are then merged, which gives exactly the result of one softmax over all keys
(:mod:`~lightning_fsdp2.parallel.context.dense_attention`).

A learned attention sink adds a score to every softmax, but has no value vector. So it only sets the initial value
of the normalizer (the logarithm of the softmax's denominator), before the results of the blocks are merged.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_fsdp2.compat.torch import all_gather_tensor, all_to_all_tensor
from lightning_fsdp2.parallel.context.attention_blocks import Block, DenseBlock, SegmentBlock
from lightning_fsdp2.parallel.context.dense_attention import add_dense_gradients, attend_dense, merge
from lightning_fsdp2.parallel.context.segment_attention import segment_attention, segment_attention_backward


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    blocks: tuple[Block, ...],
    scale: float,
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the attention for the queries in a rank's chunks.

    With a ``group``, forward gathers the keys and values of all ranks. Backward gathers them again, so that they need
    not be kept in memory.

    Args:
        query: [batch, heads, positions of the chunks, dim], float32 or bfloat16.
        key: [batch, key-value heads, positions, dim]. The positions are those of this rank's chunks if there is a
            ``group``, and those of the whole sequence otherwise.
        value: [batch, key-value heads, positions, value dim].
        blocks: Blocks of the queries, from :func:`~lightning_fsdp2.parallel.context.attention_blocks.get_blocks`.
        scale: Factor by which scores are multiplied.
        padding: [batch, positions of the chunks], bool: True for padding, for which the result is zero. None without
            padding.
        sinks: [heads], an additional score per head for the softmax of every query. None without sinks.
        group: Process group of the ranks that share the sequence. Each rank holds its chunks from
            :func:`~lightning_fsdp2.parallel.context.attention_blocks.get_head_tail_chunks`. None if this rank holds
            the keys of the whole sequence.

    Returns:
        [batch, heads, positions of the chunks, value dim].
    """
    output = _BlockAttention.apply(query, key, value, sinks, blocks, scale, group)
    return output if padding is None else output.masked_fill(padding[:, None, :, None], 0)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: tuple[Block, ...],
        scale: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        keys, values = _gather(key, value, group)
        # in memory, the dim of positions comes before the dim of heads, so that the caller's transpose needs no copy
        shape = (query.size(0), query.size(2), query.size(1), value.size(-1))
        output = query.new_zeros(shape, dtype=torch.float32).transpose(1, 2)
        normalizer = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        if sinks is not None:
            normalizer[:] = sinks.float()[:, None]
        for block in blocks:
            merge(output, normalizer, block.rows, *_attend(query, keys, values, block, scale))
        # always copy, because code compiled by torch 2.11 passes no gradient to an output that was changed in place
        # (https://github.com/pytorch/pytorch/issues/180642)
        result = output.to(query.dtype, copy=True)
        ctx.save_for_backward(query, key, value, sinks, result, normalizer)
        ctx.blocks, ctx.scale, ctx.group = blocks, scale, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, sinks, output, normalizer = ctx.saved_tensors
        keys, values = _gather(key, value, ctx.group)
        saved = (gradient, query, keys, values, output, normalizer)
        sums = tuple(torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, keys, values))
        for block in ctx.blocks:
            if isinstance(block, DenseBlock):
                add_dense_gradients(sums, *saved, block, ctx.scale)
            else:
                _add_segment_gradients(sums, *saved, block, ctx.scale)
        sink_gradient = None
        if sinks is not None:
            share = (sinks.float()[:, None] - normalizer).exp_()
            sink_gradient = -(share * (gradient * output).sum(-1, dtype=torch.float32)).sum((0, 2)).to(sinks.dtype)
        scattered = _scatter(sums[1], sums[2], key.dtype, ctx.group)
        return sums[0].to(query.dtype), *scattered, sink_gradient, None, None, None


def _attend(query: Tensor, keys: Tensor, values: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the attention of one block.

    Returns:
        The result, [batch, heads, rows, value dim], and the logarithm of the softmax's denominator, [batch, heads,
        rows].
    """
    if isinstance(block, DenseBlock):
        return attend_dense(query, keys, values, block, scale)
    query = query[:, :, block.rows]
    inputs = (_flatten(query), _take(keys, block), _take(values, block))
    output, normalizer = segment_attention(*inputs, *_get_arguments(block, scale))
    return _unflatten(output, query), normalizer.unflatten(1, (query.size(0), -1)).transpose(0, 1)


def _add_segment_gradients(
    sums: tuple[Tensor, ...],
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    normalizer: Tensor,
    block: SegmentBlock,
    scale: float,
) -> None:
    """Add the gradients of a block of segments to ``sums``, as ``add_dense_gradients`` does for dense blocks."""
    rows = block.rows
    own = query[:, :, rows]
    parts = segment_attention_backward(
        _flatten(gradient[:, :, rows]),
        _flatten(own),
        _take(keys, block),
        _take(values, block),
        _flatten(output[:, :, rows]),
        normalizer[:, :, rows].transpose(0, 1).flatten(1).contiguous(),
        *_get_arguments(block, scale),
    )
    sums[0][:, :, rows] += _unflatten(parts[0], own)
    sums[1][:, :, : block.key_end] += parts[1].transpose(1, 2)
    sums[2][:, :, : block.key_end] += parts[2].transpose(1, 2)


def _get_arguments(block: SegmentBlock, scale: float) -> tuple[Any, ...]:
    tensors = block.key_starts, block.query_ends, block.key_ends
    return *tensors, block.most_queries, block.most_keys, block.window, scale, block.pairs


def _flatten(tensor: Tensor) -> Tensor:
    """Flatten [batch, heads, positions, dim] to [batch * positions, heads, dim]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    return flat.unflatten(0, (like.size(0), like.size(2))).transpose(1, 2)


def _take(tensor: Tensor, block: SegmentBlock) -> Tensor:
    """Return the keys or values that the block may need.

    Args:
        tensor: [batch, heads, positions, dim], keys or values of the whole sequence.
        block: Block of segments.

    Returns:
        [batch, positions, heads, dim], a view of ``tensor`` without the positions after the block's last key.
    """
    return tensor[:, :, : block.key_end].transpose(1, 2)


def _gather(key: Tensor, value: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of all ranks, in the order of their positions in the sequence."""
    if group is None:
        return key, value
    gathered = all_gather_tensor(torch.cat([key, value], -1).movedim(2, 0), 0, group)
    chunks = gathered.chunk(2 * group.size())
    ordered = torch.cat([*chunks[::2], *chunks[:0:-2]]).movedim(0, 2)
    return ordered.split([key.size(-1), value.size(-1)], -1)


def _scatter(key: Tensor, value: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Sum the gradients of keys and values over the ranks, and return the part for this rank's chunks.

    Each rank rounds its summands once to ``dtype``, sends them, and adds up the received summands in float32. A
    reduce-scatter in ``dtype`` would send as many bytes, but round after every addition. This loss of precision becomes
    noticeable at 16 ranks.
    """
    if group is None:
        return key.to(dtype), value.to(dtype)
    ranks = group.size()
    chunks = torch.cat([key, value], -1).to(dtype).movedim(2, 0).chunk(2 * ranks)
    ordered = torch.stack([torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)])
    own = all_to_all_tensor(ordered, group).sum(0, dtype=torch.float32).to(dtype).movedim(0, 2)
    return own.split([key.size(-1), value.size(-1)], -1)
