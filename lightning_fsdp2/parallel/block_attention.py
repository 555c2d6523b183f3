"""Attention of some queries of a sequence to all of its keys, computed block by block and merged exactly.

A rank of a context parallel group holds a few *chunks* of each sequence. What a chunk's queries may see is cut into
blocks: of queries and keys that see each other in full, causally, or by a mask. Each block is one call of the device's
fused attention, which returns the log of its softmax's denominator too, so that the blocks' results add up to the
result of one softmax over all keys; in backward each block is given the merged result, and returns its summand of the
gradients (https://arxiv.org/abs/2310.01889, https://arxiv.org/abs/2205.14135). No block is computed that no query of
it may see.

A learned sink, a score in every softmax that no value belongs to, is one more block, without work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_fsdp2._attention_kernels import attend, attend_backward
from lightning_fsdp2._torch_compat import all_gather_tensor, all_to_all_tensor

_MASKED_ROWS = 512
"""Most queries of a block with a mask: a mask has a byte for each of them and each key."""


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees: those not behind it, of its document, and not further than the window before it."""

    window: int | None = None
    """How many keys a query sees at most, itself included; None for all."""

    documents: Tensor | None = None
    """[batch, sequence] of the whole sequence: keys of another number are not seen. None for one document."""

    padding: Tensor | None = None
    """[batch, sequence], bool: positions that see nothing, of documents of their own; their result is zero."""


@dataclass(frozen=True)
class Chunk:
    """A part of a sequence: positions ``start`` to ``start + length``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class _Block:
    rows: slice
    """Its queries, among those of the rank."""

    keys: slice
    """Positions of the whole sequence."""

    is_causal: bool = False
    """Whether the n-th query sees the first n keys."""

    mask: Tensor | None = None
    """[1 or batch, 1, queries, keys], bool: what is seen."""


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunks: tuple[Chunk, ...],
    pattern: Pattern,
    scale: float,
    sinks: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the attention of the queries of ``chunks``.

    For backward nothing of the whole sequence is kept: with a ``group`` keys and values are gathered again.

    Args:
        query: [batch, heads, positions of the chunks, dim], float32 or bfloat16.
        key: [batch, key-value heads, positions, dim]; those of the chunks with a ``group``, else the whole sequence's.
        value: [batch, key-value heads, positions, value dim].
        chunks: Which positions the queries have, in their order.
        pattern: Which keys they see.
        scale: Of the scores.
        sinks: [heads], a score in the softmax of every query of a head; None for none.
        group: Of the ranks that hold the sequence's other chunks, in the order of :func:`get_head_tail_chunks`.

    Returns:
        [batch, heads, positions of the chunks, value dim].
    """
    output = _BlockAttention.apply(query, key, value, sinks, chunks, pattern, scale, group)
    if pattern.padding is None:
        return output
    is_padding = torch.cat([pattern.padding[:, chunk.start : chunk.end] for chunk in chunks], 1)
    return output.masked_fill(is_padding[:, None, :, None], 0)


def get_head_tail_chunks(length: int, rank: int, ranks: int) -> tuple[Chunk, Chunk]:
    """Cut a sequence into ``2 * ranks`` chunks, of which a rank takes one from the head and one from the tail.

    Causal attention is then the same work for all ranks: the n-th query has n keys.
    """
    size = length // (2 * ranks)
    return Chunk(rank * size, size), Chunk((2 * ranks - 1 - rank) * size, size)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        chunks: tuple[Chunk, ...],
        pattern: Pattern,
        scale: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        keys, values = _gather(key, value, group)
        # position by position in memory, as the model goes on with it: else it would keep a copy for its own backward
        shape = (query.size(0), query.size(2), query.size(1), value.size(-1))
        output = query.new_zeros(shape, dtype=torch.float32).transpose(1, 2)
        normalizer = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        if sinks is not None:
            normalizer[:] = sinks.float()[:, None]
        for block in _get_blocks(chunks, pattern, query.device):
            rows = block.rows
            part, part_normalizer = _attend(query[:, :, rows], keys, values, block, scale)
            total = torch.logaddexp(normalizer[:, :, rows], part_normalizer)
            output[:, :, rows] *= (normalizer[:, :, rows] - total).exp_().unsqueeze(-1)
            output[:, :, rows] += part * (part_normalizer - total).exp_().unsqueeze(-1)
            normalizer[:, :, rows] = total
        # a copy where the dtype is the same too: compiled by torch 2.11, what a forward has changed in place gets no
        # gradient (https://github.com/pytorch/pytorch/issues/180642)
        result = output.to(query.dtype, copy=True)
        ctx.save_for_backward(query, key, value, sinks, result, normalizer)
        ctx.chunks, ctx.pattern, ctx.scale, ctx.group = chunks, pattern, scale, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, sinks, output, normalizer = ctx.saved_tensors
        keys, values = _gather(key, value, ctx.group)
        query_gradient = torch.zeros_like(query, dtype=torch.float32)
        key_gradient = torch.zeros_like(keys, dtype=torch.float32)
        value_gradient = torch.zeros_like(values, dtype=torch.float32)
        for block in _get_blocks(ctx.chunks, ctx.pattern, query.device):
            rows = block.rows
            saved = (gradient[:, :, rows], query[:, :, rows], output[:, :, rows], normalizer[:, :, rows])
            parts = _attend_backward(*saved, keys, values, block, ctx.scale)
            query_gradient[:, :, rows] += parts[0]
            key_gradient[:, :, block.keys] += parts[1]
            value_gradient[:, :, block.keys] += parts[2]
        sink_gradient = None
        if sinks is not None:
            share = (sinks.float()[:, None] - normalizer).exp_()
            sink_gradient = -(share * (gradient * output).sum(-1, dtype=torch.float32)).sum((0, 2)).to(sinks.dtype)
        scattered = _scatter(key_gradient, value_gradient, key.dtype, ctx.group)
        return query_gradient.to(query.dtype), *scattered, sink_gradient, None, None, None, None


def _get_blocks(chunks: tuple[Chunk, ...], pattern: Pattern, device: torch.device) -> Iterator[_Block]:
    first_row = 0
    for chunk in chunks:
        if pattern.documents is None and (pattern.window is None or pattern.window >= chunk.end):
            rows = slice(first_row, first_row + chunk.length)
            if chunk.start:
                yield _Block(rows, slice(0, chunk.start))
            yield _Block(rows, slice(chunk.start, chunk.end), is_causal=True)
        else:
            yield from _get_masked_blocks(chunk, first_row, pattern, device)
        first_row += chunk.length


def _get_masked_blocks(chunk: Chunk, first_row: int, pattern: Pattern, device: torch.device) -> Iterator[_Block]:
    window = pattern.window or chunk.end
    # with few rows little is computed outside of the window, with many the device is busy
    size = min(_MASKED_ROWS, max(window // 4, 64))
    for start in range(chunk.start, chunk.end, size):
        end = min(start + size, chunk.end)
        first_key, offset = max(0, start - window + 1), first_row - chunk.start
        mask = _make_mask(start, end, first_key, window, pattern.documents, device)
        yield _Block(slice(start + offset, end + offset), slice(first_key, end), mask=mask)


def _make_mask(
    start: int, end: int, first_key: int, window: int, documents: Tensor | None, device: torch.device
) -> Tensor:
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(first_key, end, device=device)
    mask = ((distance >= 0) & (distance < window))[None, None]
    if documents is not None:
        mask = mask & (documents[:, start:end, None] == documents[:, None, first_key:end])[:, None]
    return mask


def _attend(query: Tensor, keys: Tensor, values: Tensor, block: _Block, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result of one block, [batch, heads, rows, value dim], and its normalizer, [batch, heads, rows]."""
    inputs = _match_heads(query, keys, values, block)
    output, normalizer = attend(*inputs, is_causal=block.is_causal, mask=block.mask, scale=scale)
    return output.reshape(*query.shape[:-1], -1), normalizer.reshape(query.shape[:-1])


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    output: Tensor,
    normalizer: Tensor,
    keys: Tensor,
    values: Tensor,
    block: _Block,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the block's summands of the gradients of its queries, keys and values."""
    folded, key, value = _match_heads(query, keys, values, block)
    shape = folded.shape[:-1]
    gradients = attend_backward(
        gradient.reshape(*shape, -1),
        folded,
        key,
        value,
        output.reshape(*shape, -1),
        normalizer.reshape(shape),
        is_causal=block.is_causal,
        mask=block.mask,
        scale=scale,
    )
    heads = keys.size(1)
    summed = (part.unflatten(1, (heads, -1)).sum(2) if part.size(1) != heads else part for part in gradients[1:])
    return gradients[0].reshape(query.shape), *summed


def _match_heads(query: Tensor, keys: Tensor, values: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """Take the block's keys and values, with as many heads as the queries have.

    Where all queries see all keys, the queries of the heads that share a key are just more queries. Elsewhere the block
    is small, and its keys are repeated.
    """
    key, value = keys[:, :, block.keys], values[:, :, block.keys]
    heads = keys.size(1)
    if query.size(1) == heads:
        return query, key, value
    if not block.is_causal and block.mask is None:
        return query.reshape(query.size(0), heads, -1, query.size(-1)), key, value
    shared = query.size(1) // heads
    return query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)


def _gather(key: Tensor, value: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Put the chunks of all ranks in the sequence's order."""
    if group is None:
        return key, value
    gathered = all_gather_tensor(torch.cat([key, value], -1).movedim(2, 0), 0, group)
    chunks = gathered.chunk(2 * group.size())
    ordered = torch.cat([*chunks[::2], *chunks[:0:-2]]).movedim(0, 2)
    return ordered.split([key.size(-1), value.size(-1)], -1)


def _scatter(key: Tensor, value: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Sum the gradients of what :func:`_gather` returned over the ranks, and take those of this rank's chunks.

    Each rank sends its summands, rounded once, and adds up what it receives in float32: a reduce-scatter of as many
    bytes would round every sum of two, which shows from 16 ranks on.
    """
    if group is None:
        return key.to(dtype), value.to(dtype)
    ranks = group.size()
    chunks = torch.cat([key, value], -1).to(dtype).movedim(2, 0).chunk(2 * ranks)
    ordered = torch.stack([torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)])
    own = all_to_all_tensor(ordered, group).sum(0, dtype=torch.float32).to(dtype).movedim(0, 2)
    return own.split([key.size(-1), value.size(-1)], -1)
