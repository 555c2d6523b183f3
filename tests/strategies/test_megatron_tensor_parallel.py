"""Tensor parallelism under Megatron-FSDP: the numbers are those of one process, and tests notice if they are not.

The weights are rough. With the usual small ones, the gradients of norms are so small that a missing sum over the ranks
shows only after a step or two.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.cases import make_causal_lm_module
from helpers.family_parity import MEGATRON_LAYOUTS, measure_parity
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
OPTIMIZER = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
ROUGH = {"initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, **ROUGH},
    "gpt2": {**GPT2, **ROUGH},  # q, k, v and their biases are packed
    "qwen3": {**LLAMA, **ROUGH, "model_type": "qwen3", "head_dim": 8},  # norms of each rank's heads
}

SP = {"sequence_parallel": True}
BOTH = {"sequence_parallel": True, "loss_parallel": True}
SHARDS = {"init_fsdp_with_meta_device": True}
WINDOW = {"accumulate": 2, "clip": 0.1}

SEEDS = {"tp2, gpt2": 4}
"""The gradient of a key's bias is mathematically zero, and with seed 0, AdamW makes a step of its rounding."""

Cell = tuple[str, int, dict[str, int], dict[str, Any], dict[str, Any]]
"""Model, ranks, sizes beside ``tp_size=2``, flags, and options of the run."""

CELLS: dict[str, Cell] = {
    **{f"tp2, {model}": (model, 2, {}, {}, {}) for model in MODELS},
    **{f"dp2 x tp2, {model}": (model, 4, {}, {}, WINDOW) for model in MODELS},
    **{f"dp2 x tp2 + sp + loss, {model}": (model, 4, {}, BOTH, WINDOW) for model in MODELS},
    **{
        f"zero {zero}, {model}{', accumulate 2' if options else ''}": (
            model,
            4,
            {},
            {**BOTH, "zero_dp_strategy": zero},
            options,
        )
        for zero in (0, 1, 2)
        for model in MODELS
        for options in ({}, WINDOW)
    },
    **{f"cp2 x tp2, {model}": (model, 4, {"cp_size": 2}, BOTH, WINDOW) for model in MODELS},
    **{f"tied, {model}": (model, 4, {}, SP, {**WINDOW, "tied": True}) for model in MODELS},
    "tp2 + sp, tied, by shards": ("llama", 2, {}, {**SP, **SHARDS}, {"tied": True, "meta": True}),
    "recomputed": ("llama", 4, {}, {**SP, "activation_checkpointing": "full"}, WINDOW),
    "selective": ("qwen3", 4, {}, {**SP, "activation_checkpointing": "selective"}, WINDOW),
    "chunked loss": ("llama", 4, {}, BOTH, {**WINDOW, "loss": "chunked"}),
    "double buffer": ("llama", 4, {}, {**SP, "fsdp_double_buffer": True}, WINDOW),
    "sums": ("llama", 4, {}, {**SP, "calculate_per_token_loss": True}, WINDOW),
    "no buckets": ("llama", 4, {}, {**SP, "disable_bucketing": True, "report_nan_in_param_grad": True}, WINDOW),
    "no overlap": ("llama", 4, {}, {"overlap_grad_reduce": False, "overlap_param_gather": False}, WINDOW),
    **{f"by shards, {model}": (model, 4, {}, {**SP, **SHARDS}, {**WINDOW, "meta": True}) for model in MODELS},
    **{f"bf16-true, {model}": (model, 4, {}, SP, {**WINDOW, "precision": "bf16-true"}) for model in MODELS},
    **{f"bf16-mixed, {model}": (model, 4, {}, SP, {**WINDOW, "precision": "bf16-mixed"}) for model in MODELS},
    **{f"replicas, {model}": (model, 8, {"dp_replicate_size": 2}, BOTH, WINDOW) for model in MODELS},
    "replicas, by shards": ("llama", 8, {"dp_replicate_size": 2}, {**SP, **SHARDS}, {**WINDOW, "meta": True}),
    "replicas, zero 1": ("llama", 8, {"dp_replicate_size": 2}, {**SP, "zero_dp_strategy": 1}, {}),
}
SAMPLE = (
    "tp2, qwen3",
    "cp2 x tp2, qwen3",
    "tp2 + sp, tied, by shards",
)


def make_case(name: str, more_flags: dict[str, Any] | None = None) -> Case:
    model, _, sizes, flags, options = CELLS[name]
    options = {"accumulate": 1, "clip": None, "tied": False, "meta": False, "loss": "full", **options}
    config = {**MODELS[model], "tie_word_embeddings": options.pop("tied")}
    length = 16 if "cp_size" in sizes else 12
    return Case(
        make_module=partial(make_causal_lm_module, config, meta=options.pop("meta"), loss=options.pop("loss")),
        make_model=partial(make_causal_lm, config),
        loss=token_sum_loss,
        batches=make_token_batches(3 * options["accumulate"] * 4, length=length),
        strategy_class=MegatronFSDPStrategy,
        strategy={"tp_size": 2, **sizes, "config": MegatronFSDPConfig(**flags, **(more_flags or {}))},
        **options,
    )


def check(name: str) -> None:
    """Compare one cell with one process, on its ranks."""

    def run() -> None:
        torch.manual_seed(SEEDS.get(name, 0))
        check_parity(make_case(name))

    KIND.run(run, CELLS[name][1])


@pytest.mark.guarantees("megatron-tensor-parallel")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in CELLS]
)
def test_losses_gradients_norm_and_weights_are_those_of_one_process(name: str) -> None:
    check(name)


FAST = ("mixtral", "Megatron-FSDP, dp2 x tp2+sp, accumulate 2")
FAMILIES = ("mixtral", "qwen3_moe", "phi3", "deepseek_v3", "gpt_oss", "falcon", "gemma3_text")


@pytest.mark.guarantees("megatron-families")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) == FAST else pytest.mark.slow)
        for family in FAMILIES
        for layout in MEGATRON_LAYOUTS
    ],
)
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


def train_on_two_halves(zero_dp_strategy: int) -> None:
    """Two backwards of each step, both synchronised, on Qwen3: each of its ranks has norms of its own heads."""
    torch.manual_seed(0)
    model = make_causal_lm(MODELS["qwen3"])
    reference = deepcopy(model)
    config = MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy)
    mesh = create_device_mesh(config, tp_size=2)
    optimizers: list[Any] = [OPTIMIZER(each.parameters()) for each in (model, reference)]
    called, optimizers[0] = MegatronFSDPManager(config, mesh).parallelize(model, optimizers[0])
    for batch in make_token_batches(2, size=2, ragged=False):
        for ids in batch["input_ids"].split(1):
            for each in (called, reference):
                each(input_ids=ids, labels=ids).loss.backward()
        gradients = whole({name: parameter.grad for name, parameter in model.named_parameters()})
        assert_equal_gradients(gradients, {name: p.grad for name, p in reference.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("zero_dp_strategy", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_two_synchronised_backwards_add_up(zero_dp_strategy: int) -> None:
    KIND.run(train_on_two_halves, 2, zero_dp_strategy)


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


@pytest.mark.parametrize(
    ("change", "ranks", "zero_dp_strategy", "flags"),
    [
        (clip, 2, 3, {}),
        pytest.param(double, 4, 3, {}, marks=pytest.mark.slow),
        *(pytest.param(change, 4, zero, {}, marks=pytest.mark.slow) for change in (clip, double) for zero in (0, 2)),
        *(pytest.param(clear_some, 4, zero, {}, marks=pytest.mark.slow) for zero in (0, 2, 3)),
        *(pytest.param(clip, 4, zero, {"tp_plan": ODD_PLAN}, marks=pytest.mark.slow) for zero in (2, 3)),
    ],
)
def test_changes_of_gradients_between_two_backwards_are_kept(
    change: Callable[[nn.Module], Any], ranks: int, zero_dp_strategy: int, flags: dict[str, Any]
) -> None:
    KIND.run(change_between_backwards, ranks, change, zero_dp_strategy, flags)


def test_changes_that_are_lost_are_noticed() -> None:
    with patch.object(Driver, "_write_gradients_back"), pytest.raises(Exception, match="gradient"):
        KIND.run(change_between_backwards, 2, clip, 3, {})


@pytest.mark.guarantees("partial-gradients-are-summed-once")
def test_a_missing_sum_over_the_ranks_is_noticed() -> None:
    with patch.object(Lift, "_sum_aligned", lambda self, parameters: None), pytest.raises(Exception, match="step 1"):
        check("tp2, qwen3")


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
        (ODD, 4, 3),
        *(pytest.param(ODD, 4, zero, marks=pytest.mark.slow) for zero in (0, 1, 2)),
        pytest.param(ODD_ON_SOME, 6, 3, marks=pytest.mark.slow),
    ],
)
def test_gradients_whose_rows_lie_elsewhere_on_other_ranks_add_up(
    sizes: dict[str, int], ranks: int, zero_dp_strategy: int
) -> None:
    model = {**MODELS["qwen3"], **sizes}
    flags = {"tp_plan": ODD_PLAN, "zero_dp_strategy": zero_dp_strategy}
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
        case = make_case("dp2 x tp2, qwen3", flags)
        check_parity(replace(case, make_module=make_module, make_model=partial(make_causal_lm, model)))
        return misaligned

    for names in KIND.run(run, ranks):
        assert bool(names) is (zero_dp_strategy > 0)
