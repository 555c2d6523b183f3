"""Attention block by block: against one softmax over all keys, and no work that a mask throws away."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.devices import NEEDS_GPU
from helpers.ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fsdp2.parallel.context.attention_blocks import (
    Block,
    Chunk,
    Pattern,
    SegmentBlock,
    find_documents,
    get_blocks,
    get_head_tail_chunks,
)
from lightning_fsdp2.parallel.context.block_attention import block_attention
from lightning_fsdp2.plan.simulation.flops import get_optional_flop_formula

LENGTH = 48
SCALE = 0.3
BATCH = 2

DOCUMENTS = torch.stack([torch.arange(LENGTH) // 7, torch.arange(LENGTH) // 20])

SCATTERED = torch.stack([torch.arange(LENGTH) // 7 % 3, torch.arange(LENGTH) // 20])
"""Documents of which one is in several runs, as tokens around a hole of padding are."""

PATTERNS: dict[str, tuple[int | None, Tensor | None]] = {
    "causal": (None, None),
    "window": (5, None),
    "window-of-one": (1, None),
    "window-beyond-the-sequence": (100, None),
    "documents": (None, DOCUMENTS),
    "documents+window": (9, DOCUMENTS),
    "scattered-documents": (None, SCATTERED),
    "scattered-documents+window": (9, SCATTERED),
}
"""Window, and the documents' numbers."""

CPU = torch.device("cpu")


def make_blocks(
    pattern: str, chunks: tuple[Chunk, ...], *, batch_size: int = BATCH, device: torch.device = CPU
) -> tuple[Block, ...]:
    window, numbers = PATTERNS[pattern]
    documents = None if numbers is None else find_documents(numbers[:batch_size], device)
    return get_blocks(chunks, Pattern(window, documents), batch_size=batch_size, device=device)


HEADS = {"equal": (4, 4, 8, 8), "grouped": (4, 2, 8, 8), "one-key-head": (4, 1, 8, 8), "narrow-values": (4, 4, 8, 4)}
"""Query heads, key-value heads, dim, value dim."""


def make_inputs(heads: str, *, with_sinks: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    query_heads, key_heads, size, value_size = HEADS[heads]
    torch.manual_seed(0)
    inputs = [
        torch.randn(BATCH, query_heads, LENGTH, size),
        torch.randn(BATCH, key_heads, LENGTH, size),
        torch.randn(BATCH, key_heads, LENGTH, value_size),
    ]
    if with_sinks:
        inputs.append(torch.randn(query_heads))
    return [tensor.to(dtype).requires_grad_() for tensor in inputs]


def attend_at_once(pattern: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
    """One softmax over all keys, and over the sink where there is one."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(~get_visible(pattern), -torch.inf)
    if sinks is not None:
        scores = torch.cat([sinks[None, :, None, None].expand(*scores.shape[:-1], 1), scores], -1)
        return scores.softmax(-1)[..., 1:] @ value
    return scores.softmax(-1) @ value


def get_visible(pattern: str) -> Tensor:
    """[1 or batch, 1, queries, keys]."""
    window, numbers = PATTERNS[pattern]
    positions = torch.arange(LENGTH)
    distance = positions[:, None] - positions
    visible = ((distance >= 0) & (distance < (window or LENGTH)))[None, None]
    if numbers is not None:
        visible = visible & (numbers[:, None, :, None] == numbers[:, None, None, :])
    return visible


def get_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(output, inputs, torch.randn(output.shape).to(output)))


def get_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to what is expected, which may be zero: a query that sees itself alone has no gradient."""
    return max(((a - e).abs().max() / e.abs().max().clamp(min=1)).item() for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_process_computes_one_softmax(pattern: str) -> None:
    def run() -> None:
        for heads, with_sinks in itertools.product(HEADS, (False, True)):
            check_one_softmax(pattern, heads, with_sinks)

    run_ranks(run, 1, group=False)


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=NEEDS_GPU) for dtype in (torch.float32, torch.bfloat16)], ids=str
)
def test_gpus_compute_one_softmax(dtype: torch.dtype) -> None:
    def run() -> None:
        for pattern, heads, with_sinks in itertools.product(PATTERNS, HEADS, (False, True)):
            check_one_softmax(pattern, heads, with_sinks, "cuda", dtype)

    run_ranks(run, 1, group=False)


def check_one_softmax(
    pattern: str, heads: str, with_sinks: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    inputs = [
        tensor.detach().to(device).requires_grad_() for tensor in make_inputs(heads, with_sinks=with_sinks, dtype=dtype)
    ]
    exact = [tensor.detach().float().cpu().requires_grad_() for tensor in inputs]
    expected = attend_at_once(pattern, *exact)
    blocks = make_blocks(pattern, (Chunk(0, 12), Chunk(12, LENGTH - 12)), device=torch.device(device))
    sinks = inputs[3] if with_sinks else None
    output = block_attention(*inputs[:3], blocks=blocks, scale=SCALE, sinks=sinks)
    actual = [tensor.float().cpu() for tensor in (output, *get_gradients(output, inputs))]
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    error = get_error(actual, [expected, *get_gradients(expected, exact)])
    assert error < tolerance, (pattern, heads, with_sinks)


@pytest.mark.guarantees("context-parallel-attention")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_hold_head_and_tail_compute_one_softmax(ranks: int) -> None:
    def check(pattern: str) -> None:
        group = torch.distributed.group.WORLD
        whole = make_inputs("grouped", with_sinks=True)
        expected = attend_at_once(pattern, *whole)
        gradients = get_gradients(expected, whole)
        chunks = get_head_tail_chunks(LENGTH, group.rank(), ranks)
        rows = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        own = [tensor.detach()[:, :, rows].requires_grad_() for tensor in whole[:3]]
        sinks = whole[3].detach().requires_grad_()
        blocks = make_blocks(pattern, chunks)
        output = block_attention(*own, blocks=blocks, scale=SCALE, sinks=sinks, group=group)
        assert get_error([output], [expected[:, :, rows]]) < 3e-6
        torch.manual_seed(1)
        grad = torch.randn(expected.shape)[:, :, rows]
        *actual, sink_gradient = torch.autograd.grad(output, [*own, sinks], grad)
        assert get_error(actual, [gradient[:, :, rows] for gradient in gradients[:3]]) < 3e-6
        torch.distributed.all_reduce(sink_gradient)  # of this rank's queries alone
        assert get_error([sink_gradient], [gradients[3]]) < 3e-6

    def run() -> None:
        for pattern in ("causal", "window", "documents", "documents+window"):
            check(pattern)

    run_ranks(run, ranks)


def test_bfloat16_is_as_exact_as_one_softmax_in_bfloat16() -> None:
    """The merge is in float32: it must not add to the kernel's own rounding."""

    def run() -> None:
        exact = make_inputs("grouped", with_sinks=False)
        expected = attend_at_once("causal", *exact)
        reference = [expected, *get_gradients(expected, exact)]
        errors = []
        for chunks in ((Chunk(0, LENGTH),), (Chunk(0, 12), Chunk(12, 24), Chunk(36, 12))):
            inputs = make_inputs("grouped", with_sinks=False, dtype=torch.bfloat16)
            output = block_attention(*inputs, blocks=make_blocks("causal", chunks), scale=SCALE)
            assert output.dtype == torch.bfloat16
            results = [tensor.float() for tensor in (output, *get_gradients(output, inputs))]
            errors.append([(a - e).norm() / e.norm() for a, e in zip(results, reference, strict=True)])
        for one, several in zip(*errors, strict=True):
            assert several <= 1.25 * one

    run_ranks(run, 1, group=False)


COMPILED = list(itertools.product([torch.float32, torch.bfloat16], ["causal", "window", "documents"]))
FAST = [(torch.bfloat16, "window")]


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in COMPILED],
    ids=str,
)
def test_compiled_code_has_the_same_gradients(dtype: torch.dtype, pattern: str) -> None:
    blocks = make_blocks(pattern, (Chunk(0, 12), Chunk(12, 36)))

    def attend(*inputs: Tensor) -> Tensor:
        return block_attention(*inputs[:3], blocks=blocks, scale=SCALE)

    def run() -> None:
        inputs = make_inputs("grouped", with_sinks=False, dtype=dtype)
        output = attend(*inputs)
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs)
        expected = [output, *get_gradients(output, inputs)]
        assert get_error([compiled, *get_gradients(compiled, inputs)], expected) < 1e-6

    run_ranks(run, 1, group=False)


# ---------------------------------------------------------------------- what is computed, counted


class Calls(TorchDispatchMode):
    """Counts calls of fused attention, and the pairs of a query and a key that each head computes in them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.pairs: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if "attention" in name:
            direction = "backward" if "backward" in name else "forward"
            names = [argument.name for argument in function._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self.calls[direction] += 1
            self.pairs[direction] += count_called_pairs(given)
        return function(*args, **(kwargs or {}))


def count_called_pairs(given: dict[str, Any]) -> int:
    if "query_ends" in given:
        return count_pairs_of_segments(given["query_ends"], given["key_ends"], given["window"])
    query, key = given["query"], given["key"]
    queries, keys = query.size(-2), key.size(-2)
    return query.size(0) * (queries * (queries + 1) // 2 if given.get("is_causal", False) else queries * keys)


def count_pairs_of_segments(query_ends: Tensor, key_ends: Tensor, window: int | None) -> int:
    """What queries see that are the last of as many keys, one by one."""
    pairs = 0
    for queries, keys in zip(query_ends.diff().tolist(), key_ends.diff().tolist(), strict=True):
        seen = torch.arange(keys - queries, keys) + 1
        pairs += int(seen.clamp(max=window or keys).sum())
    return pairs


def count_calls(pattern: str, chunks: tuple[Chunk, ...]) -> Calls:
    rows = sum(chunk.length for chunk in chunks)
    torch.manual_seed(0)
    query, key = (torch.randn(BATCH, 2, length, 8, requires_grad=True) for length in (rows, LENGTH))
    with Calls() as calls:
        block_attention(query, key, key, blocks=make_blocks(pattern, chunks), scale=1.0).sum().backward()
    return calls


SPLITS: dict[str, tuple[Chunk, ...]] = {
    **{f"allgather, rank {rank} of {ranks}": get_head_tail_chunks(LENGTH, rank, ranks) for ranks in (2, 4, 8)
       for rank in range(ranks)},
    "ulysses": (Chunk(0, LENGTH),),
}  # fmt: skip


@pytest.mark.guarantees("equal-work")
@pytest.mark.parametrize("split", SPLITS)
def test_every_rank_computes_what_its_queries_see_in_few_calls(split: str) -> None:
    chunks = SPLITS[split]
    rows = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
    without_window = count_calls("causal", chunks)
    for pattern in ("causal", "window", "window-of-one", "documents", "documents+window"):
        visible = int(get_visible(pattern).expand(BATCH, 1, -1, -1)[:, :, rows].sum())
        calls = count_calls(pattern, chunks)
        for direction in ("forward", "backward"):
            assert calls.pairs[direction] == visible, (pattern, direction)
            assert calls.calls[direction] <= 2 * without_window.calls[direction], (pattern, direction)


@pytest.mark.guarantees("skipped-keys")
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("window", "document"), [(128, None), (None, 4096), (4096, 4096), (1024, 5000)])
def test_long_sequences_cost_what_is_seen(ranks: int, window: int | None, document: int | None) -> None:
    """Of 131,072 tokens: the window of gpt-oss, and documents of about 4,000 tokens."""
    length = 131072
    positions = torch.arange(length)
    in_document = positions if document is None else positions % document
    seen = (in_document + 1).clamp(max=window or length)
    documents = None if document is None else find_documents((positions // document)[None], CPU)
    for rank in range(ranks):
        for chunks in (get_head_tail_chunks(length, rank, ranks), (Chunk(0, length),)):
            blocks = get_blocks(chunks, Pattern(window, documents), batch_size=1, device=CPU)
            visible = sum(int(seen[chunk.start : chunk.end].sum()) for chunk in chunks)
            assert len(blocks) == len(chunks)
            pairs = 0
            for block in blocks:
                assert isinstance(block, SegmentBlock)
                pairs += count_pairs_of_segments(block.query_ends, block.key_ends, block.window)
                assert block.pairs <= pairs
            assert pairs == visible == sum(block.pairs for block in blocks)


def test_a_plan_knows_the_products_of_segments() -> None:
    (block,) = make_blocks("documents+window", (Chunk(12, 24),))
    assert isinstance(block, SegmentBlock)
    pairs = int(get_visible("documents+window")[:, :, 12:36].sum())
    query, key, value = torch.zeros(48, 4, 8), torch.zeros(2, 36, 2, 8), torch.zeros(2, 36, 2, 6)
    arguments = (block.key_starts, block.query_ends, block.key_ends, 1, 1, 9, 1.0, block.pairs)
    forward = get_optional_flop_formula(torch.ops.lightning_fsdp2.segment_attention.default)
    backward = get_optional_flop_formula(torch.ops.lightning_fsdp2.segment_attention_backward.default)
    assert forward is not None
    assert backward is not None
    assert forward(query, key, value, *arguments, out_val=None) == 2 * pairs * 4 * (8 + 6)
    saved = (query, query, key, value, query, query)
    assert backward(*saved, *arguments, out_val=None) == 2 * pairs * 4 * (3 * 8 + 2 * 6)


@pytest.mark.guarantees("nothing-whole-is-kept")
def test_nothing_of_the_whole_sequence_is_kept_for_backward() -> None:
    def run() -> None:
        group = torch.distributed.group.WORLD
        chunks = get_head_tail_chunks(LENGTH, group.rank(), 2)
        own = [
            tensor.detach()[:, :, : LENGTH // 2].requires_grad_() for tensor in make_inputs("equal", with_sinks=False)
        ]
        saved: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = block_attention(*own, blocks=make_blocks("causal", chunks), scale=SCALE, group=group)
        assert output.transpose(1, 2).is_contiguous()  # or the model would copy it, and keep that
        assert max(saved) <= max(tensor.untyped_storage().nbytes() for tensor in own)
        # queries, keys, values, the result and a number per query and head
        assert len(saved) == 5

    run_ranks(run, 2)
