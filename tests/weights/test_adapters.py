"""What is known of peft's adapters: the model without them, and the names of both."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.models import GPT2, LLAMA, add_adapters, make_causal_lm, make_token_batches
from peft import get_peft_model_state_dict

from lightning_fsdp2.weights import adapters
from lightning_fsdp2.weights.adapters import check_peft, get_adapter_names, get_plain_names, without_adapters

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all-linear": (LLAMA, {"target_modules": "all-linear"}),
    "kept": (LLAMA, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "embedding": (LLAMA, {"target_modules": ["embed_tokens", "v_proj"]}),
    "biases": (GPT2, {"target_modules": ["c_attn"], "bias": "lora_only", "fan_in_fan_out": True}),
}

IN_PART_SLOW = [pytest.param(case, marks=pytest.mark.slow) if case == "all-linear" else case for case in CASES]


@pytest.mark.parametrize("case", IN_PART_SLOW)
def test_a_model_is_itself_without_its_adapters_and_gets_them_back(case: str) -> None:
    config, options = CASES[case]
    model: Any = make_causal_lm(config)
    plain = {name: id(parameter) for name, parameter in model.named_parameters()}
    tokens = make_token_batches(1)[0]["input_ids"]
    expected = model.eval()(input_ids=tokens).logits
    adapted = add_adapters(model, **options).eval()
    names = [name for name, _ in adapted.named_parameters()]
    logits = adapted(input_ids=tokens).logits
    assert not torch.equal(logits, expected)
    with without_adapters(model):
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == plain
        assert torch.equal(model(input_ids=tokens).logits, expected)
    assert [name for name, _ in adapted.named_parameters()] == names
    assert torch.equal(adapted(input_ids=tokens).logits, logits)
    found = get_plain_names(model)
    parameters = dict(model.named_parameters())
    assert {found[name]: id(parameters[name]) for name in found if name in parameters} == plain


@pytest.mark.parametrize("case", IN_PART_SLOW)
def test_names_in_files_are_those_of_peft(case: str) -> None:
    config, options = CASES[case]
    adapted: Any = add_adapters(make_causal_lm(config), **options)
    if "bias" not in options:  # of which peft lets one adapter only have some
        adapted.add_adapter("second", adapted.peft_config["default"])
    for adapter in adapted.peft_config:
        stored = get_peft_model_state_dict(adapted, adapter_name=adapter, save_embedding_layers=False)
        own = adapted.state_dict()
        names = get_adapter_names(adapted, adapter)
        assert sorted(names.values()) == sorted(stored)
        assert all(torch.equal(own[name], stored[key]) for name, key in names.items())


@pytest.mark.parametrize("version", ["0.20.1", "0.21.0rc1", "1.0"])
def test_a_version_of_peft_that_passes_over_hooks_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "version", lambda name: version)
    check_peft(make_causal_lm(LLAMA))  # which has no adapters
    model = torch.nn.ModuleDict({"model": add_adapters(make_causal_lm(LLAMA), target_modules=["q_proj"])})
    is_old = version == "0.20.1"
    with pytest.raises(ImportError, match=r"peft 0\.20\.1 is too old .*\[lora\]") if is_old else nullcontext():
        check_peft(model)
