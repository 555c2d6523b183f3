"""The benchmark of expert parallelism at toy size: against arithmetic, and what it says of the package."""

import argparse
import io
from contextlib import redirect_stdout
from functools import cache

import pytest
from helpers.ranks import run_ranks

from benchmarks import expert_parallel, memory
from benchmarks.expert_parallel import QWEN3_30B_A3B, VARIANT, count_sent, make_run
from lightning_fsdp2.plan import RankPlan
from lightning_fsdp2.plan.simulation.recorder import WEIGHTS

WIDTH, MLP_WIDTH, LAYERS, EXPERTS, USED, RANKS = 32, 64, 2, 8, 2, 4
TINY = {
    **QWEN3_30B_A3B,
    "vocab_size": 256,
    "hidden_size": WIDTH,
    "moe_intermediate_size": MLP_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": USED,
}
SIZES = argparse.Namespace(sequence_length=64, batch_size=2)
TOKENS = SIZES.sequence_length * SIZES.batch_size
BFLOAT16, FLOAT32, INT64 = 2, 4, 8  # bytes

LAYER_OF_EXPERTS = EXPERTS * 3 * WIDTH * MLP_WIDTH
GATHERED = (2 * LAYERS - 1) * LAYER_OF_EXPERTS * BFLOAT16  # in forward and backward; the last layer stays
REDUCED = LAYERS * LAYER_OF_EXPERTS * FLOAT32


@cache
def plan(ep_size: int) -> RankPlan:
    return memory.plan(make_run(TINY, RANKS, ep_size, SIZES), VARIANT)


@pytest.mark.guarantees("experts-by-hand")
@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [2, 4])
def test_what_a_rank_sends(ep_size: int) -> None:
    alone, sent = count_sent(plan(1)), count_sent(plan(ep_size))
    # to the experts and back: in forward, in its recomputation, and in backward; the numbers of rows only in forward
    rows = LAYERS * 6 * TOKENS * USED * WIDTH * BFLOAT16
    counts = LAYERS * EXPERTS * INT64
    assert sent["all-to-all", "ep"] == (rows + counts) * (ep_size - 1) / ep_size
    # without expert parallelism, all experts go to all ranks
    share = (RANKS - 1) / RANKS
    assert alone["all-gather", "dp_shard"] - sent["all-gather", "dp_shard"] == GATHERED * share
    assert alone["reduce-scatter", "dp_shard"] - sent["reduce-scatter", "dp_shard"] == REDUCED * share
    # with it, those of a rank go to the ranks that have the same experts
    others = RANKS // ep_size - 1
    assert sent.get(("all-gather", "efsdp"), 0) == GATHERED / RANKS * others
    assert sent.get(("reduce-scatter", "efsdp"), 0) == REDUCED / RANKS * others


@pytest.mark.guarantees("bytes-at-rest")
@pytest.mark.slow
def test_every_rank_holds_as_many_weights() -> None:
    assert plan(1).peak[WEIGHTS] == plan(2).peak[WEIGHTS]


@pytest.mark.slow
def test_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_parallel, "QWEN3_30B_A3B", TINY)

    def run() -> str:
        with redirect_stdout(io.StringIO()) as output:
            short = ["--sequence-length", "64", "--toy-length", "32", "--rounds", "2"]
            expert_parallel.main(["--ranks", "4", "--ep-sizes", "1", "2", *short])
        return output.getvalue()

    rows = [line for line in run_ranks(run, 1, group=False)[0].splitlines() if line.startswith("|")]
    assert [len(row.split("|")) for row in rows] == [9] * 4 + [14] * 4 + [8] * 4
