"""Blocks of queries and keys, into which attention is divided so that fused kernels can compute it.

There are two types of blocks:

- In a *dense* block, every query sees all keys of the block, or the n-th query sees the first n keys, or a mask says
  which keys each query sees.
- A block of *segments* is for packed documents and sliding windows. A segment is a run of consecutive queries, together
  with the keys that these queries may see. Variable-length attention kernels take the segments of a block in one call.
  They skip all query-key pairs that attention does not need, for any number of documents and any window.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_MASKED_ROWS = 512
"""Largest number of queries in a block with a mask. A mask takes one byte for each pair of a query and a key."""


@dataclass(frozen=True)
class Documents:
    """Documents in the sequences of a batch. Only positions of the same document see each other."""

    starts: tuple[tuple[int, ...], ...] | None
    """Start positions of the documents in each sequence; the first one is 0. None if the positions of some document are
    not consecutive."""

    numbers: Tensor | None
    """[batch, whole sequence]: document number of each position. None if ``starts`` is given."""


def find_documents(numbers: Tensor, device: torch.device) -> Documents:
    """Find the documents in the sequences of a batch, given the document number of each position.

    Args:
        numbers: [batch, sequence], document number of each position, in host memory.
        device: Device on which attention will be computed.
    """
    starts = []
    for row in numbers:
        borders = [0, *(row.diff().nonzero().flatten() + 1).tolist()]
        if len(set(row[borders].tolist())) < len(borders):
            return Documents(None, numbers.to(device))
        starts.append(tuple(borders))
    return Documents(tuple(starts), None)


@dataclass(frozen=True)
class Pattern:
    """Rule for the keys that a query sees: keys in its own document, inside its window, and not after the query."""

    window: int | None = None
    """Largest number of keys that a query sees, including its own. None if there is no limit."""

    documents: Documents | None = None
    """Documents in the sequences. None if each sequence is one document."""


@dataclass(frozen=True)
class Chunk:
    """Contiguous part of a sequence, with the positions ``start`` to ``start + length - 1``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Mask:
    """Mask of a dense block. The mask tensor is built for each use, and is not kept in memory."""

    first: int
    """Position of the block's first query, counted from the same origin as the positions of the keys."""

    window: int
    numbers: Tensor | None = None
    """[batch, sequence], see :attr:`Documents.numbers`. None if each sequence is one document."""

    def make(self, rows: int, keys: slice, device: torch.device) -> Tensor:
        """Build the mask tensor: [1 or batch, 1, rows, keys], bool, True where a query sees a key.

        Args:
            rows: Number of queries.
            keys: Positions of the keys.
            device: Device of the mask tensor.
        """
        queries = slice(self.first, self.first + rows)
        distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
        distance = distance - torch.arange(keys.start, keys.stop, device=device)
        mask = ((distance >= 0) & (distance < self.window))[None, None]
        if self.numbers is not None:
            mask = mask & (self.numbers[:, queries, None] == self.numbers[:, None, keys])[:, None]
        return mask


@dataclass(frozen=True)
class DenseBlock:
    """Block of queries, together with the range of keys that they may see.

    Every query sees all of these keys, or the n-th query sees the first n, or ``mask`` says which keys each query sees.
    """

    rows: slice
    """Queries of the block, as indices among the rank's queries."""

    keys: slice
    """Keys of the block, as positions of the whole sequence."""

    is_causal: bool = False
    """Whether the n-th query sees the first n keys."""

    mask: Mask | None = None


@dataclass(frozen=True)
class SegmentBlock:
    """Block of segments, which are adjacent in memory. The queries of a segment only see keys of this segment.

    The last query of a segment sees all keys of the segment, the query before it sees all keys except the last one, and
    so on. A window may further limit the number of keys. Values that change with each batch are in tensors, so that
    ``torch.compile`` does not compile them as constants.
    """

    rows: slice
    """Queries of the block, as indices among the rank's queries."""

    key_end: int
    """End of the range of keys that the block may need. It is the same in every sequence."""

    key_starts: Tensor
    """[batch], int64, in host memory: the position of the first key that the block needs in each sequence."""

    query_ends: Tensor
    """[segments + 1], int32: 0, followed by the cumulative number of queries up to the end of each segment."""

    key_ends: Tensor
    """[segments + 1], int32: 0, followed by the cumulative number of needed keys up to the end of each segment."""

    most_queries: int
    """Largest number of queries in a segment."""

    most_keys: int
    """Largest number of keys in a segment."""

    window: int | None
    pairs: int
    """Number of pairs of a query and a key that attention computes per head, in all sequences together."""


Block = DenseBlock | SegmentBlock


def get_head_tail_chunks(length: int, rank: int, ranks: int) -> tuple[Chunk, Chunk]:
    """Return a rank's two chunks of a sequence: one from the first half, and its mirror image from the second half.

    The sequence is divided into ``2 * ranks`` chunks of equal size. In causal attention, late queries see more keys
    than early queries. Pairs of an early and a late chunk give all ranks the same amount of work.
    """
    size = length // (2 * ranks)
    return Chunk(rank * size, size), Chunk((2 * ranks - 1 - rank) * size, size)


def get_blocks(
    chunks: tuple[Chunk, ...], pattern: Pattern, *, batch_size: int, device: torch.device
) -> tuple[Block, ...]:
    """Return the blocks that compute attention for all queries in ``chunks``.

    Args:
        chunks: Chunks of the sequence that hold the rank's queries, in the order of the queries.
        pattern: Rule for the keys that a query sees.
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
    """Divide queries into small blocks, each with a mask and with only the keys that are inside the queries' windows.

    Args:
        rows: Queries to divide, as a slice of the rank's queries.
        first: Position of the first query, counted from the same origin as the positions of the keys.
        window: Largest number of keys that a query sees, including its own.
        first_key: Position of the first key that the queries may see. Earlier keys belong to other segments.
        numbers: [batch, sequence], see :attr:`Documents.numbers`. None if each sequence is one document.
    """
    # a compromise: small blocks waste less work on keys outside the window, and large blocks keep the device busy
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
    """Return the number of query-key pairs that attention computes for a range of a document's queries.

    Args:
        begin: Index, within the document, of the first query in the range.
        end: One more than the index, within the document, of the last query in the range.
        window: Largest number of keys that a query sees, including its own. None if there is no limit.
    """
    if window is None:
        return (begin + 1 + end) * (end - begin) // 2
    growing = slice(min(begin, window), min(end, window))  # queries that see all earlier keys of the document
    seen = (growing.start + 1 + growing.stop) * (growing.stop - growing.start) // 2
    return seen + window * (end - begin - (growing.stop - growing.start))


def _send(numbers: list[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int32)
    # pin the memory, so that the CPU does not wait for the copy to the device
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
