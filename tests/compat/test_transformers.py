"""A self-check of what the package takes for granted inside transformers. Each failure names what has moved.

Run it first with a new version: what fails here is the list of what is to be changed.
"""

import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.families import FAMILIES, MIXTURES_WITHOUT_PLAN, get_all_families, make_family_model
from helpers.models import GPT2, LLAMA, make_causal_lm
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    masking_utils,
)
from transformers.utils import output_capturing

from lightning_fsdp2.compat.transformers import (
    CACHE_NAMES,
    assume_unpacked_sequences,
    forget_attention,
    get_dtype_exceptions,
    install_output_hooks,
    is_cache,
    set_attention,
)
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.caches import is_filled
from lightning_fsdp2.startup.versions import CHECKED

IDS = torch.arange(3, 9)[None]


def make_mamba() -> Any:
    return MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=101, state_size=4))


@pytest.mark.parametrize("make", [lambda: make_causal_lm(LLAMA), lambda: make_causal_lm(GPT2), make_mamba])
def test_layers_take_their_cache_under_a_known_name(make: Any) -> None:
    model, found = make().eval(), {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(layer.forward).parameters)
        values = [*zip(names, args, strict=False), *kwargs.items()]
        found.update({name: value for name, value in values if is_cache(value)})

    for layer in find_structure(model).layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    model(IDS, use_cache=True)
    assert found, "layers get no cache with the method `get_seq_length`: `is_cache` of compat/transformers.py"
    unknown = found.keys() - {*CACHE_NAMES}
    assert not unknown, f"layers take their cache as {unknown}: add the name to `CACHE_NAMES` of compat/transformers.py"
    assert all(map(is_filled, found.values())), "a cache does not say that it is filled: `is_filled` of caches.py"


def test_a_model_makes_no_cache_when_it_is_told_not_to() -> None:
    output = make_causal_lm(LLAMA)(IDS, use_cache=False)
    made = [name for name, value in output.items() if is_cache(value)]
    assert not made, f"use_cache=False makes the cache {made}: pipeline/apply.py and context/forward.py rely on it"


def test_outputs_of_layers_are_captured_by_hooks_that_can_be_installed_early() -> None:
    assert hasattr(output_capturing, "maybe_install_capturing_hooks"), (
        "`install_output_hooks` of compat/transformers.py"
    )
    model: Any = make_family_model("mixtral")
    layers = [
        layer for layer in find_structure(model).layers if any("gate" in name for name, _ in layer.named_modules())
    ]
    install_output_hooks(model)
    logits = model(IDS, output_router_logits=True, use_cache=False).router_logits
    assert len(logits) == len(layers), "hooks that capture outputs are not those of `install_output_hooks`"


@pytest.mark.parametrize("family", ["deepseek_v3", "nemotron_h", "ernie4_5_moe", "hunyuan_v1_moe"])
def test_the_dtype_plan_says_what_is_kept_in_float32(family: str, tmp_path: Path) -> None:
    make_family_model(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    patterns = [pattern.replace("*", ".*") for pattern in get_dtype_exceptions(model, torch.bfloat16)]
    kept = {name for name, tensor in model.state_dict().items() if tensor.dtype is torch.float32}
    said = {name for name in model.state_dict() if any(re.search(pattern, name) for pattern in patterns)}
    assert kept == said != set(), (
        "`get_dtype_exceptions` of compat/transformers.py no longer says what stays in float32"
    )


def test_masks_and_attention_come_from_the_registered_functions() -> None:
    called = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        called.append("attention")
        return AttentionInterface()["sdpa"](*args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        called.append("mask")
        return AttentionMaskInterface()["sdpa"](*args, **kwargs)

    AttentionInterface.register("self_check", attend)
    AttentionMaskInterface.register("self_check", mask)
    try:
        model = make_causal_lm(LLAMA)
        set_attention(model.config, "self_check")
        model(IDS, use_cache=False)
    finally:
        forget_attention("self_check")
    layers = LLAMA["num_hidden_layers"]
    assert called == ["mask", *["attention"] * layers], "the seam of context/attention.py has moved"


def test_packed_sequences_are_searched_for_where_the_search_is_replaced() -> None:
    model: Any = make_causal_lm(LLAMA)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    find = masking_utils.find_packed_sequence_indices
    with patch.object(masking_utils, "find_packed_sequence_indices", side_effect=find) as search:
        packed = model(IDS, position_ids=positions, use_cache=False).logits
    assert search.called, "masks do not call `masking_utils.find_packed_sequence_indices`: `assume_unpacked_sequences`"
    with assume_unpacked_sequences():
        assert not torch.equal(packed, model(IDS, position_ids=positions, use_cache=False).logits)


@pytest.mark.parametrize(
    "name",
    [
        "_adjust_missing_and_unexpected_keys",
        "_finalize_model_loading",
        "_from_config",
        "_get_dtype_plan",
        "_init_weights",
        "_is_stateful",
        "_keys_to_ignore_on_save",
        "_load_pretrained_model",
        "_supports_attention_backend",
    ],
)
def test_a_model_has_the_private_names_that_the_package_uses(name: str) -> None:
    assert hasattr(PreTrainedModel, name), f"PreTrainedModel has no {name}: see its use in compat/transformers.py"


def test_a_layer_that_checkpoints_itself_says_so() -> None:
    model: Any = make_causal_lm(LLAMA)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    assert any(vars(module).get("gradient_checkpointing") for module in model.modules()), (
        "the attribute that `apply_activation_checkpointing` reads has moved"
    )


def test_the_newest_version_has_every_family_of_the_tests() -> None:
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < CHECKED:
        pytest.skip("an older transformers lacks some families")
    missing = (FAMILIES | MIXTURES_WITHOUT_PLAN).keys() - {*get_all_families()}
    assert not missing, f"transformers {transformers.__version__} no longer has {sorted(missing)}"
