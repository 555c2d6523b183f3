"""The benchmark of memory at toy size: against arithmetic, and against processes that really train."""

import sys
from functools import cache, partial

import pytest
from helpers.ranks import run_ranks

from benchmarks import memory
from benchmarks.memory import (
    ACTIVATIONS,
    GATHERED_PARAMETERS,
    OFFLOADED,
    OPTIMIZER_STATE,
    SHARDED_PARAMETERS,
    VARIANTS,
    Peak,
    Run,
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


SIMULATED = [(name, 1) for name in VARIANTS if name != "full AC, loss parallel"]
SIMULATED += [(name, 2) for name in ("baseline", "full AC", "full AC, loss parallel")]


@cache
def simulate_all() -> dict[tuple[str, int], Peak]:
    """By variant and tensor parallel size; in one process, which is warm after the first."""

    def simulate(name: str, tp_size: int) -> Peak:
        return memory.simulate(Run(TINY, ranks=4, tp_size=tp_size, sequence_length=2048), VARIANTS[name])

    return run_ranks(lambda: {key: simulate(*key) for key in SIMULATED}, 1, group=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_what_can_be_computed_by_hand(tp):
    peak = simulate_all()["baseline", tp]
    shard = MATRICES // 4 + NORMS * tp // 4  # norms are whole on every tensor parallel rank
    assert peak.bytes[SHARDED_PARAMETERS] == 4 * shard
    assert peak.bytes[OPTIMIZER_STATE] == 2 * 4 * shard + 4 * PARAMETERS  # AdamW's two moments, and its step numbers
    # the peak is in the loss's backward: the head, the norm before it and the last layer are gathered, in bfloat16
    assert peak.phase == "backward"
    assert peak.bytes[GATHERED_PARAMETERS] == 2 * ((HEAD + LAYER_MATRICES) // tp + WIDTH + LAYER_NORMS)


@pytest.mark.slow
def test_checkpointing_saves_activations():
    activations = [simulate_all()[name, 1].bytes[ACTIVATIONS] for name in ("full AC", "selective AC", "baseline")]
    assert activations == sorted(set(activations))


@pytest.mark.slow
def test_chunked_loss_saves_logits():
    assert simulate_all()["full AC, chunked loss", 1].total < simulate_all()["full AC", 1].total


@pytest.mark.slow
def test_loss_parallel_saves_logits():
    assert simulate_all()["full AC, loss parallel", 2].total < simulate_all()["full AC", 2].total


@pytest.mark.slow
def test_offload_takes_shards_and_optimizer_off_the_device():
    kept, offloaded = (simulate_all()[f"full AC, chunked loss{option}", 1] for option in ("", ", offload"))
    assert not any(offloaded.bytes[category] for category in OFFLOADED)
    assert kept.total - offloaded.total >= kept.bytes[SHARDED_PARAMETERS] + kept.bytes[OPTIMIZER_STATE]


def test_simulation_is_what_processes_use(tmp_path):
    run, variant = Run(TINY, ranks=2, tp_size=1, sequence_length=512), VARIANTS["baseline"]
    (simulated,) = memory.run_forked(partial(memory.simulate, run, variant), 1)
    for tracked, resident in memory.run_forked(partial(memory.train, run, variant, str(tmp_path)), 2):
        assert tracked.bytes == pytest.approx(simulated.bytes, rel=0.05)
        assert simulated.added == pytest.approx(resident, rel=0.05)


def test_tracker_sees_what_is_resized_and_what_is_freed():
    with memory.MemoryTracker() as tracker:
        tracker.begin("forward")
        first = memory.torch.empty(256)
        first.untyped_storage().resize_(0)
        second = memory.torch.empty(128)
        view = second[:64]
        del second
        third = memory.torch.empty(64)
        del view, third
    assert tracker.find_peak().total == 1024
    assert [change for _, change in tracker._changes] == [1024, -1024, 512, 256, -512, -256]


@pytest.mark.slow
def test_script(monkeypatch, capsys):
    monkeypatch.setattr(memory, "SMALL", TINY)
    options = ["--ranks", "4", "--tp-sizes", "2", "--layers", "1", "--sequence-length", "64", "--variants", "full AC"]
    monkeypatch.setattr(sys, "argv", ["memory.py", *options])
    memory.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [len(row.split("|")) for row in rows] == [13] * 3 + [9] * 4
    for row in rows[-2:]:
        assert float(row.split("|")[-2]) == pytest.approx(1, rel=0.05)
