"""Estimate of all the memory that a process holds on its device, which is more than its tensors need.

torch's allocator reserves segments of memory, hands out blocks of them, and rarely frees a segment
(https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management). How much memory it reserves depends on the
order of allocations. The allocations of the step are therefore replayed under the allocator's own rules. The memory of
libraries is taken from published measurements:

    Libraries and CUDA's context: 1.06 GB on an H100 before the first all-to-all, without torch's allocations
        (https://github.com/NVIDIA/nccl/issues/1685). Half of that if CUDA's lazily loaded code is not counted.
    NCCL: 544 MB for a group of two ranks and 688 MB for a larger group, on A100s connected by NVLink
        (https://github.com/NVIDIA/nccl/issues/964). An all-to-all of eight H100s connects every pair of ranks and takes
        3.28 GB (https://github.com/NVIDIA/nccl/issues/1685).
    cuBLAS: a workspace of 32 MiB on Hopper (torch's notes on CUDA, ``CUBLAS_WORKSPACE_CONFIG``).
    Attention: the backward of FlashAttention-2 accumulates the gradients of queries in float32.
    Growth: torchtitan's runs A and B (docs/planning.md) reserved 5% and 4% more than the replay predicts. The replay
        models neither freed blocks that still wait for another stream, nor fragmentation over many steps.

Under memory pressure, the allocator frees unused segments before it fails, so a run may succeed with less memory.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_fsdp2.plan.simulation.recorder import COMMUNICATION_BUFFERS, MemoryChange, Operation, Recording

_MIB = 2**20

_CONTEXT = int(0.5e9), int(1.06e9)
_GROUP = int(544e6), int(688e6)
_ALL_TO_ALL = int(3.28e9)
_CUBLAS_WORKSPACE = 32 * _MIB

_GROWTH = 1.1
"""Factor that enlarges the segments to allow for what the replay does not model. It adds twice the measured growth."""

_ROUNDING = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LARGE = 10 * _MIB
"""Sizes from ``c10/core/AllocatorConfig.h``: requests up to ``_SMALL`` share small segments, those below ``_LARGE``
share large ones, and larger requests get their own segments, rounded up to a multiple of ``_SMALL_SEGMENT``."""


@dataclass(frozen=True)
class Reserved:
    """Range in which the peak of a process's device memory lies, in bytes."""

    least: int
    """Lower end of the range. It assumes that segments have no unused parts, as under memory pressure, and that
    libraries need little."""

    most: int


def estimate_reserved(recording: Recording) -> Reserved:
    """Estimate the peak of the device memory that a process holds in a step.

    Args:
        recording: Recording of the step. Its first changes are the allocations that were made before the step.
    """
    groups = {call.group for call in recording.collectives if len(call.group.ranks) > 1}
    context, group = _CONTEXT, _GROUP
    least = _round_peak(recording.changes) + _CUBLAS_WORKSPACE + context[0] + len(groups) * group[0]
    segments = math.ceil(_GROWTH * play_through(recording.changes))
    most = segments + _CUBLAS_WORKSPACE + context[1] + len(groups) * group[1]
    most += _get_attention_workspace(recording.operations)
    if any(call.kind == "all-to-all" and len(call.group.ranks) > 1 for call in recording.collectives):
        most += _ALL_TO_ALL
    return Reserved(least, most)


def extrapolate_reserved(few: Reserved, more: Reserved, steps: int) -> Reserved:
    """Extrapolate from two short models to one with ``steps`` more blocks than that of ``few``.

    The lower end grows by the same amount with each block. The unused parts of segments do not: they vary from one
    model to the next, and a difference of two of them says nothing about a third. So the larger one is taken, and
    enlarged by what the additional memory may grow in many steps.
    """
    least = few.least + (more.least - few.least) * steps
    unused = max(few.most - few.least, more.most - more.least)
    growth = math.ceil((_GROWTH - 1) * max(0, least - more.least))
    return Reserved(least, least + unused + growth)


def play_through(changes: Iterable[MemoryChange]) -> int:
    """Replay ``changes`` in order, and return the bytes of the segments that torch's allocator would reserve."""
    allocator = _Allocator()
    blocks: dict[int, _Block] = {}
    sizes: dict[int, int] = {}
    for change in changes:
        if change.storage in blocks:
            allocator.free(blocks.pop(change.storage))
        size = sizes[change.storage] = sizes.get(change.storage, 0) + change.bytes
        if size:
            # FSDP2 allocates communication buffers on separate streams, and torch's allocator keeps separate blocks for
            # each stream
            stream = int(change.category == COMMUNICATION_BUFFERS)
            blocks[change.storage] = allocator.allocate(size, stream)
    return allocator.reserved


def _round_peak(changes: Iterable[MemoryChange]) -> int:
    sizes: dict[int, int] = {}
    total = highest = 0
    for change in changes:
        before = sizes.get(change.storage, 0)
        after = sizes[change.storage] = before + change.bytes
        total += _round(after) - _round(before)
        highest = max(highest, total)
    return highest


def _round(size: int) -> int:
    return math.ceil(size / _ROUNDING) * _ROUNDING


def _get_attention_workspace(operations: Iterable[Operation]) -> int:
    backward = [call.attention for call in operations if call.attention is not None and call.attention.is_backward]
    return max((4 * attention.query_elements for attention in backward), default=0)


@dataclass(eq=False)
class _Block:
    """Block of memory: a part of one of the allocator's segments."""

    size: int
    pool: tuple[int, bool]
    """Stream, and whether the segment is for small requests."""

    number: int
    """Place in the order in which blocks were made, which is also the order of their addresses."""

    before: "_Block | None" = None
    after: "_Block | None" = None
    is_free: bool = False


class _Allocator:
    """Model of torch's CUDA allocator.

    Of a stream's free blocks that are large enough, it hands out the smallest.
    The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._numbers = itertools.count()
        self._free: dict[tuple[int, bool], list[tuple[int, int, _Block]]] = {}

    def allocate(self, size: int, stream: int) -> _Block:
        size = max(_round(size), _ROUNDING)
        pool = stream, size <= _SMALL
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size,))
        block = free.pop(place)[2] if place < len(free) else self._make_segment(size, pool)
        block.is_free = False
        rest = block.size - size
        if rest >= _ROUNDING if pool[1] else rest > _SMALL:
            self._split(block, size)
        return block

    def free(self, block: _Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._remove(neighbour)
                self._merge(block, neighbour)
        self._insert(block)

    def _make_segment(self, size: int, pool: tuple[int, bool]) -> _Block:
        if pool[1]:
            segment = _SMALL_SEGMENT
        elif size < _LARGE:
            segment = _LARGE_SEGMENT
        else:
            segment = math.ceil(size / _SMALL_SEGMENT) * _SMALL_SEGMENT
        self.reserved += segment
        return _Block(segment, pool, next(self._numbers))

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.pool, next(self._numbers), before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._insert(rest)

    def _merge(self, block: _Block, neighbour: _Block) -> None:
        block.size += neighbour.size
        if neighbour is block.before:
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block

    def _insert(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free.setdefault(block.pool, []), self._get_entry(block))

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, self._get_entry(block))]

    @staticmethod
    def _get_entry(block: _Block) -> Any:
        return block.size, block.number, block
