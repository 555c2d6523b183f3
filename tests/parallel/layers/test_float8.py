"""Linear layers in float8: bitwise those of torchao, in place, and no more of them than can be."""

import copy
import importlib.metadata
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.collectives import StepCounter
from helpers.compiler import needs_compiler
from helpers.float8 import RECIPES, WIDE_LLAMA, MatrixProducts, convert, make_reference
from helpers.models import GPT2, add_adapters, make_causal_lm
from helpers.oracle import assert_equal_gradients, make_config
from helpers.ranks import raises_on_all_ranks, run_ranks
from helpers.tensor_parallel import get_gradients
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from lightning_fsdp2 import Float8Config, FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.compat.torchao import Casts, FusedCasts, check_torchao
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.layers.float8 import Float8Layer, apply_float8, choose_float8
from lightning_fsdp2.parallel.layers.float8_conversion import Conversion, get_optional_conversion, is_small

CPU = torch.device("cpu")
LINEARS = [
    f"model.layers.{layer}.{part}"
    for layer in range(2)
    for part in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
]


def make_layer(recipe: str, *, emulate: bool = True, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    wrap_method(linear, Float8Layer(linear, Casts(recipe, emulate=emulate)))
    return linear


def make_swapped(linear: nn.Linear, recipe: str, *, emulate: bool) -> nn.Module:
    """The same layer as torchao makes it."""
    plain = nn.Linear(64, 48, bias=linear.bias is not None)
    plain.load_state_dict(linear.state_dict())
    return convert(nn.Sequential(plain), recipe, is_converted=bool, emulate=emulate)


def compute(
    module: nn.Module, rows: int = 32, *, dtype: torch.dtype = torch.float32, autocast: bool = False
) -> list[Tensor]:
    """The output for some input of ``dtype``, and the gradients of the input and of the parameters."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, rows // 2, 64, generator=generator).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = module(hidden.to(dtype))
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return [output, hidden.grad, *(parameter.grad for parameter in module.parameters())]


# ---------------------------------------------------------------------- one layer


@pytest.mark.guarantees("float8")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "in float8"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_bitwise_that_of_torchao(recipe: str, emulate: bool, bias: bool) -> None:
    layer = make_layer(recipe, emulate=emulate, bias=bias)
    swapped = make_swapped(layer, recipe, emulate=emulate)
    for actual, expected in zip(compute(layer), compute(swapped), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_rounds_the_input_and_not_the_weight(recipe: str) -> None:
    layer = make_layer(recipe)
    swapped = make_swapped(layer, recipe, emulate=True)
    actual = compute(layer, autocast=True)
    assert [tensor.dtype for tensor in actual] == [torch.bfloat16, *[torch.float32] * 3]
    for one, other in zip(actual, compute(swapped, dtype=torch.bfloat16), strict=True):
        assert torch.equal(one, other)


@pytest.mark.guarantees("frozen-products")
@pytest.mark.parametrize(
    ("recipe", "trained", "frozen"),
    [
        ("rowwise_with_gw_hp", {"_scaled_mm": 2, "mm": 1}, {"_scaled_mm": 2}),
        ("rowwise", {"_scaled_mm": 3}, {"_scaled_mm": 2}),
        ("tensorwise", {"_scaled_mm": 3}, {"_scaled_mm": 2}),
    ],
)
def test_a_frozen_weight_costs_no_product(recipe: str, trained: dict[str, int], frozen: dict[str, int]) -> None:
    layer = make_layer(recipe, emulate=False, bias=False)
    with MatrixProducts() as products:
        compute(layer)
    assert products.counts == trained
    layer.weight.requires_grad_(False)
    with MatrixProducts() as products:
        compute(layer)
    assert products.counts == frozen


def test_an_input_without_gradient_costs_no_product() -> None:
    layer = make_layer("tensorwise", emulate=False, bias=False)
    with MatrixProducts() as products:
        layer(torch.ones(16, 64)).sum().backward()
    assert products.counts == {"_scaled_mm": 2}


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_of_tokens_that_kernels_do_not_take_are_padded(recipe: str, rows: int) -> None:
    padded, emulated = compute(make_layer(recipe, emulate=False), rows), compute(make_layer(recipe), rows)
    for actual, expected in zip(padded, emulated, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.01, atol=0.01 * expected.abs().max().item())


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_token_has_no_gradient(recipe: str) -> None:
    """Experts may get none."""
    layer = make_layer(recipe, emulate=False)
    output, of_input, of_weight, _ = compute(layer, 0)
    assert output.shape == (2, 0, 48)
    assert of_input.shape == (2, 0, 64)
    assert not of_weight.any()


def test_inputs_of_another_dtype_get_the_error_of_torch() -> None:
    linear = make_layer("rowwise").bfloat16()
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        linear(torch.zeros(2, 64))


@pytest.mark.parametrize(("recipe", "rounds"), [("rowwise", True), ("rowwise_with_gw_hp", True), ("tensorwise", False)])
def test_which_recipes_round_results_to_bfloat16(recipe: str, rounds: bool) -> None:
    """Of what a layer computes in float32; this is torchao's doing, for its kernels."""
    output, *_ = compute(make_layer(recipe, emulate=False, bias=False))
    assert torch.equal(output, output.bfloat16().float()) == rounds


def test_inputs_of_another_size_get_the_error_of_torch() -> None:
    """By which tensor parallelism recognises a plan that does not fit."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        make_layer("rowwise")(torch.ones(16, 48))


def test_a_layer_keeps_its_class_hooks_mode_and_names() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).eval()
    calls: list[str] = []
    linear.register_forward_hook(lambda *_: calls.append("hook"))
    names = list(linear.state_dict())
    wrap_method(linear, Float8Layer(linear, Casts("rowwise", emulate=True)))
    linear(torch.ones(16, 64))
    assert calls == ["hook"]
    assert isinstance(linear, nn.Linear)
    assert not linear.training
    assert list(linear.state_dict()) == names


@pytest.mark.guarantees("compiled-float8")
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_layer_multiplies_in_float8(recipe: str) -> None:
    torch.compiler.reset()
    plain = nn.Sequential(make_layer(recipe, emulate=False, bias=False))
    expected = compute(plain)
    compiled = nn.Sequential(make_layer(recipe, emulate=False, bias=False))
    compiled.compile(fullgraph=True)
    compute(compiled)
    compiled.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        actual = compute(compiled)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::_scaled_mm"] == (2 if recipe == "rowwise_with_gw_hp" else 3)
    assert "aten::amax" not in counts  # as a kernel of inductor
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * other.abs().max().item())


def test_simulated_casts_have_the_form_of_real_ones() -> None:
    matrix = torch.randn(32, 64)
    for recipe in RECIPES:
        casts, fused = Casts(recipe, emulate=False), FusedCasts(recipe, emulate=False)
        for name in ("cast_input", "cast_weight", "cast_weight_for_input", "cast_output_gradient_for_weight"):
            real, simulated = getattr(casts, name)(matrix), getattr(fused, name)(matrix)
            assert type(real) is type(simulated)
            if real is not matrix:
                assert simulated._data.dtype == real._data.dtype
                assert simulated._scale.shape == real._scale.shape
                assert simulated._scale.dtype == real._scale.dtype


# ---------------------------------------------------------------------- which layers


def convert_in_place(model: nn.Module, **options: Any) -> Conversion:
    structure = find_structure(model)
    apply_float8(structure, choose_float8(structure, Float8Config(**{"emulate": True, **options}), CPU, {}))
    conversion = get_optional_conversion(model)
    assert conversion is not None
    return conversion


def apply(model: nn.Module, **options: Any) -> Conversion:
    """Convert a model in one process, and return what was done."""
    return run_ranks(lambda: convert_in_place(model, **options), 1)[0]


@pytest.mark.guarantees("float8")
def test_all_linear_layers_but_the_head_are_converted() -> None:
    conversion = apply(make_causal_lm(WIDE_LLAMA), emulate=False)
    assert conversion.converted == LINEARS
    assert conversion.left_out == {"lm_head": "output head"}
    assert conversion.describe() == (
        "14 linear layers multiply in float8 (rowwise_with_gw_hp), but not lm_head (output head)."
    )
    assert replace(conversion, is_emulated=True).describe().startswith("14 linear layers emulate float8 in float32 (")


def test_skip_names_the_layers_that_are_left_out() -> None:
    conversion = apply(make_causal_lm(WIDE_LLAMA), skip=["model.layers.*.mlp.down_proj", "lm_head"])
    assert conversion.left_out == {
        "model.layers.0.mlp.down_proj": "skip=model.layers.*.mlp.down_proj",
        "model.layers.1.mlp.down_proj": "skip=model.layers.*.mlp.down_proj",
        "lm_head": "skip=lm_head",
    }
    assert len(conversion.converted) == 12


def test_an_empty_skip_leaves_out_no_head_whose_size_fits() -> None:
    conversion = apply(make_causal_lm({**WIDE_LLAMA, "vocab_size": 112}), skip=[])
    assert conversion.converted == [*LINEARS, "lm_head"]
    assert conversion.left_out == {}
    odd = apply(make_causal_lm(WIDE_LLAMA), skip=[])
    assert odd.left_out == {"lm_head": "sizes are not multiples of 16"}


@pytest.mark.guarantees("frozen-products")
def test_adapters_stay_and_their_base_layers_do_not() -> None:
    conversion = apply(add_adapters(make_causal_lm(WIDE_LLAMA), target_modules=["q_proj", "lm_head"]))
    assert "model.layers.0.self_attn.q_proj.base_layer" in conversion.converted
    assert conversion.left_out["model.layers.0.self_attn.q_proj.lora_A.default"] == "adapter"
    assert conversion.left_out["lm_head.base_layer"] == "output head"
    assert len(conversion.converted) == 14


ROUTERS = {
    # packed experts, and a router with a linear layer
    "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 2, "head_dim": 16},
    # a list of experts
    "switch_transformers": {"num_experts": 16, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2},
}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_stay(family: str) -> None:
    config = {**WIDE_LLAMA, "model_type": family, **ROUTERS[family]}
    auto = AutoModelForSeq2SeqLM if family == "switch_transformers" else AutoModelForCausalLM
    model = auto.from_config(make_config(config))
    routers = [name for name, module in model.named_modules() if getattr(module, "out_features", None) == 16]
    assert len(routers) >= 2
    left_out = apply(model).left_out
    assert {left_out[name] for name in routers} == {"router"}


def test_a_router_of_several_layers_stays_whole() -> None:
    """It has an output more than there are experts, for tokens that go to none."""
    config = {**WIDE_LLAMA, "model_type": "zaya", "num_experts": 15, "head_dim": 16, "router_hidden_size": 32}
    conversion = apply(AutoModelForCausalLM.from_config(make_config(config)))
    inside = {name: reason for name, reason in conversion.left_out.items() if ".gate." in name}
    assert len(inside) >= 4
    assert set(inside.values()) == {"router"}
    assert not any(".gate." in name for name in conversion.converted)


def test_routers_stay_under_expert_parallelism() -> None:
    config = {**WIDE_LLAMA, "model_type": "hunyuan_v1_moe", **ROUTERS["hunyuan_v1_moe"]}

    def run() -> Conversion:
        flags = FSDP2Config(float8=Float8Config(emulate=True))
        model = AutoModelForCausalLM.from_config(make_config(config))
        return get_optional_conversion(FSDP2Manager(flags, create_device_mesh(flags, ep_size=2)).parallelize(model))

    left_out = run_ranks(run, 2)[0].left_out
    assert sorted(left_out.values()) == ["output head", "router", "router"]


@pytest.mark.guarantees("float8-limits")
def test_packed_experts_stay() -> None:
    config = {**WIDE_LLAMA, "model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2}
    conversion = apply(AutoModelForCausalLM.from_config(make_config(config)))
    assert {name.split(".")[-1] for name in conversion.converted} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_layers_that_peft_saves_whole_and_magnitudes_of_dora() -> None:
    model = make_causal_lm({**WIDE_LLAMA, "vocab_size": 112})
    conversion = apply(add_adapters(model, target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True))
    assert len(conversion.converted) == 14
    assert {name for name, reason in conversion.left_out.items() if reason == "output head"} == {
        "lm_head.original_module",
        "lm_head.modules_to_save.default",
    }


def test_skip_knows_a_layer_with_an_adapter_by_its_earlier_name() -> None:
    model = add_adapters(make_causal_lm(WIDE_LLAMA), target_modules=["q_proj"])
    left_out = apply(model, skip=["lm_head", "model.layers.*.self_attn.q_proj"]).left_out
    assert left_out["model.layers.0.self_attn.q_proj.base_layer"] == "skip=model.layers.*.self_attn.q_proj"


def test_the_head_of_a_classifier_stays() -> None:
    model = AutoModelForSequenceClassification.from_config(make_config({**WIDE_LLAMA, "num_labels": 16}))
    conversion = apply(model)
    assert conversion.left_out == {"score": "output head"}
    assert conversion.converted == LINEARS


def test_layers_beside_a_model_and_in_metrics_stay() -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_causal_lm(WIDE_LLAMA)
            self.reward = nn.Linear(64, 16)
            self.metric = MetricOfLayer()

    conversion = apply(Module())
    assert conversion.left_out == {"lm_head": "output head", "reward": "outside of the Hugging Face model"}


class MetricOfLayer(MeanMetric):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(64, 64)


def test_names_of_several_models_are_those_within_the_module() -> None:
    module = nn.ModuleDict({"policy": make_causal_lm(WIDE_LLAMA), "reference": make_causal_lm(WIDE_LLAMA)})
    conversion = apply(module, skip=["policy.lm_head", "reference.lm_head", "policy.model.layers.0.mlp.up_proj"])
    assert len(conversion.converted) == 2 * 14 - 1
    assert "reference.model.layers.0.mlp.up_proj" in conversion.converted
    assert conversion.left_out["policy.model.layers.0.mlp.up_proj"] == "skip=policy.model.layers.0.mlp.up_proj"


def test_a_tied_head_multiplies_in_float8_if_asked() -> None:
    model = make_causal_lm({**WIDE_LLAMA, "vocab_size": 112, "tie_word_embeddings": True})
    assert "lm_head" in apply(model, skip=[]).converted
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_layer_that_computes_its_weight_keeps_doing_so() -> None:
    """Such as a pruned one, whose weight is no parameter."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    torch.nn.utils.prune.l1_unstructured(linear, "weight", amount=0.5)
    wrap_method(linear, Float8Layer(linear, Casts("rowwise", emulate=True)))
    plain = nn.Linear(64, 48)
    plain.load_state_dict({"weight": linear.weight_orig * linear.weight_mask, "bias": linear.bias})
    expected = make_swapped(plain, "rowwise", emulate=True)
    hidden = torch.randn(16, 64)
    assert torch.equal(linear(hidden), expected(hidden))


def test_a_forward_of_an_instance_is_kept() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].forward = lambda hidden: hidden
    assert apply(model).left_out == {"0": "forward of its own"}


@pytest.mark.parametrize(
    ("recipe", "shape", "expected"),
    [
        ("rowwise", (4096, 4096), False),
        ("rowwise", (2048, 8192), True),
        ("rowwise", (8192, 1024), True),
        ("rowwise", (4096, 2048), True),
        ("rowwise_with_gw_hp", (4096, 4096), False),
        ("rowwise_with_gw_hp", (2048, 8192), True),
        ("tensorwise", (1024, 4096), True),
        ("tensorwise", (2048, 2048), False),
        ("tensorwise", (1024, 8192), False),
    ],
)
def test_small_layers_are_those_of_torchao(recipe: str, shape: tuple[int, int], expected: bool) -> None:
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    assert is_small(torch.Size(shape), recipe) == expected
    if recipe != "rowwise_with_gw_hp":
        linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        assert _auto_filter_for_recipe(recipe, [])(linear, "layer") != expected


def test_small_layers_are_left_out_if_asked() -> None:
    model = nn.Sequential(nn.Linear(4096, 8192, device="meta"), nn.Linear(8192, 1024, device="meta"))
    assert apply(model, filter_small=True).left_out == {"1": "small"}
    model = nn.Sequential(nn.Linear(4096, 8192, device="meta"), nn.Linear(8192, 1024, device="meta"))
    kept = apply(model)
    assert kept.converted == ["0", "1"]
    assert kept.small == ["1"]


# ---------------------------------------------------------------------- what is refused


@pytest.mark.guarantees("nothing-to-convert")
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (WIDE_LLAMA, {"skip": ["head"]}, r"float8\.skip: 'head' matches no linear layer of LlamaForCausalLM; use"),
        (
            GPT2,
            {},
            r"no linear layer of GPT2LMHeadModel is left to multiply in float8\. Left out are lm_head \(output head\)\."
            r" Use float8=None\.$",
        ),
        (
            WIDE_LLAMA,
            {"filter_small": True},
            r"14 layers such as model\.layers\.0\.self_attn\.q_proj \(small\).* Use filter_small=False or float8=None",
        ),
        (WIDE_LLAMA, {"skip": ["model.layers.*.*.*", "lm_head"]}, r"Use a shorter skip or float8=None\.$"),
    ],
)
def test_what_converts_nothing_is_refused(model: dict[str, Any], options: dict[str, Any], message: str) -> None:
    """On every rank, before weights are sent."""

    def run() -> int:
        counter = StepCounter()
        with pytest.raises(ValueError, match=message), counter:
            parallelize(make_causal_lm(model), float8=Float8Config(emulate=True, **options))
        return counter.collectives.total()

    assert run_ranks(run, 2) == [0, 0]


@pytest.mark.parametrize(("found", "said"), [(None, "none is installed"), ("0.17.0", "version 0.17.0 is installed")])
def test_another_torchao_is_refused(found: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("lightning_fsdp2.compat.torchao.version", get_version)
    structure = find_structure(make_causal_lm(WIDE_LLAMA))
    with pytest.raises(ValueError, match=rf"^float8 needs torchao 0\.18\.0, but {said}; run `pip install torchao==0"):
        choose_float8(structure, Float8Config(emulate=True), CPU, {})


def test_a_build_of_torchao_for_a_version_of_cuda_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fsdp2.compat.torchao.version", lambda name: "0.18.0+cu130")
    check_torchao()


@pytest.mark.guarantees("devices-of-float8")
def test_a_device_without_units_for_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    structure = find_structure(make_causal_lm(WIDE_LLAMA))
    with pytest.raises(ValueError, match=r"^float8: the device cpu cannot multiply in float8, .*emulate=True"):
        choose_float8(structure, Float8Config(), CPU, {})


# ---------------------------------------------------------------------- with tensor parallelism and checkpoints


def parallelize(model: nn.Module, *, tp_size: int = 1, **flags: Any) -> Any:
    config = FSDP2Config(float8=flags.pop("float8", Float8Config(emulate=True)), **flags)
    return FSDP2Manager(config, create_device_mesh(config, tp_size=tp_size)).parallelize(model)


def test_sizes_are_those_of_shards() -> None:
    """Heads of 8 elements, of which each of two ranks has one pair: keys and values are not multiples of 16 there."""
    config = {**WIDE_LLAMA, "hidden_size": 32, "num_key_value_heads": 2}

    def run() -> Conversion:
        return get_optional_conversion(parallelize(make_causal_lm(config), tp_size=2))

    left_out = run_ranks(run, 2)[0].left_out
    assert left_out == {
        **{name: "sizes of shards are not multiples of 16" for name in LINEARS if name[-6:] in ("k_proj", "v_proj")},
        "lm_head": "output head",
    }


def test_a_tied_head_that_stays_whole_is_judged_by_its_whole_size() -> None:
    """The plan shards the head and not the embedding, so neither is sharded: 112 rows, of which half are 56."""

    def run() -> Conversion:
        model = make_causal_lm({**WIDE_LLAMA, "vocab_size": 112, "tie_word_embeddings": True})
        plan = {"lm_head": "colwise_gather_output", "model.embed_tokens": "replicate"}
        return get_optional_conversion(
            parallelize(model, tp_size=2, tp_plan=plan, float8=Float8Config(skip=[], emulate=True))
        )

    assert "lm_head" in run_ranks(run, 2)[0].converted


def test_layers_with_a_style_of_torch_are_left_out() -> None:
    def run() -> Conversion:
        plan = {"model.layers.*.mlp.gate_proj": ColwiseParallel(use_local_output=False)}
        model = parallelize(make_causal_lm(WIDE_LLAMA), tp_size=2, tp_plan=plan)
        return get_optional_conversion(model)

    reasons = run_ranks(run, 2)[0].left_out
    assert reasons["model.layers.0.mlp.gate_proj"] == "tensor parallelism by a style of torch's own"


def test_a_wrong_plan_is_still_refused() -> None:
    """The MLP's result is summed twice."""
    plan = {
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.mlp": "all_reduce",
    }

    def run() -> None:
        model = parallelize(make_causal_lm(WIDE_LLAMA), tp_size=2, tp_plan=plan)
        assert len(get_optional_conversion(model).converted) == 14
        tokens = torch.randint(3, 101, (2, 16), generator=torch.Generator().manual_seed(0))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    with raises_on_all_ranks(ValueError, match=r"a value that differs between ranks .* is used as if it were equal"):
        run_ranks(run, 2)


@pytest.mark.guarantees("compiled-float8")
@pytest.mark.parametrize(("mode", "repeated"), [(False, 0), ("selective", 2 * 3), ("full", 2 * 7)])
def test_checkpointing_repeats_products_in_float8_as_it_does_others(mode: Any, repeated: int) -> None:
    """Full: all seven of a layer, though backward needs no result of the last: torch sees too late what it saves."""
    tokens = torch.randint(3, 101, (2, 16), generator=torch.Generator().manual_seed(0))

    def run() -> int:
        model = parallelize(
            make_causal_lm(WIDE_LLAMA), float8=Float8Config(recipe="rowwise"), activation_checkpointing=mode
        )
        with MatrixProducts() as products:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return products.counts["_scaled_mm"]

    assert run_ranks(run, 1)[0] == 14 * 3 + repeated


@pytest.mark.slow
def test_compiled_layers_repeat_the_same_products(compile_without_code: None) -> None:
    tokens = torch.randint(3, 101, (2, 16), generator=torch.Generator().manual_seed(0))

    def run() -> int:
        model = parallelize(
            make_causal_lm({**WIDE_LLAMA, "num_hidden_layers": 1}),
            float8=Float8Config(recipe="rowwise"),
            activation_checkpointing="selective",
            enable_compile=True,
        )
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        with torch.profiler.profile() as profile:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return next(event.count for event in profile.key_averages() if event.key == "aten::_scaled_mm")

    assert run_ranks(run, 1) == [7 * 3 + 3]


@pytest.mark.guarantees("compiled-float8")
@pytest.mark.parametrize(
    ("tp_size", "mode"),
    [
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, "selective"), (2, False))),
        *(pytest.param(*cell, marks=pytest.mark.release) for cell in ((1, False), (2, "selective"))),
    ],
)
def test_compiled_layers_share_a_graph_and_have_the_same_gradients(
    tp_size: int, mode: Any, compile_without_code: None
) -> None:
    tokens = torch.randint(3, 101, (2, 16), generator=torch.Generator().manual_seed(0))

    def compute_gradients(**flags: Any) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        flags = {"float8": Float8Config(recipe="tensorwise"), "mp_policy": MixedPrecisionPolicy(), **flags}
        model = parallelize(make_causal_lm(WIDE_LLAMA), activation_checkpointing=mode, tp_size=tp_size, **flags)
        for _ in range(2):  # the first step of a tensor parallel model is not compiled
            model.zero_grad()
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return get_gradients(model)

    def run() -> int:
        expected = compute_gradients()
        actual = compute_gradients(enable_compile=True)
        assert_equal_gradients(actual, expected)
        assert not counters["graph_break"], dict(counters["graph_break"])
        return counters["stats"]["unique_graphs"]

    assert run_ranks(run, 2) == [1, 1]


@pytest.mark.parametrize(("recipe", "options"), [("rowwise", {"emulate_precision_casts": True}), ("tensorwise", None)])
def test_rows_are_compiled_with_all_roundings(
    recipe: Any, options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **others: given.append(others["options"]))

    def run() -> list[Any]:
        parallelize(make_causal_lm(WIDE_LLAMA), float8=Float8Config(recipe=recipe), enable_compile=True)
        return given

    assert run_ranks(run, 1) == [[options, options]]


@pytest.mark.parametrize(
    ("recipe", "policy", "warns"),
    [
        ("rowwise", MixedPrecisionPolicy(), 1),
        ("tensorwise", MixedPrecisionPolicy(), 0),
        ("rowwise", MixedPrecisionPolicy(param_dtype=torch.bfloat16), 0),
    ],
)
def test_rounding_below_the_compute_dtype_warns(
    recipe: Any, policy: MixedPrecisionPolicy, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> int:
        parallelize(make_causal_lm(WIDE_LLAMA), float8=Float8Config(recipe=recipe), mp_policy=policy)
        return caplog.text.count("rounds the results of its products to bfloat16")

    assert run_ranks(run, 2) == [warns, 0]


def test_emulation_where_it_is_not_needed_warns(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> int:
        parallelize(make_causal_lm(WIDE_LLAMA), float8=Float8Config(emulate=True))
        return caplog.text.count("emulate=True, although the device cpu can multiply in float8")

    assert run_ranks(run, 2) == [1, 0]


@pytest.mark.parametrize(("emulate", "compiles", "warns"), [(False, False, 1), (False, True, 0), (True, False, 0)])
def test_float8_without_compilation_warns(
    emulate: bool, compiles: bool, warns: int, caplog: pytest.LogCaptureFixture, compile_without_code: None
) -> None:
    def run() -> int:
        parallelize(make_causal_lm(WIDE_LLAMA), float8=Float8Config(emulate=emulate), enable_compile=compiles)
        return caplog.text.count("float8 without enable_compile=True is usually slower")

    assert run_ranks(run, 2) == [warns, 0]


@pytest.mark.guarantees("float8-limits", "checkpoints-with-float8")
def test_weights_and_state_dicts_are_those_without_float8() -> None:
    def run() -> None:
        plain = parallelize(make_causal_lm(WIDE_LLAMA), float8=None).state_dict()
        converted = parallelize(make_causal_lm(WIDE_LLAMA)).state_dict()
        assert {name: (type(t), t.dtype, t.shape) for name, t in converted.items()} == {
            name: (type(t), t.dtype, t.shape) for name, t in plain.items()
        }

    run_ranks(run, 2)


def test_a_copy_of_a_converted_model_computes_with_its_own_weights() -> None:
    model = make_causal_lm(WIDE_LLAMA)
    tokens = torch.arange(3, 19)[None]

    def run() -> None:
        convert_in_place(model)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(0.5)
        reference = make_reference(WIDE_LLAMA, "rowwise_with_gw_hp")
        reference.load_state_dict(copied.state_dict())
        assert torch.equal(copied(tokens).logits, reference(tokens).logits)

    run_ranks(run, 1)
