"""The benchmark of memory at toy size: against arithmetic, and against processes that really train."""

from functools import cache

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.resident import measure_added, run_program

from benchmarks import memory
from benchmarks.memory import VARIANTS, Run
from lightning_fsdp2.plan import RankPlan
from lightning_fsdp2.plan.simulation.recorder import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER_STATES,
    UNSHARDED_WEIGHTS,
    WEIGHTS,
)

VOCABULARY, WIDTH, KEY_VALUE_WIDTH, MLP_WIDTH, LAYERS = 4096, 64, 32, 128, 2
TINY = {
    **memory.LLAMA_3_8B,
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": MLP_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# elements
EMBEDDING = HEAD = VOCABULARY * WIDTH
LAYER_MATRICES = 2 * WIDTH * WIDTH + 2 * WIDTH * KEY_VALUE_WIDTH + 3 * WIDTH * MLP_WIDTH
LAYER_NORMS = 2 * WIDTH
MATRICES = EMBEDDING + HEAD + LAYERS * LAYER_MATRICES
NORMS = LAYERS * LAYER_NORMS + WIDTH
PARAMETERS = 3 + 9 * LAYERS  # how many


@cache
def plan(name: str, tp_size: int) -> RankPlan:
    return memory.plan(Run(TINY, ranks=4, tp_size=tp_size, sequence_length=2048), VARIANTS[name])


@pytest.mark.guarantees("memory-by-hand")
@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_what_can_be_computed_by_hand(tp):
    planned = plan("baseline", tp)
    shard = MATRICES // 4 + NORMS * tp // 4  # norms are whole on every tensor parallel rank
    assert planned.peak[WEIGHTS] == 4 * shard
    assert planned.peak[OPTIMIZER_STATES] == 2 * 4 * shard + 4 * PARAMETERS  # AdamW's two moments, and its step numbers
    # the peak is in the loss's backward: the head, the norm before it and the last layer are gathered, in bfloat16
    assert planned.peak_at == f"backward after model.model.layers.{LAYERS - 1}"
    assert planned.peak[UNSHARDED_WEIGHTS] == 2 * ((HEAD + LAYER_MATRICES) // tp + WIDTH + LAYER_NORMS)


@pytest.mark.slow
def test_checkpointing_saves_activations():
    activations = [plan(name, 1).peak[ACTIVATIONS] for name in ("full AC", "selective AC", "baseline")]
    assert activations == sorted(set(activations))


@pytest.mark.guarantees("chunked-loss")
@pytest.mark.slow
def test_chunked_loss_saves_logits():
    assert plan("full AC, chunked loss", 1).peak_bytes < plan("full AC", 1).peak_bytes


@pytest.mark.slow
def test_loss_parallel_saves_logits():
    assert plan("full AC, loss parallel", 2).peak_bytes < plan("full AC", 2).peak_bytes


@pytest.mark.slow
def test_offload_takes_shards_and_optimizer_off_the_device():
    kept, offloaded = (plan(f"full AC, chunked loss{option}", 1) for option in ("", ", offload"))
    assert not any(offloaded.peak[category] for category in (WEIGHTS, GRADIENTS, OPTIMIZER_STATES))
    assert kept.peak_bytes - offloaded.peak_bytes >= kept.peak[WEIGHTS] + kept.peak[OPTIMIZER_STATES]


@pytest.mark.guarantees("planned-and-trained")
@pytest.mark.slow
def test_a_plan_is_what_processes_use(tmp_path):
    run, variant = Run(TINY, ranks=2, tp_size=1, sequence_length=512), VARIANTS["baseline"]
    added = memory.count_added(memory.plan(run, variant))
    for resident in measure_added(run, variant, tmp_path):
        assert added == pytest.approx(resident, rel=0.05)


@pytest.mark.slow
def test_script():
    options = ["--ranks", "4", "--tp-sizes", "2", "--layers", "1", "--sequence-length", "64", "--variants", "full AC"]
    output = run_program(f"from benchmarks import memory; memory.SMALL = {TINY}; memory.main()", *options)
    rows = [line for line in output.splitlines() if line.startswith("|")]
    assert [len(row.split("|")) for row in rows] == [14] * 3 + [8] * 4
    for row in rows[-2:]:
        assert float(row.split("|")[-2]) == pytest.approx(1, rel=0.05)


def add_many(worker: int) -> float:
    return torch.ones(4_000_000).add(1).abs().max().item()


def test_forked_processes_do_not_wait_for_the_threads_of_their_parent() -> None:
    def run() -> list[float]:
        torch.set_num_threads(2)
        return [add_many(0), *memory.run_forked(add_many, 2)]

    assert run_ranks(run, 1, group=False, patience=20) == [[2, 2, 2]]
