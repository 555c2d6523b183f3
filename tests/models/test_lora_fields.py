"""Every field of peft's LoraConfig either does on a mesh what it does in one process, or is refused by its name."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lora import LORA, assert_equal_tensors, fit, get_weights, make_module, make_plain, save_base
from helpers.mesh_runs import Case, train_alone, train_on_mesh
from helpers.models import make_token_batches
from helpers.oracle import assert_equal_runs, token_sum_loss
from helpers.ranks import run_ranks
from peft import LoraConfig

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy
from lightning_fsdp2.models.lora import _FIELDS, build_lora_config

TP: dict[str, Any] = {"tp_size": 2, "config": FSDP2Config(sequence_parallel=True)}
QV = {"target_modules": ["q_proj", "v_proj"]}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "targets": ("llama", TP, {"r": 3, "lora_alpha": 5, "target_modules": r".*\.(q|o|up)_proj"}),
    "excluded": ("llama", TP, {"target_modules": "all-linear", "exclude_modules": ["q_proj"], "use_rslora": True}),
    "one-layer": ("llama", TP, {**QV, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "patterns": ("llama", TP, {**QV, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "kept-head": ("llama", TP, {**QV, "modules_to_save": ["lm_head"]}),
    "kept-embedding": ("llama", {}, {**QV, "modules_to_save": ["embed_tokens"]}),
    "kept-tie": ("gpt2", {}, {"target_modules": ["c_attn"], "modules_to_save": ["wte"], "ensure_weight_tying": True}),
    "embedding": ("llama", {}, {"target_modules": ["embed_tokens", "down_proj"]}),
    "biases": ("gpt2", TP, {"target_modules": ["c_attn", "c_proj"], "bias": "all", "fan_in_fan_out": True}),
    "own-biases": ("gpt2", TP, {"target_modules": ["c_fc"], "bias": "lora_only", "fan_in_fan_out": True}),
    "lora-bias": ("gpt2", {}, {"target_modules": ["c_fc"], "lora_bias": True, "fan_in_fan_out": True}),
    "gaussian": ("llama", TP, {**QV, "init_lora_weights": "gaussian"}),
    "peft-begins": ("llama", TP, {**QV, "init_lora_weights": True}),
    "no-dropout": ("llama", TP, {**QV, "lora_dropout": 0.0}),
}


ON_FOUR_RANKS = {"targets", "kept-head", "biases"}
"""Those of an adapter whose rank does not divide among data parallel ranks, of whole weights, and of biases."""


@pytest.mark.guarantees("every-field-of-lora")
def test_each_field_is_in_the_table() -> None:
    assert {field for _, _, fields in CASES.values() for field in (*LORA, *fields)} == {*_FIELDS}


@pytest.mark.guarantees("lora-gradients-and-exports", "every-field-of-lora")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, tmp_path: Path) -> None:
    family, strategy, fields = CASES[case]
    base, lora = save_base(tmp_path / "base", family), {**LORA, **fields}
    ranks = 4 if case in ON_FOUR_RANKS else 2

    def run() -> None:
        case = Case(
            make_module=lambda: make_module(base, family, lora=lora),
            make_model=lambda: make_plain(base, family, lora=lora),
            loss=token_sum_loss,
            batches=make_token_batches(6),
            strategy=strategy,
        )
        actual = train_on_mesh(case)
        if torch.distributed.get_rank() == 0:
            assert_equal_runs(actual, train_alone(case, actual.initial, ranks // strategy.get("tp_size", 1)))

    run_ranks(run, ranks)


@pytest.mark.slow
def test_dropout_is_the_same_on_all_ranks_that_share_a_batch_and_leaves_the_adapters_whole(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")

    def run(dropout: float) -> dict[str, Any]:
        torch.manual_seed(0)
        module = make_module(base, lora={**LORA, **QV, "lora_dropout": dropout})
        fit(module, FSDP2Strategy(**TP))
        return get_weights(module)

    (first, again, plain), (other, *_) = run_ranks(lambda: [run(0.5), run(0.5), run(0.0)], 2)
    assert_equal_tensors(first, other)
    assert_equal_tensors(first, again)
    assert all(not torch.equal(first[name], plain[name]) for name in plain if "lora_" in name)


OTHERS = [field.name for field in dataclasses.fields(LoraConfig) if field.name not in _FIELDS]


@pytest.mark.guarantees("every-field-of-lora")
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_field_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^CausalLM\(lora=\{{\.\.\.\}}\): {name}='other' (is|would) .*\.$"):
        build_lora_config({name: "other"})


def test_what_training_does_not_depend_on_may_be_said() -> None:
    config = build_lora_config({"task_type": None, "peft_type": "LORA", "inference_mode": False})
    assert (config.task_type, config.inference_mode) == ("CAUSAL_LM", False)
