"""The benchmark of context parallelism at toy size: against arithmetic, and what it says of the package."""

import io
from contextlib import redirect_stdout
from dataclasses import astuple
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.resident import measure_added

from benchmarks import context_parallel, memory
from benchmarks.context_parallel import METHODS, Share, ShareCounter, compute_least, find_most, make_run
from benchmarks.memory import LLAMA_3_8B, Variant

VOCABULARY, WIDTH, KEY_VALUE_WIDTH, MLP_WIDTH, LAYERS, LENGTH = 256, 64, 32, 128, 1, 512
HEADS, KEY_VALUE_HEADS, HEAD_WIDTH = 8, 4, 8
TINY = {
    **LLAMA_3_8B,
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": MLP_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
}
BFLOAT16 = 2  # bytes

MESHES = [("allgather", 2), ("allgather", 4), ("ulysses", 2)]


@cache
def simulate_all() -> dict[tuple[str, int], Share]:
    """By method and ranks, the most of any rank; in one process, which is warm after the first."""

    def run() -> dict[tuple[str, int], Share]:
        return {(method, n): find_most(make_run(TINY, LENGTH, n), method) for method, n in [("auto", 1), *MESHES]}

    return run_ranks(run, 1, group=False)[0]


@pytest.mark.slow
def test_what_one_process_has_to_do_is_what_can_be_computed_by_hand() -> None:
    alone = simulate_all()["auto", 1]
    pairs = sum(range(1, LENGTH + 1))
    assert alone.attention_flops == LAYERS * 7 * 2 * pairs * HEADS * HEAD_WIDTH
    layer = 2 * WIDTH * WIDTH + 2 * WIDTH * KEY_VALUE_WIDTH + 3 * WIDTH * MLP_WIDTH
    assert alone.product_flops == 6 * LENGTH * (LAYERS * layer + VOCABULARY * WIDTH)
    assert alone.traffic == 0


@pytest.mark.guarantees("equal-work", "share-of-work")
@pytest.mark.slow
@pytest.mark.parametrize(("method", "ranks"), MESHES)
def test_every_rank_has_its_share_and_no_more(method: str, ranks: int) -> None:
    alone, share = simulate_all()["auto", 1], simulate_all()[method, ranks]
    assert share.attention_flops == pytest.approx(alone.attention_flops / ranks, rel=0.02)
    assert share.product_flops == pytest.approx(alone.product_flops / ranks, rel=0.001)
    # ulysses keeps the result of attention twice: by heads, and exchanged; the position ids are those of all positions
    tolerance = 0.01 if method == "allgather" else 0.1
    assert share.activations == pytest.approx(alone.activations / ranks, rel=tolerance, abs=8 * LENGTH + 4096)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ranks"), MESHES)
def test_what_attention_sends(method: str, ranks: int) -> None:
    keys_and_values = 2 * LENGTH * KEY_VALUE_WIDTH * BFLOAT16
    queries_and_results = 2 * LENGTH * WIDTH * BFLOAT16
    whole = {
        # gathered forward, gathered again and their gradients scattered backward
        "allgather": 3 * keys_and_values,
        # exchanged once, and their gradients
        "ulysses": 2 * (keys_and_values + queries_and_results) / ranks,
    }
    assert simulate_all()[method, ranks].traffic == LAYERS * whole[method] * (ranks - 1) / ranks


@pytest.mark.slow
def test_the_least_is_that_of_no_waste() -> None:
    alone = simulate_all()["auto", 1]
    for (method, ranks), share in simulate_all().items():
        least = compute_least(make_run(TINY, LENGTH, ranks), method, alone)
        ratios = [a / b if b else 1 for a, b in zip(astuple(share), astuple(least), strict=True)]
        traffic = 1.5 if method == "allgather" else 1
        assert ratios == pytest.approx([1, 1, traffic, 1], rel=0.1)


def test_masked_calls_count_all_their_pairs() -> None:
    def run() -> int:
        query, key = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 6, 8)
        with ShareCounter() as counter:
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            attend(query, key, key, attn_mask=torch.zeros(1, 1, 4, 6))
            attend(query, query, query, 0.0, True)
        return counter.attention_flops

    assert run_ranks(run, 1, group=False) == [2 * 2 * 3 * 8 * (4 * 6 + 10)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_simulation_is_what_processes_use(method: str, tmp_path: Path) -> None:
    run = make_run({**TINY, "vocab_size": 4096, "num_hidden_layers": 2}, LENGTH, 2)
    variant = Variant({"context_parallel_method": method})
    added = memory.count_added(memory.plan(run, variant))
    for resident in measure_added(run, variant, tmp_path):
        assert added == pytest.approx(resident, rel=0.05)


@pytest.mark.slow
def test_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "LLAMA_3_8B", TINY)

    def run() -> str:
        with redirect_stdout(io.StringIO()) as output:
            short = ["--simulated-length", "64", "--blocks-length", "512", "--length", "64"]
            context_parallel.main(["--cp-sizes", "2", "--layers", "1", *short, "--rounds", "2"])
        return output.getvalue()

    rows = [line for line in run_ranks(run, 1, group=False)[0].splitlines() if line.startswith("|")]
    assert [len(row.split("|")) for row in rows] == [12] * 5 + [7] * 12 + [9] * 6
