"""Part that compares errors of attention in bfloat16 with the errors of a single softmax in bfloat16."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from lightning_fsdp2.compat.attention_kernels import attend, attend_backward
from lightning_fsdp2.parallel.context.attention_blocks import (
    Chunk,
    Pattern,
    find_documents,
    get_blocks,
    get_head_tail_chunks,
)
from lightning_fsdp2.parallel.context.block_attention import block_attention

MOST = 1.25
"""Largest ratio to the distance of one softmax in bfloat16. Tests allow the gradients of a mesh the same ratio."""

HEADS = {"equal": (8, 8), "grouped": (8, 2)}
"""Numbers of query heads and of key-value heads, by name."""

RANKS = (1, 2, 8)
"""Numbers of context parallel ranks. One process computes the chunks of all ranks and puts them together."""

KERNELS, BLOCKS = "attend", "block_attention"


@dataclass(frozen=True)
class Case:
    """An attention call to check."""

    function: str
    pattern: str
    heads: str
    has_sinks: bool = False
    ranks: int = 1


@part("attention", toy=60, real=120)
def compare_attention(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check that a GPU's attention kernels, and the merge of blocks, are as exact as a single softmax in bfloat16.

    Both are compared with float32. If a distance is more than 1.25 times the distance of a single softmax, the inputs
    of the kernels or the merge have a bug. Do not use context parallelism with this pattern until the bug is found.
    """
    length, size = (64, 16) if args.scale == TOY else (2048, 128)
    patterns = build_patterns(length)
    cases = [Case(KERNELS, pattern, heads) for pattern, heads in product(("causal", "window", "packed"), HEADS)]
    cases += [Case(BLOCKS, *values) for values in product(patterns, HEADS, (False, True), RANKS)]
    rows: list[list[Any]] = []
    for case in cases:
        errors = measure_errors(case, patterns[case.pattern], length, size)
        sinks = "sinks" if case.has_sinks else None
        rows.append([case.function, case.pattern, case.heads, sinks, case.ranks, *errors])
        columns = ("function", "pattern", "heads", "sinks", "cp", "output", "/ softmax", "gradients", "/ softmax")
        yield [Table("Largest errors against float32; distances over those of one softmax in bfloat16", columns, rows)]
    wrong = [row[:5] for row in rows if max(row[6], row[8]) > MOST]
    if wrong:
        raise ValueError(f"More than {MOST} times the distance of one softmax in bfloat16: {wrong}.")


@dataclass(frozen=True)
class Seen:
    """Limits on the keys that queries see: the size of a window, and the document of each position."""

    window: int | None = None
    documents: Tensor | None = None


def build_patterns(length: int) -> dict[str, Seen]:
    """Build the patterns of attention to check, by name."""
    documents = torch.arange(length) * 5 // length
    return {
        "causal": Seen(),
        "window": Seen(window=length // 8),
        "packed": Seen(documents=documents),
        "packed, window": Seen(window=length // 8, documents=documents),
    }


def measure_errors(case: Case, pattern: Seen, length: int, size: int) -> list[float]:
    """Return the output's largest error and relative distance to one softmax, then the same for the gradients."""
    inputs = make_inputs(case, length, size)
    expected = compute(inputs, partial(attend_at_once, pattern=pattern, dtype=torch.float32))
    in_bfloat16 = compute(inputs, partial(attend_at_once, pattern=pattern, dtype=torch.bfloat16))
    if case.function == KERNELS:
        actual = compute(inputs, partial(attend_by_kernels, pattern=pattern))
    else:
        actual = compute(inputs, partial(attend_by_ranks, pattern=pattern, ranks=case.ranks))
    measured = []
    for tensors in (slice(0, 1), slice(1, None)):
        results, exact, others = actual[tensors], expected[tensors], in_bfloat16[tensors]
        measured += [get_largest(results, exact), get_distance(results, exact) / get_distance(others, exact)]
    return measured


def make_inputs(case: Case, length: int, size: int) -> list[Tensor]:
    """Make queries, keys, values and possibly sinks in float32, with values that bfloat16 represents exactly."""
    generator = torch.Generator().manual_seed(0)
    heads, key_heads = HEADS[case.heads]
    shapes = [(1, heads, length, size), *[(1, key_heads, length, size)] * 2, *[(heads,)] * case.has_sinks]
    tensors = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    return [tensor.to(get_device_type()).requires_grad_() for tensor in tensors]


def compute(inputs: list[Tensor], attend_by: Callable[..., Tensor]) -> list[Tensor]:
    """Return the output and the gradients of ``inputs``, all in float32."""
    output = attend_by(*inputs).float()
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, *, pattern: Seen, dtype: torch.dtype
) -> Tensor:
    """Compute attention with a single softmax over all keys, and over the sink if there is one."""
    query, key, value = (tensor.to(dtype) for tensor in (query, *repeat_keys(query, key, value)))
    scores = query @ key.transpose(-1, -2) * query.size(-1) ** -0.5
    scores = scores.masked_fill(~get_visible(pattern, query), -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ value
    scores = torch.cat([sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:-1], 1), scores], -1)
    return scores.softmax(-1)[..., 1:] @ value


def attend_by_kernels(query: Tensor, key: Tensor, value: Tensor, *, pattern: Seen) -> Tensor:
    """Compute the device's fused attention, with a mask unless the pattern is purely causal."""
    is_causal = pattern.window is None and pattern.documents is None
    mask = None if is_causal else get_visible(pattern, query)
    inputs = (query, *repeat_keys(query, key, value))
    return _Kernels.apply(*(tensor.bfloat16() for tensor in inputs), mask)  # type: ignore[no-any-return]


def attend_by_ranks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, *, pattern: Seen, ranks: int
) -> Tensor:
    """Compute attention as all ranks of a context parallel group do, after the keys are gathered."""
    length, scale, device = query.size(2), query.size(-1) ** -0.5, query.device
    documents = None if pattern.documents is None else find_documents(pattern.documents[None], device)
    outputs, positions = [], []
    for rank in range(ranks):
        chunks = (Chunk(0, length),) if ranks == 1 else get_head_tail_chunks(length, rank, ranks)
        rows = torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks])
        blocks = get_blocks(chunks, Pattern(pattern.window, documents), batch_size=1, device=device)
        own = (query[:, :, rows].bfloat16(), key.bfloat16(), value.bfloat16())
        outputs.append(block_attention(*own, blocks=blocks, scale=scale, sinks=sinks))
        positions.append(rows)
    return torch.cat(outputs, 2)[:, :, torch.cat(positions).argsort()]


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        ctx.options = {"is_causal": mask is None, "mask": mask, "scale": query.size(-1) ** -0.5}
        output, normalizer = attend(query, key, value, **ctx.options)
        ctx.save_for_backward(query, key, value, output, normalizer)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *attend_backward(gradient, *ctx.saved_tensors, **ctx.options), None


def repeat_keys(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Give keys and values as many heads as the queries have."""
    shared = query.size(1) // key.size(1)
    return key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)


def get_visible(pattern: Seen, query: Tensor) -> Tensor:
    """Return the mask of visible keys: [1, 1, queries, keys], bool."""
    positions = torch.arange(query.size(2), device=query.device)
    distance = positions[:, None] - positions
    visible = ((distance >= 0) & (distance < (pattern.window or len(positions))))[None, None]
    if pattern.documents is None:
        return visible
    documents = pattern.documents.to(query.device)
    return visible & (documents[:, None] == documents)


def get_largest(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error, relative to the largest value of the tensor."""
    pairs = zip(actual, expected, strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def get_distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the root of the sum of squared distances, each relative to the norm of its tensor."""
    pairs = zip(actual, expected, strict=True)
    return sum(((one - other).norm() / other.norm()).item() ** 2 for one, other in pairs) ** 0.5
