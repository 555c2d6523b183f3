"""Descriptions of Hugging Face models, from which a checkpoint's reader builds them again."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import GPT2, LLAMA, add_adapters, make_causal_lm
from helpers.ranks import run_ranks
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.weights.description import (
    add_described_adapters,
    build_hf_skeleton,
    describe_hf_models,
    restore_generation_configs,
)

TIED = {**LLAMA, "tie_word_embeddings": True}


class Own(LlamaForCausalLM):
    """A user's class."""


def make_pair() -> nn.Module:
    pair = nn.ModuleDict({"student": make_causal_lm(TIED), "teacher": make_causal_lm(GPT2)})
    pair["student"].generation_config.max_new_tokens = 7
    pair["teacher"].generation_config = None
    return pair


def test_each_model_is_described_and_built_again() -> None:
    pair = make_pair()
    descriptions = describe_hf_models(pair, SimpleNamespace(name_or_path="org/tokenizer"))
    assert [[d["path"], d["class"], d["tied"]] for d in descriptions] == [
        ["student", "LlamaForCausalLM", ["lm_head.weight"]],
        ["teacher", "GPT2LMHeadModel", ["lm_head.weight"]],
    ]
    assert [d["tokenizer"] for d in descriptions] == ["org/tokenizer"] * 2
    assert not any(d["has_adapters"] or d["adapters"] or d["weight_conversions"] for d in descriptions)
    assert json.loads(json.dumps(descriptions)) == descriptions
    for description, model in zip(descriptions, pair.values(), strict=True):
        skeleton = build_hf_skeleton(description)
        assert type(skeleton) is type(model)
        assert skeleton.config.to_dict() == model.config.to_dict()
        assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
        assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert build_hf_skeleton(descriptions[0]).generation_config.max_new_tokens == 7


def test_generation_configs_come_back_where_there_were_some() -> None:
    descriptions = describe_hf_models(make_pair())
    pair = make_pair()
    pair["student"].generation_config.max_new_tokens = 1
    pair["teacher"].generation_config = kept = object()
    restore_generation_configs(pair, [*descriptions, {**descriptions[0], "path": "gone"}])
    assert pair["student"].generation_config.max_new_tokens == 7
    assert pair["teacher"].generation_config is kept


def test_a_users_own_class_has_its_whole_name_and_is_not_built() -> None:
    [description] = describe_hf_models(Own(make_causal_lm(LLAMA).config))
    assert description["class"] == f"{Own.__module__}.Own"
    for name in (description["class"], "Trainer", "__version__"):
        with pytest.raises(ValueError, match=f"The checkpoint holds a {name}, but the installed transformers .*has no"):
            build_hf_skeleton({**description, "class": name})


def test_conversions_of_names_are_those_that_the_model_used() -> None:
    model: Any = make_causal_lm({**LLAMA, "model_type": "mixtral", "num_local_experts": 2})
    known = get_model_conversion_mapping(model)
    assert len(known) > 1
    model._weight_conversions = known[:1]
    [description] = describe_hf_models(model)
    assert len(description["weight_conversions"]) == 1
    [used] = build_hf_skeleton(description)._weight_conversions
    assert used.compiled_sources.pattern == known[0].compiled_sources.pattern


def untie(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def test_tied_weights_are_those_that_are_still_tied() -> None:
    assert describe_hf_models(make_causal_lm(LLAMA))[0]["tied"] == []
    assert describe_hf_models(untie(make_causal_lm(TIED)))[0]["tied"] == []
    assert describe_hf_models(add_adapters(make_causal_lm(TIED)))[0]["tied"] == ["lm_head.weight"]


def test_each_stage_of_a_pipeline_describes_the_whole_model() -> None:
    def run() -> Any:
        manager = FSDP2Manager(FSDP2Config(), create_device_mesh(pp_size=2, device_type="cpu"))
        return [describe_hf_models(manager.parallelize(make())) for make in makers]

    makers = [lambda: make_causal_lm(TIED), lambda: untie(make_causal_lm(TIED))]
    assert run_ranks(run, 2) == [[describe_hf_models(make()) for make in makers]] * 2


def test_one_adapter_of_low_rank_is_built_again() -> None:
    model: Any = add_adapters(make_causal_lm(LLAMA), target_modules=["q_proj", "v_proj"], lora_alpha=5)
    [description] = describe_hf_models(nn.ModuleDict({"model": model}))
    assert description["path"] == "model.base_model.model"
    assert description["has_adapters"]
    built: Any = add_described_adapters(build_hf_skeleton(json.loads(json.dumps(description))), description)
    shapes, expected = ({name: value.shape for name, value in m.state_dict().items()} for m in (built, model))
    assert shapes == expected
    assert built.peft_config["default"].lora_alpha == 5
    assert {p.dtype for p in built.parameters()} == {torch.float32}

    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    [description] = describe_hf_models(model)
    assert description["adapters"].keys() == {"default", "second"}
    assert add_described_adapters(build_hf_skeleton(description), description) is None


def test_adapters_of_another_kind_are_only_mentioned() -> None:
    model = get_peft_model(make_causal_lm(LLAMA), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    [description] = describe_hf_models(model)
    assert (description["has_adapters"], description["adapters"]) == (True, {})
    assert add_described_adapters(build_hf_skeleton(description), description) is None
