"""A simulated step is the step of processes that really train: the same collectives, and as much memory."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.cover import Matrix
from helpers.float8 import RECIPES
from helpers.planning import (
    BATCH,
    KEY_VALUE_WIDTH,
    LAYERS,
    LENGTH,
    LLAMA,
    MLP_WIDTH,
    VOCABULARY,
    WIDTH,
    Call,
    make_batch,
    make_module,
    make_trainer,
    measure_peak,
    train,
)
from helpers.ranks import run_ranks
from helpers.user_modules import Normalized
from torch.optim import AdamW

from lightning_fsdp2 import CausalLM, DDPConfig, DDPStrategy, Float8Config, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.compat.torchao import FusedCasts
from lightning_fsdp2.plan.result import RankPlan, build_rank_plan
from lightning_fsdp2.plan.simulation.recorder import (
    ACTIVATIONS,
    COMMUNICATION_BUFFERS,
    OPTIMIZER_STATES,
    UNSHARDED_WEIGHTS,
    WEIGHTS,
    StepRecorder,
)
from lightning_fsdp2.plan.simulation.step import Simulation, simulate
from lightning_fsdp2.plan.timing.devices import DEVICES

# elements
EMBEDDING = HEAD = VOCABULARY * WIDTH
LAYER_MATRICES = 2 * WIDTH * WIDTH + 2 * WIDTH * KEY_VALUE_WIDTH + 3 * WIDTH * MLP_WIDTH
LAYER = LAYER_MATRICES + 2 * WIDTH
MODEL = EMBEDDING + HEAD + LAYERS * LAYER + WIDTH
TENSORS = 3 + 9 * LAYERS

FULL = FSDP2Config(activation_checkpointing="full")
SEQUENCE_PARALLEL = FSDP2Config(sequence_parallel=True)
SELECTIVE_LOSS_PARALLEL = FSDP2Config(sequence_parallel=True, loss_parallel=True, activation_checkpointing="selective")

CASES: dict[str, tuple[int, Callable[[], Any], dict[str, Any]]] = {
    "1 rank": (1, FSDP2Strategy, {}),
    "dp 2": (2, FSDP2Strategy, {}),
    "dp 2, float32": (2, FSDP2Strategy, {"precision": "32-true"}),
    "dp 2, bfloat16": (2, FSDP2Strategy, {"precision": "bf16-true"}),
    "dp 2, full AC": (2, lambda: FSDP2Strategy(config=FULL), {}),
    "dp 2, accumulation": (2, FSDP2Strategy, {"accumulate_grad_batches": 3}),
    "dp 2, chunked loss": (2, FSDP2Strategy, {"module": {"loss": "chunked"}}),
    "tp 2": (2, lambda: FSDP2Strategy(tp_size=2), {}),
    "cp 2": (2, lambda: FSDP2Strategy(cp_size=2), {}),
    "dp 2, float8": (2, lambda: FSDP2Strategy(config=FSDP2Config(float8=True)), {}),
    "DDP": (2, DDPStrategy, {}),
    "DDP, bfloat16": (2, DDPStrategy, {"precision": "bf16-true", "accumulate_grad_batches": 2}),
    "dp 2 x tp 2, SP": (4, lambda: FSDP2Strategy(tp_size=2, config=SEQUENCE_PARALLEL), {}),
    "dp 2 x tp 2, SP, loss parallel": (4, lambda: FSDP2Strategy(tp_size=2, config=SELECTIVE_LOSS_PARALLEL), {}),
    "dp 2 x cp 2": (4, lambda: FSDP2Strategy(cp_size=2, config=FULL), {}),
    "2 replicas x 2 shards": (4, lambda: FSDP2Strategy(dp_replicate_size=2), {}),
    "dp 4": (4, FSDP2Strategy, {"accumulate_grad_batches": 2}),
}


def list_features(name: str) -> dict[str, Any]:
    """Return the options of a case, apart from mixed precision and the other defaults."""
    ranks, make_strategy, options = CASES[name]
    strategy, defaults = make_strategy(), FSDP2Config().to_dict()
    sizes = {f"{axis}_size": getattr(strategy, f"{axis}_size", 1) for axis in ("tp", "cp", "dp_replicate")}
    if isinstance(strategy, FSDP2Strategy):
        sizes["shards"] = ranks // math.prod(sizes.values())
    return {
        "strategy": type(strategy).__name__,
        **{name: size for name, size in sizes.items() if size > 1},
        **{flag: str(value) for flag, value in strategy.config.to_dict().items() if value != defaults.get(flag, value)},
        **{name: str(value) for name, value in options.items()},
    }


TRAINED = Matrix(
    "simulated steps beside real ones",
    {name: list_features(name) for name in CASES},
    costs={name: ranks for name, (ranks, *_) in CASES.items()},
)


def plan(ranks: int, strategy: Any, *, rank: int = 0, module: dict[str, Any] | None = None, **options: Any) -> Any:
    """Simulate a rank in a process of its own."""

    def run() -> tuple[RankPlan, list[Call], Simulation]:
        trainer = make_trainer(strategy(), **options)
        simulation = simulate(trainer, make_module(**(module or {})), make_batch(), world_size=ranks, rank=rank)
        calls = [(call.kind, len(call.group.ranks), call.bytes) for call in simulation.recording.collectives]
        planned = build_rank_plan(rank, simulation.recording, DEVICES["h100"], overlapped_axes=())
        return planned, calls, simulation

    return run_ranks(run, 1, group=False)[0]


@pytest.mark.guarantees("same-code", "plans-beside-real-runs")
@pytest.mark.parametrize("name", [pytest.param(name, marks=TRAINED.mark(name)) for name in CASES])
def test_a_simulated_step_is_that_of_processes_that_train(name: str) -> None:
    ranks, strategy, options = CASES[name]
    planned, calls, _ = plan(ranks, strategy, **options)
    real_calls, added = train(strategy, ranks, **options)
    assert calls == real_calls
    kept = planned.peak[WEIGHTS] + planned.peak[OPTIMIZER_STATES]
    if name.startswith("DDP"):
        kept += planned.peak[COMMUNICATION_BUFFERS]  # its buckets
    assert planned.peak_bytes - kept == pytest.approx(added, rel=0.05)


WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 1024}
"""A model whose weights need more memory than a step of few tokens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy, lambda: DDPStrategy(DDPConfig(gradient_as_bucket_view=True))],
    ids=["DDP", "DDP, views of buckets"],
)
def test_all_that_is_held_is_what_processes_hold(strategy: Callable[[], Any]) -> None:
    batch = make_batch(1, 32)

    def run() -> int:
        module = CausalLM(config=WIDE, optimizer=partial(AdamW, foreach=True))
        recording = simulate(make_trainer(strategy()), module, batch, world_size=2).recording
        return build_rank_plan(0, recording, DEVICES["h100"], overlapped_axes=()).peak_bytes

    (planned,) = run_ranks(run, 1, group=False)
    assert planned == pytest.approx(measure_peak(strategy, 2, WIDE, batch), rel=0.01)


# ---------------------------------------------------------------------- numbers that can be computed by hand


RANKS = 4


@pytest.fixture(scope="module")
def usual() -> Any:
    """A rank of four, simulated."""
    return plan(RANKS, FSDP2Strategy)


def test_memory_and_traffic_by_hand(usual: Any) -> None:
    planned, calls, simulation = usual
    shard = MODEL // RANKS
    assert planned.peak[WEIGHTS] == 4 * shard
    assert planned.peak[OPTIMIZER_STATES] == 2 * 4 * shard + 4 * TENSORS  # AdamW's two moments, and its step numbers
    # the peak is in the loss's backward: the head, the norm before it and the last layer are gathered, in bfloat16
    assert planned.peak_at == f"backward after model.model.layers.{LAYERS - 1}"
    assert planned.peak[UNSHARDED_WEIGHTS] == 2 * (HEAD + WIDTH + LAYER)
    gathered = [size for kind, _, size in calls if kind == "all-gather"]
    reduced = [size for kind, _, size in calls if kind == "reduce-scatter"]
    # all but the last layer and the head are gathered again in backward, and the embedding is not needed there
    assert sum(gathered) == 2 * MODEL + 2 * (LAYERS - 1) * LAYER
    assert sum(reduced) == 4 * MODEL
    assert simulation.is_even


def test_flops_by_hand(usual: Any) -> None:
    planned, *_ = usual
    tokens = BATCH * LENGTH
    products = 6 * tokens * (HEAD + LAYERS * LAYER_MATRICES)
    # scores and values in forward; in backward the scores again, and two products for each; half of it, being causal
    attention = LAYERS * (2 + 5) * BATCH * 2 * LENGTH * LENGTH * WIDTH // 2
    assert planned.flops == pytest.approx(products + attention, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "products"), [("rowwise_with_gw_hp", 2), ("tensorwise", 3)])
def test_products_in_float8_by_hand(recipe: Any, products: int, usual: Any) -> None:
    config = FSDP2Config(float8=Float8Config(recipe=recipe))
    _, _, simulation = plan(2, lambda: FSDP2Strategy(config=config))
    operations = simulation.recording.operations
    in_float8 = sum(op.flops for op in operations if op.dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    assert in_float8 == products * 2 * BATCH * LENGTH * LAYERS * LAYER_MATRICES
    assert simulation.recording.flops == usual[2].recording.flops


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_cast_is_two_kernels(recipe: str) -> None:
    """One reads the matrix for its largest values, which it writes; the other reads it again and writes a byte each."""

    def run() -> int:
        matrix = torch.ones(32, 64, dtype=torch.bfloat16)
        with StepRecorder({}) as recorder:
            recorder.begin("forward")
            FusedCasts(recipe, emulate=False).cast_input(matrix)
            return sum(operation.bytes for operation in recorder.get_recording().operations)

    elements, scales = 32 * 64, 1 if recipe == "tensorwise" else 32
    # a scale is written in bfloat16, and cast to float32
    assert run_ranks(run, 1, group=False) == [2 * elements + 2 * scales + (2 + 4) * scales + (2 + 1) * elements]


@pytest.mark.slow
def test_compiled_casts_need_less_than_uncompiled_ones() -> None:
    def read(**flags: Any) -> tuple[int, int]:
        planned, _, simulation = plan(2, lambda: FSDP2Strategy(config=FSDP2Config(**flags)))
        return planned.peak_bytes, sum(operation.bytes for operation in simulation.recording.operations)

    _, plain_bytes = read()
    compiled, compiled_bytes = read(float8=True, enable_compile=True)
    uncompiled, uncompiled_bytes = read(float8=True)
    assert plain_bytes < compiled_bytes < uncompiled_bytes
    assert compiled <= uncompiled


@pytest.mark.slow
def test_hidden_states_are_no_logits_where_a_part_of_the_vocabulary_is_as_wide() -> None:
    def count_activations(vocabulary: int) -> int:
        module = CausalLM(config={**LLAMA, "vocab_size": vocabulary})
        trainer = make_trainer(FSDP2Strategy(tp_size=2, config=SEQUENCE_PARALLEL))
        recording = simulate(trainer, module, make_batch(), world_size=2).recording
        return sum(c.bytes for c in recording.changes if c.category == ACTIVATIONS and c.bytes > 0)

    def run() -> list[int]:
        return [count_activations(2 * WIDTH), count_activations(2 * WIDTH + 2)]

    as_wide, wider = run_ranks(run, 1, group=False)[0]
    assert as_wide >= wider  # what cannot be told apart is no logits


@pytest.mark.slow
def test_micro_batches_that_are_alike_count_as_often_as_there_are() -> None:
    few, many = (plan(2, FSDP2Strategy, accumulate_grad_batches=count)[0] for count in (4, 9))

    def count(planned: RankPlan, kind: str) -> tuple[int, int]:
        (entry,) = [entry for entry in planned.traffic if entry.kind == kind]
        return entry.calls, entry.bytes

    assert [9 * number for number in count(few, "all-gather")] == [4 * number for number in count(many, "all-gather")]
    assert count(few, "reduce-scatter") == count(many, "reduce-scatter")  # once in a step
    assert 4 * many.flops == 9 * few.flops
    assert few.peak == many.peak


@pytest.mark.slow
def test_the_last_rank_of_uneven_shards_holds_less() -> None:
    first, last = (plan(3, FSDP2Strategy, rank=rank) for rank in (0, 2))
    assert not first[2].is_even
    assert last[0].peak[OPTIMIZER_STATES] < first[0].peak[OPTIMIZER_STATES]
    assert last[0].peak[WEIGHTS] == first[0].peak[WEIGHTS]  # FSDP2 fills shards up


# ---------------------------------------------------------------------- what cannot be simulated


class ChoosesByValue(Normalized):
    def loss(self, batch: Any) -> Any:
        loss = self(batch).sum()
        return loss if loss > 0 else -loss


@pytest.mark.guarantees("nothing-is-invented")
def test_a_step_that_depends_on_values_is_refused() -> None:
    def run() -> str:
        with torch.device("meta"):
            module = ChoosesByValue()
        with pytest.raises(ValueError, match="ChoosesByValue: its step depends on the values of tensors") as error:
            simulate(make_trainer(FSDP2Strategy()), module, torch.zeros(2, 8), world_size=2)
        return str(error.value)

    (message,) = run_ranks(run, 1, group=False)
    assert "return loss if loss > 0 else -loss" in message


def test_other_strategies_are_refused() -> None:
    def run() -> None:
        trainer = make_trainer("auto", precision="32-true")
        with pytest.raises(TypeError, match="not of SingleDeviceStrategy: use FSDP2Strategy or DDPStrategy"):
            simulate(trainer, make_module(), make_batch(), world_size=2)

    run_ranks(run, 1, group=False)
