"""The keys that the queries of a part of a sequence see, cut into blocks that fused attention computes.

A block has some queries and some keys. In a *dense* block all queries see all keys, or the n-th query sees the first n
keys, or a mask says which keys are seen. A block of *segments* has many pieces at once, each with its own keys, as
kernels for sequences of various lengths take them: documents that are packed into a sequence, windows, or both. Such a
block computes exactly the pairs that are seen, in one kernel call, no matter how many documents there are and how small
the window is.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_MASKED_ROWS = 512
"""Largest number of queries of a block with a mask. A mask has a byte for each pair of a query and a key."""


@dataclass(frozen=True)
class Documents:
    """The documents of sequences. Only positions of the same document see each other."""

    starts: tuple[tuple[int, ...], ...] | None
    """Positions where each sequence's documents begin, the first at 0. None if a document consists of several runs."""

    numbers: Tensor | None
    """[batch, whole sequence]: the number of each position's document. None unless ``starts`` is None."""


def find_documents(numbers: Tensor, device: torch.device) -> Documents:
    """Return the documents with these ``numbers``, [batch, sequence] in host memory, for queries on ``device``."""
    starts = []
    for row in numbers:
        borders = [0, *(row.diff().nonzero().flatten() + 1).tolist()]
        if len(set(row[borders].tolist())) < len(borders):
            return Documents(None, numbers.to(device))
        starts.append(tuple(borders))
    return Documents(tuple(starts), None)


@dataclass(frozen=True)
class Pattern:
    """The keys that a query sees: those of its document that are not after it, and not before its window."""

    window: int | None = None
    """Largest number of keys that a query sees, its own included. None for all."""

    documents: Documents | None = None
    """Documents of the sequences. None for one document."""


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
    """The pairs of a block that are seen. The mask tensor is made for each use, and not kept."""

    first: int
    """Position of the first query, counted like the keys."""

    window: int
    numbers: Tensor | None = None
    """[batch, sequence], the numbers of :class:`Documents`. None for one document."""

    def make(self, rows: int, keys: slice, device: torch.device) -> Tensor:
        """Return which keys ``rows`` queries see: [1 or batch, 1, rows, keys], bool."""
        queries = slice(self.first, self.first + rows)
        distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
        distance = distance - torch.arange(keys.start, keys.stop, device=device)
        mask = ((distance >= 0) & (distance < self.window))[None, None]
        if self.numbers is not None:
            mask = mask & (self.numbers[:, queries, None] == self.numbers[:, None, keys])[:, None]
        return mask


@dataclass(frozen=True)
class DenseBlock:
    """Queries and keys of a dense block: every pair of them is computed, or every pair of a triangle."""

    rows: slice
    """Queries of the block, among those of the rank."""

    keys: slice
    """Keys of the block, as positions of the whole sequence."""

    is_causal: bool = False
    """Whether the n-th query sees the first n keys."""

    mask: Mask | None = None


@dataclass(frozen=True)
class SegmentBlock:
    """Segments of sequences, one after the other in memory. The queries of a segment see only keys of that segment.

    The last query of a segment sees the segment's last key and those before, the query before it sees all except that
    key, and so on. No query sees more keys than the window. What changes from batch to batch is held in tensors, and in
    numbers that compiled code need not know.
    """

    rows: slice
    """Queries of the block, among those of the rank."""

    key_end: int
    """End of the keys that the block may need of each sequence."""

    key_starts: Tensor
    """[batch], int64, in host memory: the first key that is needed of each sequence."""

    query_ends: Tensor
    """[segments + 1], int32: a zero, then the end of each segment's queries."""

    key_ends: Tensor
    """[segments + 1], int32: a zero, then the end of each segment's keys, among those that are needed."""

    most_queries: int
    most_keys: int
    """Largest number of keys of a segment; ``most_queries`` is the largest number of queries."""

    window: int | None
    pairs: int
    """Number of pairs of a query and a key that are seen, in all sequences together, for each head."""


Block = DenseBlock | SegmentBlock


def get_head_tail_chunks(length: int, rank: int, ranks: int) -> tuple[Chunk, Chunk]:
    """Return the chunks of ``rank`` among ``2 * ranks`` of a sequence: one from its head and one from its tail.

    Causal attention, where the n-th query has n keys, is then the same work for all ranks.
    """
    size = length // (2 * ranks)
    return Chunk(rank * size, size), Chunk((2 * ranks - 1 - rank) * size, size)


def get_blocks(
    chunks: tuple[Chunk, ...], pattern: Pattern, *, batch_size: int, device: torch.device
) -> tuple[Block, ...]:
    """Return the blocks of the queries of ``chunks``.

    Args:
        chunks: Positions of the queries, in the order of the queries.
        pattern: Keys that the queries see.
        batch_size: Number of sequences.
        device: Device of the queries.
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
    """Cut queries into blocks of a few queries, each with the keys that their windows reach.

    Args:
        rows: Queries to cut, among those of the rank.
        first: Position of the first query, counted like the keys.
        window: Largest number of keys that a query sees, its own included.
        first_key: First key that the queries may see; earlier keys belong to other segments.
        numbers: [batch, sequence], the numbers of :class:`Documents`. None for one document.
    """
    # few rows compute little outside of the window, many rows keep the device busy
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
    """Return the numbers of keys that the queries ``begin`` to ``end`` of a document see, added up."""
    if window is None:
        return (begin + 1 + end) * (end - begin) // 2
    growing = slice(min(begin, window), min(end, window))  # queries that see all keys before them
    seen = (growing.start + 1 + growing.stop) * (growing.stop - growing.start) // 2
    return seen + window * (end - begin - (growing.stop - growing.start))


def _send(numbers: list[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int32)
    # from pinned memory the host need not wait for the copy
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
