"""What the queries of a part of a sequence see, cut into blocks that fused attention computes.

A block is a few queries and a few keys. In a *dense* block all queries see all keys, or the n-th query the first n of
them, or a mask says what is seen. A block of *segments* is many pieces at once, each with keys of its own, as kernels
for sequences of various lengths take them: documents that are packed into a sequence, windows, or both. Such a block
computes exactly the pairs that are seen, in one call of such a kernel, however many documents there are and however
small the window.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_MASKED_ROWS = 512
"""Most queries of a block with a mask: a mask has a byte for each of them and each key."""


@dataclass(frozen=True)
class Documents:
    """Which positions of sequences see each other: those of one document."""

    starts: tuple[tuple[int, ...], ...] | None
    """Where documents begin, for each sequence, the first at 0; None where one consists of several runs."""

    numbers: Tensor | None
    """[batch, sequence] of the whole sequence, a number for each document, in that case."""


def find_documents(numbers: Tensor, device: torch.device) -> Documents:
    """Return the documents of ``numbers``, [batch, sequence], in host memory, for queries on a device."""
    starts = []
    for row in numbers:
        borders = [0, *(row.diff().nonzero().flatten() + 1).tolist()]
        if len(set(row[borders].tolist())) < len(borders):
            return Documents(None, numbers.to(device))
        starts.append(tuple(borders))
    return Documents(tuple(starts), None)


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees: those not after it, of its document, and not further than the window before it."""

    window: int | None = None
    """How many keys a query sees at most, itself included; None for all."""

    documents: Documents | None = None
    """None for one document."""


@dataclass(frozen=True)
class Chunk:
    """A part of a sequence: positions ``start`` to ``start + length``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Mask:
    """What is seen in a block, of which nothing is kept."""

    first: int
    """Where the first query is, counted as the keys are."""

    window: int
    numbers: Tensor | None = None
    """[batch, sequence]: as those of :class:`Documents`. None for one document."""

    def make(self, rows: int, keys: slice, device: torch.device) -> Tensor:
        """Return what ``rows`` queries see of the keys. [1 or batch, 1, rows, keys], bool."""
        queries = slice(self.first, self.first + rows)
        distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
        distance = distance - torch.arange(keys.start, keys.stop, device=device)
        mask = ((distance >= 0) & (distance < self.window))[None, None]
        if self.numbers is not None:
            mask = mask & (self.numbers[:, queries, None] == self.numbers[:, None, keys])[:, None]
        return mask


@dataclass(frozen=True)
class DenseBlock:
    """Queries and keys of which every pair is computed, or every pair of a triangle."""

    rows: slice
    """Its queries, among those of the rank."""

    keys: slice
    """Positions of the whole sequence."""

    is_causal: bool = False
    """Whether the n-th query sees the first n keys."""

    mask: Mask | None = None


@dataclass(frozen=True)
class SegmentBlock:
    """Pieces of sequences, one after the other in memory: queries of each see keys of its own.

    The last query of a segment sees its last key, the one before sees all but that, and so on; and none more than the
    window. What changes from batch to batch is in tensors, and in numbers that compiled code need not know.
    """

    rows: slice
    """Its queries, among those of the rank."""

    key_end: int
    """The keys that it may need of each sequence are those before."""

    key_starts: Tensor
    """[batch], int64, in host memory: the first key that is needed of each sequence."""

    query_ends: Tensor
    """[segments + 1], int32: a zero, and where the queries of each segment end."""

    key_ends: Tensor
    """The same of the keys that are needed."""

    most_queries: int
    most_keys: int
    """Numbers of queries and of keys of the largest segments."""

    window: int | None
    pairs: int
    """Number of pairs of a query and a key that are seen, of all sequences, for each head."""


Block = DenseBlock | SegmentBlock


def get_head_tail_chunks(length: int, rank: int, ranks: int) -> tuple[Chunk, Chunk]:
    """Cut a sequence into ``2 * ranks`` chunks, of which a rank takes one from the head and one from the tail.

    Causal attention is then the same work for all ranks: the n-th query has n keys.
    """
    size = length // (2 * ranks)
    return Chunk(rank * size, size), Chunk((2 * ranks - 1 - rank) * size, size)


def get_blocks(
    chunks: tuple[Chunk, ...], pattern: Pattern, *, batch_size: int, device: torch.device
) -> tuple[Block, ...]:
    """Return the blocks of the queries of ``chunks``.

    Args:
        chunks: Which positions the queries have, in their order.
        pattern: Which keys they see.
        batch_size: Number of sequences.
        device: Of the queries.
    """
    blocks: list[Block] = []
    first_row = 0
    for chunk in chunks:
        rows = slice(first_row, first_row + chunk.length)
        sees_all = pattern.window is None or pattern.window >= chunk.end
        if pattern.documents is None and sees_all:
            blocks += _get_causal_blocks(chunk, rows)
        elif pattern.documents is not None and pattern.documents.starts is None:
            window, numbers = pattern.window or chunk.end, pattern.documents.numbers
            blocks += get_masked_blocks(rows, chunk.start, window, numbers=numbers)
        else:
            starts = ((0,),) * batch_size if pattern.documents is None else pattern.documents.starts
            blocks.append(_get_segment_block(chunk, rows, None if sees_all else pattern.window, starts or (), device))
        first_row += chunk.length
    return tuple(blocks)


def _get_causal_blocks(chunk: Chunk, rows: slice) -> Iterator[DenseBlock]:
    if chunk.start:
        yield DenseBlock(rows, slice(0, chunk.start))
    yield DenseBlock(rows, slice(chunk.start, chunk.end), is_causal=True)


def get_masked_blocks(
    rows: slice, first: int, window: int, *, first_key: int = 0, numbers: Tensor | None = None
) -> Iterator[DenseBlock]:
    """Cut queries into a few at a time, each with the keys that their windows reach.

    Args:
        rows: The queries.
        first: Where the first of them is, counted as the keys are.
        window: How many keys a query sees at most, itself included.
        first_key: Keys before are of others.
        numbers: As those of :class:`Documents`.
    """
    # with few rows little is computed outside of the window, with many the device is busy
    size = min(_MASKED_ROWS, max(window // 4, 64))
    for start in range(rows.start, rows.stop, size):
        end = min(start + size, rows.stop)
        position = first + start - rows.start
        keys = slice(max(first_key, position - window + 1), position + end - start)
        yield DenseBlock(slice(start, end), keys, mask=Mask(position, window, numbers))


def _get_segment_block(
    chunk: Chunk, rows: slice, window: int | None, starts: tuple[tuple[int, ...], ...], device: torch.device
) -> SegmentBlock:
    query_ends, key_ends, key_starts, pairs = [0], [0], [], 0
    for of_sequence in starts:
        key = None
        borders = [start for start in of_sequence if chunk.start < start < chunk.end]
        for begin, end in pairwise([chunk.start, *borders, chunk.end]):
            document = of_sequence[bisect_right(of_sequence, begin) - 1]
            first_key = document if window is None else max(document, begin - window + 1)
            if key is None:
                key = first_key
                key_starts.append(key)
            query_ends.append(query_ends[-1] + end - begin)
            key_ends.append(key_ends[-1] + end - first_key)
            pairs += _count_pairs(begin - document, end - document, window)
    most_queries, most_keys = (max(end - start for start, end in pairwise(ends)) for ends in (query_ends, key_ends))
    return SegmentBlock(
        rows,
        chunk.end,
        torch.tensor(key_starts),
        _send(query_ends, device),
        _send(key_ends, device),
        most_queries,
        most_keys,
        window,
        pairs,
    )


def _count_pairs(begin: int, end: int, window: int | None) -> int:
    """Return how many keys the queries ``begin`` to ``end`` of a document see together."""
    if window is None:
        return (begin + 1 + end) * (end - begin) // 2
    growing = slice(min(begin, window), min(end, window))  # queries that see all before them
    seen = (growing.start + 1 + growing.stop) * (growing.stop - growing.start) // 2
    return seen + window * (end - begin - (growing.stop - growing.start))


def _send(numbers: list[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int32)
    # from pinned memory the host need not wait for the copy
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
