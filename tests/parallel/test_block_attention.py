"""Attention block by block: against one softmax over all keys, and no work that a mask throws away."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.devices import NEEDS_GPU
from helpers.ranks import run_ranks
from torch import Tensor

from lightning_fsdp2.parallel import block_attention as attention
from lightning_fsdp2.parallel.block_attention import Chunk, Pattern, block_attention, get_head_tail_chunks

LENGTH = 48
SCALE = 0.3
BATCH = 2

DOCUMENTS = torch.stack([torch.arange(LENGTH) // 7, torch.arange(LENGTH) // 20])

PATTERNS = {
    "causal": Pattern(),
    "window": Pattern(window=5),
    "window-of-one": Pattern(window=1),
    "window-beyond-the-sequence": Pattern(window=100),
    "documents": Pattern(documents=DOCUMENTS),
    "documents+window": Pattern(window=9, documents=DOCUMENTS),
}
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


def attend_at_once(pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
    """One softmax over all keys, and over the sink where there is one."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(~get_visible(pattern), -torch.inf)
    if sinks is not None:
        scores = torch.cat([sinks[None, :, None, None].expand(*scores.shape[:-1], 1), scores], -1)
        return scores.softmax(-1)[..., 1:] @ value
    return scores.softmax(-1) @ value


def get_visible(pattern: Pattern) -> Tensor:
    """[1 or batch, 1, queries, keys]."""
    positions = torch.arange(LENGTH)
    distance = positions[:, None] - positions
    visible = ((distance >= 0) & (distance < (pattern.window or LENGTH)))[None, None]
    if pattern.documents is not None:
        visible = visible & (pattern.documents[:, None, :, None] == pattern.documents[:, None, None, :])
    return visible


def get_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(output, inputs, torch.randn(output.shape).to(output)))


def get_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to what is expected, which may be zero: a query that sees itself alone has no gradient."""
    return max(((a - e).abs().max() / e.abs().max().clamp(min=1)).item() for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_process_computes_one_softmax(pattern: str, heads: str, with_sinks: bool) -> None:
    run_ranks(check_one_softmax, 1, pattern, heads, with_sinks, group=False)


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
    expected = attend_at_once(PATTERNS[pattern], *exact)
    seen = PATTERNS[pattern]
    if seen.documents is not None:
        seen = replace(seen, documents=seen.documents.to(device))
    chunks = (Chunk(0, 12), Chunk(12, LENGTH - 12))
    sinks = inputs[3] if with_sinks else None
    output = block_attention(*inputs[:3], chunks=chunks, pattern=seen, scale=SCALE, sinks=sinks)
    actual = [tensor.float().cpu() for tensor in (output, *get_gradients(output, inputs))]
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    assert get_error(actual, [expected, *get_gradients(expected, exact)]) < tolerance


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", ["causal", "window", "documents+window"])
def test_ranks_that_hold_head_and_tail_compute_one_softmax(pattern: str, ranks: int) -> None:
    def run() -> None:
        group = torch.distributed.group.WORLD
        whole = make_inputs("grouped", with_sinks=True)
        expected = attend_at_once(PATTERNS[pattern], *whole)
        gradients = get_gradients(expected, whole)
        chunks = get_head_tail_chunks(LENGTH, group.rank(), ranks)
        rows = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        own = [tensor.detach()[:, :, rows].requires_grad_() for tensor in whole[:3]]
        sinks = whole[3].detach().requires_grad_()
        output = block_attention(*own, chunks=chunks, pattern=PATTERNS[pattern], scale=SCALE, sinks=sinks, group=group)
        assert get_error([output], [expected[:, :, rows]]) < 3e-6
        torch.manual_seed(1)
        grad = torch.randn(expected.shape)[:, :, rows]
        *actual, sink_gradient = torch.autograd.grad(output, [*own, sinks], grad)
        assert get_error(actual, [gradient[:, :, rows] for gradient in gradients[:3]]) < 3e-6
        torch.distributed.all_reduce(sink_gradient)  # of this rank's queries alone
        assert get_error([sink_gradient], [gradients[3]]) < 3e-6

    run_ranks(run, ranks)


def test_bfloat16_is_as_exact_as_one_softmax_in_bfloat16() -> None:
    """The merge is in float32: it must not add to the kernel's own rounding."""

    def run() -> None:
        exact = make_inputs("grouped", with_sinks=False)
        expected = attend_at_once(Pattern(), *exact)
        reference = [expected, *get_gradients(expected, exact)]
        errors = []
        for chunks in ((Chunk(0, LENGTH),), (Chunk(0, 12), Chunk(12, 24), Chunk(36, 12))):
            inputs = make_inputs("grouped", with_sinks=False, dtype=torch.bfloat16)
            output = block_attention(*inputs, chunks=chunks, pattern=Pattern(), scale=SCALE)
            assert output.dtype == torch.bfloat16
            results = [tensor.float() for tensor in (output, *get_gradients(output, inputs))]
            errors.append([(a - e).norm() / e.norm() for a, e in zip(results, reference, strict=True)])
        for one, several in zip(*errors, strict=True):
            assert several <= 1.25 * one

    run_ranks(run, 1, group=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_code_has_the_same_gradients(dtype: torch.dtype) -> None:
    def attend(*inputs: Tensor) -> Tensor:
        return block_attention(*inputs[:3], chunks=(Chunk(0, 12), Chunk(12, 36)), pattern=Pattern(), scale=SCALE)

    def run() -> None:
        inputs = make_inputs("grouped", with_sinks=False, dtype=dtype)
        output = attend(*inputs)
        compiled = torch.compile(attend, backend="aot_eager")(*inputs)
        expected = [output, *get_gradients(output, inputs)]
        assert get_error([compiled, *get_gradients(compiled, inputs)], expected) < 1e-6

    run_ranks(run, 1, group=False)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_scores_its_share_of_the_causal_pairs_and_no_more(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the kernels, where a causal call of n queries scores n * (n + 1) / 2 pairs."""
    length = 128 * ranks
    all_pairs = length * (length + 1) // 2
    pairs = 0

    def count(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        nonlocal pairs
        queries, keys = query.size(2), key.size(2)
        pairs += queries * (queries + 1) // 2 if is_causal else queries * keys
        return torch.zeros(*query.shape[:-1], value.size(-1)), torch.zeros(query.shape[:-1])

    monkeypatch.setattr(attention, "attend", count)
    for rank in range(ranks):
        pairs = 0
        chunks = get_head_tail_chunks(length, rank, ranks)
        query = torch.zeros(1, 1, length // ranks, 8)
        whole = torch.zeros(1, 1, length, 8)
        block_attention(query, whole, whole, chunks=chunks, pattern=Pattern(), scale=1.0)
        assert pairs == pytest.approx(all_pairs / ranks, rel=0.001)


def test_a_window_is_not_scored_far_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    length, window, pairs = 4096, 512, 0

    def count(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        nonlocal pairs
        pairs += query.size(2) * key.size(2)
        return torch.zeros(*query.shape[:-1], value.size(-1)), torch.zeros(query.shape[:-1])

    monkeypatch.setattr(attention, "attend", count)
    whole = torch.zeros(1, 1, length, 8)
    block_attention(whole, whole, whole, chunks=(Chunk(0, length),), pattern=Pattern(window=window), scale=1.0)
    assert pairs < 1.3 * length * window


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
            output = block_attention(*own, chunks=chunks, pattern=Pattern(), scale=SCALE, group=group)
        assert output.transpose(1, 2).is_contiguous()  # or the model would copy it, and keep that
        assert max(saved) <= max(tensor.untyped_storage().nbytes() for tensor in own)
        # queries, keys, values, the result and a number per query and head
        assert len(saved) == 5

    run_ranks(run, 2)
