"""Tensor parallelism under Megatron-FSDP: the numbers are those of one process, and tests notice if they are not.

The weights are rough. With the usual small ones, the gradients of norms are so small that a missing sum over the ranks
shows only after a step or two.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.cases import make_causal_lm_module
from helpers.cover import Matrix
from helpers.family_parity import measure_parity
from helpers.mesh_runs import Case, check_parity
from helpers.models import GPT2, LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, assert_equal_gradients, token_sum_loss, whole
from helpers.strategies import STRATEGIES
from torch import Tensor, nn

from lightning_fsdp2 import (
    CausalLM,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    MegatronFSDPStrategy,
    create_device_mesh,
    defer_grad_sync,
)
from lightning_fsdp2.parallel.megatron import tensor_parallel
from lightning_fsdp2.parallel.megatron.driver import Driver, get_driver
from lightning_fsdp2.parallel.megatron.tensor_parallel import Lift

KIND = STRATEGIES["megatron_fsdp"]
OPTIMIZER = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, fused=True)
ROUGH = {"initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, **ROUGH, "num_hidden_layers": 2},
    "gpt2": {**GPT2, **ROUGH},
    "qwen3": {**LLAMA, **ROUGH, "num_hidden_layers": 2, "model_type": "qwen3", "head_dim": 8},
}
TRAITS: dict[str, dict[str, Hashable]] = {
    "llama": {"heads": "grouped"},
    "gpt2": {"heads": "of one matrix, with biases"},
    "qwen3": {"heads": "grouped", "norms": "of each rank's heads"},
}
"""What matters to tensor parallelism, by model."""

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {}),
    "dp2 x tp2": (4, {}),
    "cp2 x tp2": (4, {"cp_size": 2}),
    "replicas": (8, {"dp_replicate_size": 2}),
}
"""Ranks, and sizes beside ``tp_size=2``."""

PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sp": ({"sequence_parallel": True}, {}),
    "loss": ({"loss_parallel": True}, {}),
    **{f"zero {number}": ({"zero_dp_strategy": number}, {}) for number in (0, 1, 2)},
    "window": ({}, {"accumulate": 2, "clip": 0.1}),
    "tied": ({}, {"tied": True}),
    "by shards": ({"init_fsdp_with_meta_device": True}, {"meta": True}),
    "full": ({"activation_checkpointing": "full"}, {}),
    "selective": ({"activation_checkpointing": "selective"}, {}),
    "chunked": ({}, {"loss": "chunked"}),
    "double buffer": ({"fsdp_double_buffer": True}, {}),
    "sums": ({"calculate_per_token_loss": True}, {}),
    "no buckets": ({"disable_bucketing": True, "report_nan_in_param_grad": True}, {}),
    "no overlap": ({"overlap_grad_reduce": False, "overlap_param_gather": False}, {}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
}
"""Flags and options of a run, by the words that name them."""

SEEDS = {"tp2, gpt2": 4}
"""The gradient of a key's bias is mathematically zero, and with seed 0, AdamW makes a step of its rounding."""

Cell = tuple[str, ...]
"""A layout, a model and parts."""


TOGETHER = [
    "dp2 x tp2, gpt2, sp, zero 0, tied, full",
    "dp2 x tp2, qwen3, loss, zero 0, window, selective, chunked",
    "dp2 x tp2, gpt2, sp, loss, zero 1, window, tied, by shards",
    "dp2 x tp2, qwen3, sp, zero 1, full, chunked",
    "dp2 x tp2, gpt2, sp, loss, zero 2, window, selective, chunked",
    "dp2 x tp2, qwen3, sp, loss, zero 2, window, tied, by shards",
    "dp2 x tp2, qwen3, sp, loss, window, double buffer, full",
    "dp2 x tp2, qwen3, sp, loss, window, sums, tied, by shards",
    "dp2 x tp2, qwen3, sp, loss, window, no buckets, selective",
    "dp2 x tp2, qwen3, window, no overlap, chunked",
    "cp2 x tp2, gpt2, sp, loss, window, tied, full",
    "cp2 x tp2, qwen3, sp, loss, window, by shards, selective, chunked",
    "replicas, gpt2, sp, loss, window, tied, by shards",
    "replicas, qwen3, sp, loss, zero 1, window, chunked",
    "tp2, gpt2, sp, window, bf16-mixed",
    "tp2, qwen3, sp, window, bf16-true",
]
"""Runs of many parts, so that few of them have every two."""


def list_cells() -> Iterator[Cell]:
    yield from (("tp2", model) for model in MODELS)
    yield from (tuple(name.split(", ")) for name in TOGETHER)
    for model in MODELS:
        yield from (("dp2 x tp2", model, *parts) for parts in (["window"], ["sp", "loss", "window"]))
        for zero in ("zero 0", "zero 1", "zero 2"):
            yield from (("dp2 x tp2", model, "sp", "loss", zero, *window) for window in ([], ["window"]))
        yield from ((layout, model, "sp", "loss", "window") for layout in ("cp2 x tp2", "replicas"))
        for part in ("tied", "by shards", "bf16-true", "bf16-mixed"):
            yield "dp2 x tp2", model, "sp", "window", part
    for part in ("full", "double buffer", "sums", "no buckets"):
        yield "dp2 x tp2", "llama", "sp", "window", part
    yield "dp2 x tp2", "llama", "window", "no overlap"
    yield "dp2 x tp2", "llama", "sp", "loss", "window", "chunked"
    yield "dp2 x tp2", "qwen3", "sp", "window", "selective"
    yield "tp2", "llama", "sp", "tied", "by shards"
    yield "replicas", "llama", "sp", "window", "by shards"
    yield "replicas", "llama", "sp", "zero 1"


def describe(cell: Cell) -> dict[str, Hashable]:
    layout, model, *parts = cell
    described: dict[str, Hashable] = {"layout": layout, **TRAITS[model], "zero_dp_strategy": 3}
    for flags, options in map(PARTS.__getitem__, parts):
        described |= flags | options
    return described


CELLS = {", ".join(cell): cell for cell in list_cells()}
MATRIX = Matrix(
    "tensor parallelism under Megatron-FSDP",
    {name: describe(cell) for name, cell in CELLS.items()},
    always=[f"tp2, {model}" for model in MODELS],
    costs={name: LAYOUTS[layout][0] for name, (layout, *_) in CELLS.items()},
)


def make_case(layout: str, model: str, *parts: str, **more_flags: Any) -> Case:
    sizes = LAYOUTS[layout][1]
    options: dict[str, Any] = {"accumulate": 1, "clip": None, "tied": False, "meta": False, "loss": "full"}
    for name in parts:
        more_flags |= PARTS[name][0]
        options |= PARTS[name][1]
    config = {**MODELS[model], "tie_word_embeddings": options.pop("tied")}
    length = 16 if "cp_size" in sizes else 12
    return Case(
        make_module=partial(make_causal_lm_module, config, meta=options.pop("meta"), loss=options.pop("loss")),
        make_model=partial(make_causal_lm, config),
        loss=token_sum_loss,
        batches=make_token_batches(3 * options["accumulate"] * 4, length=length),
        strategy_class=MegatronFSDPStrategy,
        strategy={"tp_size": 2, **sizes, "config": MegatronFSDPConfig(**more_flags)},
        **options,
    )


def check(*cell: str) -> None:
    """Compare one cell with one process, on its ranks."""

    def run() -> None:
        torch.manual_seed(SEEDS.get(", ".join(cell), 0))
        check_parity(make_case(*cell))

    KIND.run(run, LAYOUTS[cell[0]][0])


@pytest.mark.guarantees("megatron-tensor-parallel")
@pytest.mark.parametrize("cell", MATRIX.list_parameters({name: (cell,) for name, cell in CELLS.items()}))
def test_losses_gradients_norm_and_weights_are_those_of_one_process(cell: Cell) -> None:
    check(*cell)


FAMILIES = {
    "mixtral": "Megatron-FSDP, dp2 x tp2+sp, accumulate 2",
    "qwen3_moe": "Megatron-FSDP, dp2",
    "phi3": "Megatron-FSDP, tp2+sp",
    "deepseek_v3": "Megatron-FSDP, tp2",
    "gpt_oss": "Megatron-FSDP, tp2+sp",
    "falcon": "Megatron-FSDP, tp2+sp",
    "gemma3_text": "Megatron-FSDP, tp2",
}
"""A layout for each of some families. `make parity` compares all families on all layouts."""


@pytest.mark.slow
@pytest.mark.guarantees("megatron-families")
@pytest.mark.parametrize(("family", "layout"), FAMILIES.items())
def test_a_family_trains_as_in_one_process(family: str, layout: str) -> None:
    assert measure_parity(family, layout) < 1e-5


# ---------------------------------------------------------------------- sums of partial gradients

ODD_PLAN = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise_gather_output",
    "model.layers.*.mlp.up_proj": "colwise_gather_output",
    "model.layers.*.mlp.down_proj": "rowwise_split_input",
}
"""For an odd ``intermediate_size``: the tensor parallel ranks' parts of a layer differ in size."""

ODD = {"intermediate_size": 31}
ODD_ON_SOME = {"intermediate_size": 17, "hidden_size": 16, "head_dim": 64}
"""On three data parallel ranks, only some of them hold rows that lie elsewhere on other tensor parallel ranks."""


def train_on_two_halves(zero_dp_strategy: int, steps: int = 1, fused: bool | None = True) -> None:
    """Two backwards of each step, both synchronised, on Qwen3: each of its ranks has norms of its own heads."""
    torch.manual_seed(0)
    model = make_causal_lm(MODELS["qwen3"])
    reference = deepcopy(model)
    config = MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy)
    mesh = create_device_mesh(config, tp_size=2)
    optimizers: list[Any] = [OPTIMIZER(each.parameters(), fused=fused) for each in (model, reference)]
    called, optimizers[0] = MegatronFSDPManager(config, mesh).parallelize(model, optimizers[0])
    for batch in make_token_batches(steps, size=2, ragged=False):
        for ids in batch["input_ids"].split(1):
            for each in (called, reference):
                each(input_ids=ids, labels=ids).loss.backward()
        gradients = whole({name: parameter.grad for name, parameter in model.named_parameters()})
        assert_equal_gradients(gradients, {name: p.grad for name, p in reference.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("zero_dp_strategy", "steps", "fused"),
    [
        (3, 1, True),
        *(pytest.param(number, 2, True, marks=pytest.mark.slow) for number in (0, 2)),
        pytest.param(3, 2, None, id="3-2-torch's default", marks=pytest.mark.slow),
    ],
)
def test_two_synchronised_backwards_add_up(zero_dp_strategy: int, steps: int, fused: bool | None) -> None:
    KIND.run(train_on_two_halves, 2, zero_dp_strategy, steps, fused)


def change_between_backwards(change: Callable[[nn.Module], Any], zero_dp_strategy: int, flags: dict[str, Any]) -> None:
    """Change gradients after one backward, and run three others, of which one is not synchronised."""
    torch.manual_seed(0)
    model = make_causal_lm({**MODELS["qwen3"], **(ODD if flags else {})})
    reference = deepcopy(model)
    config = MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy, **flags)
    mesh = create_device_mesh(config, tp_size=2)
    called, _ = MegatronFSDPManager(config, mesh).parallelize(model, OPTIMIZER(model.parameters()))
    first, *others = (batch["input_ids"] for batch in make_token_batches(4, ragged=False))
    for each, owner in ((called, model), (reference, reference)):
        each(input_ids=first, labels=first).loss.backward()
        outputs = each(input_ids=first, output_hidden_states=True)
        torch.autograd.grad(outputs.logits.sum(), outputs.hidden_states[-1])  # sets no gradients
        change(owner)
        for ids, context in zip(others, (nullcontext(), defer_grad_sync(each), nullcontext()), strict=True):
            with context:
                each(input_ids=ids, labels=ids).loss.backward()
    gradients = whole({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_equal_gradients(gradients, {name: p.grad for name, p in reference.named_parameters()})


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def double(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2  # type: ignore[operator]


def clear_some(model: Any) -> None:
    for parameter in model.model.layers[0].parameters():
        parameter.grad = None


def change_all(model: Any) -> None:
    for change in (double, clear_some, clip):
        change(model)


@pytest.mark.parametrize(
    ("change", "ranks", "zero_dp_strategy", "flags"),
    [
        (double, 2, 3, {}),
        *(pytest.param(change, 2, 3, {}, marks=pytest.mark.slow) for change in (clip, clear_some)),
        *(pytest.param(change_all, 4, zero, {}, marks=pytest.mark.slow) for zero in (0, 2, 3)),
        *(pytest.param(clip, 4, zero, {"tp_plan": ODD_PLAN}, marks=pytest.mark.slow) for zero in (2, 3)),
    ],
)
def test_changes_of_gradients_between_two_backwards_are_kept(
    change: Callable[[nn.Module], Any], ranks: int, zero_dp_strategy: int, flags: dict[str, Any]
) -> None:
    KIND.run(change_between_backwards, ranks, change, zero_dp_strategy, flags)


def test_changes_that_are_lost_are_noticed() -> None:
    with patch.object(Driver, "_write_gradients_back"), pytest.raises(Exception, match="gradient"):
        KIND.run(change_between_backwards, 2, double, 3, {})


@pytest.mark.guarantees("partial-gradients-are-summed-once")
def test_a_missing_sum_over_the_ranks_is_noticed() -> None:
    with patch.object(Lift, "_sum_aligned", lambda self, parameters: None), pytest.raises(Exception, match="step 1"):
        check("tp2", "qwen3")


@pytest.mark.guarantees("partial-gradients-are-summed-once")
def test_a_sum_in_place_is_noticed() -> None:
    """A second backward must add to summands. If it adds to a sum on each rank, the next sum counts this sum twice."""

    def set_in_place(parameter: Any, local: Tensor) -> None:
        parameter.grad.to_local().copy_(local)

    with (
        patch.object(tensor_parallel, "_set_gradient", set_in_place),
        patch.object(Driver, "_write_gradients_back"),
        pytest.raises(Exception, match="gradient"),
    ):
        KIND.run(train_on_two_halves, 2, 3)


def find_misaligned(module: Any) -> list[str]:
    lift = get_driver(module)._lift
    return [name for name, is_aligned in lift._is_aligned.items() if not is_aligned]


@pytest.mark.parametrize(
    ("sizes", "ranks", "zero_dp_strategy"),
    [
        *(pytest.param(ODD, 4, zero, marks=pytest.mark.slow) for zero in (0, 3)),
        *(pytest.param(ODD, 4, zero, marks=pytest.mark.release) for zero in (1, 2)),
        pytest.param(ODD_ON_SOME, 6, 3, marks=pytest.mark.slow),
    ],
)
def test_gradients_whose_rows_lie_elsewhere_on_other_ranks_add_up(
    sizes: dict[str, int], ranks: int, zero_dp_strategy: int
) -> None:
    model = {**MODELS["qwen3"], **sizes}
    misaligned: list[str] = []

    class Module(CausalLM):
        def on_fit_start(self) -> None:
            misaligned.extend(find_misaligned(self))

    def make_module() -> CausalLM:
        module = Module(config=model, optimizer=OPTIMIZER, decay_norms_and_biases=True)
        module.model = make_causal_lm(model)
        return module

    def run() -> list[str]:
        torch.manual_seed(0)
        case = make_case("dp2 x tp2", "qwen3", "window", tp_plan=ODD_PLAN, zero_dp_strategy=zero_dp_strategy)
        check_parity(replace(case, make_module=make_module, make_model=partial(make_causal_lm, model)))
        return misaligned

    for names in KIND.run(run, ranks):
        assert bool(names) is (zero_dp_strategy > 0)
