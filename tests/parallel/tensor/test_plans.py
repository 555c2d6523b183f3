"""Which plan a model gets, what its words mean, and what is refused; the models are on the meta device."""

import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.families import make_family_config
from helpers.models import GPT2, LLAMA, make_causal_lm
from helpers.oracle import make_config
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2LMHeadModel,
    GPT2PreTrainedModel,
    LlamaModel,
)
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from lightning_fsdp2.modules.structure import find_parts
from lightning_fsdp2.parallel.tensor import plans as tp_plans
from lightning_fsdp2.parallel.tensor.matching import match_plan
from lightning_fsdp2.parallel.tensor.plans import (
    STYLES,
    LayerTraits,
    NoPlanError,
    get_layer_traits,
    get_plan,
    get_style,
    register_tp_plan,
)
from lightning_fsdp2.parallel.tensor.styles import (
    ColumnWise,
    FeatureEmbedding,
    LatentKeyValue,
    LocalHeads,
    Replicated,
    RowWise,
    ShardedNorm,
    ShardParameter,
    SummedResult,
    VocabularyEmbedding,
)
from lightning_fsdp2.parallelizer import get_hf_tp_shard_plan, translate_to_torch_parallel_style
from lightning_fsdp2.recipes.imports import import_plan

LAYER = "model.layers.*."


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes registrations."""
    monkeypatch.setattr(tp_plans, "_registered", dict(tp_plans._registered))


def make_on_meta(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return make_causal_lm(config)


def make_family_on_meta(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_family_config(family))


# ---------------------------------------------------------------------- which plan


def test_a_model_s_own_plan_with_embedding_and_head_sharded_over_the_vocabulary() -> None:
    plan = {
        "model.embed_tokens": VocabularyEmbedding(),
        "lm_head": ColumnWise(gather_output=True),
        f"{LAYER}self_attn.q_proj": ColumnWise(),
        f"{LAYER}self_attn.k_proj": ColumnWise(),
        f"{LAYER}self_attn.v_proj": ColumnWise(),
        f"{LAYER}self_attn.o_proj": RowWise(),
        f"{LAYER}mlp.gate_proj": ColumnWise(),
        f"{LAYER}mlp.up_proj": ColumnWise(),
        f"{LAYER}mlp.down_proj": RowWise(),
    }
    model = make_on_meta(LLAMA)
    own = dict(model.tp_plan)
    assert get_plan(find_parts(model)) == get_plan(find_parts(model), "hf") == plan
    assert model.tp_plan == own, "the model's plan is the model's"


def test_embedding_and_head_are_added_where_a_plan_leaves_them_out() -> None:
    ours = get_plan(find_parts(make_on_meta(GPT2)))
    assert ours["transformer.wte"] == VocabularyEmbedding()
    assert ours["lm_head"] == ColumnWise(gather_output=True)
    with torch.device("meta"):
        headless = LlamaModel(make_config(LLAMA))
    plan = get_plan(find_parts(headless))
    assert plan["embed_tokens"] == VocabularyEmbedding()
    assert plan["layers.*.mlp.down_proj"] == RowWise()
    assert not any("lm_head" in name or name.startswith("model.") for name in plan)


@pytest.mark.guarantees("families-with-a-plan")
def test_our_plan_where_the_family_needs_one_and_the_model_s_own_by_name() -> None:
    model = make_family_on_meta("olmo2")
    assert get_plan(find_parts(model))[f"{LAYER}self_attn.q_proj"] == ColumnWise()
    assert get_plan(find_parts(model))[f"{LAYER}self_attn.q_norm"] == ShardedNorm()
    own = get_plan(find_parts(model), "hf")
    assert own[f"{LAYER}self_attn.q_proj"] == ColumnWise(gather_output=True)
    assert own[f"{LAYER}self_attn.o_proj"] == RowWise(split_input=True)
    assert f"{LAYER}self_attn.q_norm" not in own


def test_our_plan_has_the_names_of_a_model_with_and_without_a_head() -> None:
    with torch.device("meta"):
        headless = GPT2LMHeadModel(make_config(GPT2)).transformer
    for model, prefix in ((make_on_meta(GPT2), "transformer."), (headless, "")):
        plan = get_plan(find_parts(model))
        assert plan[f"{prefix}h.*.attn.c_attn"] == ColumnWise(sections=3)
        assert plan[f"{prefix}h.*.attn.c_proj"] == plan[f"{prefix}h.*.mlp.c_proj"] == RowWise()
        assert plan[f"{prefix}h.*.attn"] == LocalHeads(attributes=("num_heads", "split_size"))


@pytest.mark.parametrize(
    ("family", "name", "style"),
    [
        ("olmo2", "self_attn.q_norm", ShardedNorm()),
        ("cohere", "self_attn.q_norm.weight", ShardParameter(dim=0)),
    ],
)
def test_our_plan_is_for_the_language_model_beside_a_tower_that_has_layers_too(
    family: str, name: str, style: ParallelStyle
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**small, "model_type": family, "use_qk_norm": True}
    tower = {**small, "model_type": "clip_vision_model"}
    with torch.device("meta"):
        config = AutoConfig.for_model("llava", text_config=text, vision_config=tower)
        plan = get_plan(find_parts(AutoModelForImageTextToText.from_config(config)))
    assert plan[f"model.language_model.layers.*.{name}"] == style
    assert not any("vision_tower" in entry for entry in plan)


@pytest.mark.parametrize(("sizes", "sections"), [({}, (32, 16, 16)), ({"head_dim": 16}, (64, 32, 32))])
def test_packed_projections_have_the_sections_of_their_heads(sizes: dict[str, int], sections: tuple[int, ...]) -> None:
    """There are 4 heads and 2 of keys and values; a head has 32 / 4 features if the config does not say how many."""
    plan = {
        "model.embed_tokens": VocabularyEmbedding(),
        "lm_head": ColumnWise(gather_output=True),
        f"{LAYER}self_attn": LocalHeads(attributes=("num_key_value_heads",), config=("num_attention_heads",)),
        f"{LAYER}self_attn.qkv_proj": ColumnWise(sections=sections),
        f"{LAYER}self_attn.o_proj": RowWise(),
        f"{LAYER}mlp.gate_up_proj": ColumnWise(sections=2),
        f"{LAYER}mlp.down_proj": RowWise(),
    }
    assert get_plan(find_parts(make_on_meta({**LLAMA, "model_type": "phi3", "pad_token_id": 0, **sizes}))) == plan


def test_a_plan_s_head_and_stacks_of_text_are_found_by_its_entries() -> None:
    parts = find_parts(make_on_meta(LLAMA))
    for plan, head in (({"lm_head": ColumnWise()}, "lm_head"), ({"lm_head": Replicated()}, None), ({}, None)):
        assert match_plan(parts, plan).get_optional_head() == head
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "llava", text_config=LLAMA, vision_config={**small, "model_type": "clip_vision_model"}
        )
        model = AutoModelForImageTextToText.from_config(config)
    in_text = "model.language_model.layers.0.mlp.up_proj"
    in_tower = next(name for name, _ in model.named_modules() if name.endswith(".layers.0.mlp.fc1"))
    text, tower = ([*model.get_submodule(name.partition(".0.mlp")[0])] for name in (in_text, in_tower))
    for names, expected in (([in_tower, in_text], text), ([in_text], text), ([in_tower], tower)):
        plan = dict.fromkeys(names, ColumnWise())
        assert match_plan(find_parts(model), plan).get_text_stacks() == [expected]


def test_an_embedding_that_looks_at_the_tokens_stays_whole() -> None:
    model = make_on_meta(LLAMA)
    model.model.embed_tokens.mark = nn.Parameter(torch.empty(4))
    assert (
        get_plan(find_parts(model))["model.embed_tokens"]
        == get_plan(find_parts(model), "hf")["model.embed_tokens"]
        == Replicated()
    )


@pytest.mark.guarantees("registered-plans")
@pytest.mark.usefixtures("registry")
def test_a_registered_class_wins_over_a_registered_family_over_ours_over_the_model_s_own() -> None:
    model = make_on_meta(GPT2)
    pattern = "transformer.h.*.mlp.c_fc"

    def get_chosen() -> ParallelStyle | None:
        return get_plan(find_parts(model)).get(pattern)

    assert get_chosen() == ColumnWise()  # ours
    register_tp_plan("gpt2", {pattern: "replicate"})
    assert get_chosen() == Replicated()
    register_tp_plan(GPT2PreTrainedModel, {pattern: "replicated_with_grad_allreduce"})
    assert get_chosen() == Replicated(on_shards=True)
    register_tp_plan(GPT2LMHeadModel, lambda own: {pattern: ColumnWise(sections=own.config.n_layer)})
    assert get_chosen() == ColumnWise(sections=2)  # the nearest class
    assert get_plan(find_parts(model)).keys() == {"transformer.wte", "lm_head", pattern}
    with pytest.raises(NoPlanError):
        get_plan(find_parts(model), "hf")  # asked for by name, it is the model's own

    llama = make_on_meta(LLAMA)
    assert get_plan(find_parts(llama))[f"{LAYER}self_attn.q_proj"] == ColumnWise()
    register_tp_plan("llama", {f"{LAYER}mlp.up_proj": "colwise"})
    assert get_plan(find_parts(llama)).keys() == {"model.embed_tokens", "lm_head", f"{LAYER}mlp.up_proj"}
    assert get_plan(find_parts(llama), "hf")[f"{LAYER}self_attn.q_proj"] == ColumnWise()


@pytest.mark.usefixtures("registry")
def test_what_a_layer_is_like_is_registered_with_its_plan() -> None:
    model = make_on_meta(LLAMA)
    assert get_layer_traits(find_parts(model)) == LayerTraits()
    assert get_layer_traits(find_parts(nn.Linear(2, 2))) == LayerTraits()
    of_family, of_class = LayerTraits(pointwise=("gate",)), LayerTraits(per_position=("bias",), sequence_dim=2)
    register_tp_plan("llama", {"lm_head": "colwise"}, of_family)
    assert get_layer_traits(find_parts(model)) == of_family
    register_tp_plan(type(model), {"lm_head": "colwise"}, of_class)
    assert get_layer_traits(find_parts(model)) == of_class
    register_tp_plan(type(model), {"lm_head": "colwise"})
    assert get_layer_traits(find_parts(model)) == LayerTraits()


def test_without_any_plan_the_error_says_what_to_write() -> None:
    assert issubclass(NoPlanError, ValueError)
    assert issubclass(NoPlanError, AssertionError)
    with torch.device("meta"):
        xglm = AutoModelForCausalLM.from_config(
            make_config({"model_type": "xglm", "vocab_size": 11, "d_model": 8, "num_layers": 1, "attention_heads": 2})
        )
    # of GPT-OSS transformers shards the head alone, and since 5.24 the embedding too, which is no plan
    for model, option in ((xglm, None), (make_on_meta(GPT2), "hf"), (make_family_on_meta("gpt_oss"), "hf")):
        with pytest.raises(NoPlanError) as raised:
            get_plan(find_parts(model), option)
        message = str(raised.value)
        assert message.startswith(f"{type(model).__name__} has no tensor parallel plan")
        for remedy in ("in the config, as tp_plan={", "'colwise'", "'rowwise'", "register_tp_plan", "tp_size=1"):
            assert remedy in message
    with pytest.raises(NoPlanError, match="Sequential has no tensor parallel plan"):
        get_plan(find_parts(nn.Sequential(nn.Linear(2, 2))))


@pytest.mark.guarantees("own-plan")
def test_a_given_plan_means_what_it_says_and_stays_as_it_is() -> None:
    model = make_on_meta(LLAMA)
    style = ColumnWise(sections=2)
    given = {f"{LAYER}mlp.up_proj": "colwise", f"{LAYER}mlp.gate_proj": style}
    expected = {f"{LAYER}mlp.up_proj": ColumnWise(), f"{LAYER}mlp.gate_proj": style}
    assert get_plan(find_parts(model), given) == expected
    assert get_plan(find_parts(model), types.MappingProxyType(given)) == expected
    assert given == {f"{LAYER}mlp.up_proj": "colwise", f"{LAYER}mlp.gate_proj": style}
    received = []

    def build(own: nn.Module) -> Mapping[str, str]:
        received.append(own)
        return given

    assert get_plan(find_parts(model), build) == expected
    assert received == [model]


# ---------------------------------------------------------------------- what its words mean


@pytest.mark.guarantees("styles-of-transformers")
def test_every_style_that_the_installed_transformers_knows_is_known_or_refused_by_name() -> None:
    for name in ALL_PARALLEL_STYLES:
        if name in STYLES:
            assert isinstance(get_style("module", name), ParallelStyle)
        else:
            with pytest.raises(ValueError, match=rf"^tp_plan\['module'\]='{name}' is not supported: "):
                get_style("module", name)


def test_styles_of_expert_and_sequence_parallelism_are_refused_with_a_remedy() -> None:
    for name in ("grouped_gemm", "ep_dispatch_experts", "ep_router", "megamoe_router", "megamoe_experts"):
        with pytest.raises(ValueError, match=r"expert parallelism needs no plan; use ep_size, .*'moe_tp_experts'"):
            get_style("model.layers.*.mlp", name)
    with pytest.raises(ValueError, match=r"sequence parallelism is derived .*; set sequence_parallel=True"):
        get_style("model.norm", "sequence_parallel")


def test_an_unknown_style_is_an_error_that_names_module_and_style() -> None:
    model = make_on_meta(LLAMA)
    with pytest.raises(ValueError, match=r"tp_plan\['lm_head'\]='colwize' is not a known style; use one of colwise,"):
        get_plan(find_parts(model), {"lm_head": "colwize"})


def test_aliases_mean_the_same() -> None:
    assert (
        get_style("head", "colwise_rep") == get_style("head", "colwise_gather_output") != get_style("head", "colwise")
    )
    assert get_style("o", "rowwise_rep") == get_style("o", "rowwise_split_input") != get_style("o", "rowwise")


def test_torch_s_styles_with_plain_layouts_become_ours_where_no_other_is_among_them() -> None:
    model = nn.Linear(2, 2)
    ours: list[tuple[ParallelStyle, ParallelStyle]] = [
        (ColwiseParallel(), ColumnWise()),
        (ColwiseParallel(output_layouts=Replicate()), ColumnWise(gather_output=True)),
        (RowwiseParallel(), RowWise()),
        (RowwiseParallel(input_layouts=Replicate()), RowWise(split_input=True)),
    ]
    plan = {str(index): theirs for index, (theirs, _) in enumerate(ours)}
    translated = {str(index): expected for index, (_, expected) in enumerate(ours)}
    assert get_plan(find_parts(model), plan) == translated
    assert get_plan(find_parts(model), {**plan, "more": "replicate"}) == {**translated, "more": Replicated()}

    class Own(ColwiseParallel):
        pass

    for style in (
        ColwiseParallel(use_local_output=False),
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Shard(1)),
        SequenceParallel(),
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        Own(),
    ):
        result = get_plan(find_parts(model), {**plan, "other": style, "named": "colwise"})
        assert result.pop("other") is style
        assert result.pop("named") == ColumnWise()
        assert all(result[name] is theirs for name, theirs in plan.items()), "it may hand a DTensor to any of them"


def test_the_projection_of_latent_attention_learns_its_rotary_part_from_the_config() -> None:
    model = make_family_on_meta("deepseek_v3")
    pattern = f"{LAYER}self_attn.kv_a_proj_with_mqa"
    width = model.config.qk_rope_head_dim
    assert get_plan(find_parts(model))[pattern] == LatentKeyValue(rotary_features=width)
    assert get_plan(find_parts(model), {pattern: "mla_kv_a_proj"})[pattern] == LatentKeyValue(rotary_features=width)
    given = LatentKeyValue(rotary_features=3)
    assert get_plan(find_parts(model), {pattern: given})[pattern] == given
    assert STYLES["mla_kv_a_proj"] == LatentKeyValue()


# ---------------------------------------------------------------------- the functions of the parallelizer


def test_the_plan_of_transformers_in_torch_s_styles_where_torch_has_them() -> None:
    plan = get_hf_tp_shard_plan(make_on_meta(LLAMA))
    types_of = {name: type(style) for name, style in plan.items()}
    assert types_of == {
        "model.embed_tokens": VocabularyEmbedding,
        "lm_head": ColwiseParallel,
        **{f"{LAYER}self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
        f"{LAYER}self_attn.o_proj": RowwiseParallel,
        f"{LAYER}mlp.gate_proj": ColwiseParallel,
        f"{LAYER}mlp.up_proj": ColwiseParallel,
        f"{LAYER}mlp.down_proj": RowwiseParallel,
    }
    assert plan["lm_head"].output_layouts == (Replicate(),)
    assert plan[f"{LAYER}self_attn.q_proj"].output_layouts == (Shard(-1),)
    theirs = [style for style in plan.values() if not isinstance(style, VocabularyEmbedding)]
    assert len({id(style) for style in theirs}) == len(theirs), "torch's styles can be changed, and are not shared"
    with pytest.raises(NoPlanError):
        get_hf_tp_shard_plan(make_on_meta(GPT2))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "olmo2", "deepseek_v2"])
def test_the_plan_in_torch_s_styles_means_the_same_when_it_is_given_back(family: str) -> None:
    model = make_family_on_meta(family)
    plan = get_plan(find_parts(model), "hf")
    matching = {
        name: style for name, style in plan.items() if name not in match_plan(find_parts(model), plan).unmatched
    }
    assert get_plan(find_parts(model), get_hf_tp_shard_plan(model)) == matching


def test_a_style_s_name_becomes_torch_s_own_style_where_there_is_one() -> None:
    def describe(style: Any) -> tuple[Any, ...]:
        return type(style), style.input_layouts, style.output_layouts, style.use_local_output

    for names, expected in (
        (("colwise",), ColwiseParallel()),
        (("colwise_rep", "colwise_gather_output"), ColwiseParallel(output_layouts=Replicate())),
        (("rowwise",), RowwiseParallel()),
        (("rowwise_rep", "rowwise_split_input"), RowwiseParallel(input_layouts=Replicate())),
    ):
        for name in names:
            assert describe(translate_to_torch_parallel_style(name)) == describe(expected)
    assert translate_to_torch_parallel_style("packed_colwise") == ColumnWise(sections=2)
    assert translate_to_torch_parallel_style("packed_rowwise") == ShardParameter(dim=-1, sections=2)
    assert translate_to_torch_parallel_style("moe_tp_experts") == SummedResult()
    assert translate_to_torch_parallel_style("embedding_colwise") == FeatureEmbedding()
    with pytest.raises(ValueError, match="'colwize' is not a known style"):
        translate_to_torch_parallel_style("colwize")
    with pytest.raises(ValueError, match="is not supported: expert parallelism"):
        translate_to_torch_parallel_style("ep_router")


def parallelize_with_torch(model: nn.Module) -> bool:
    """Whether torch's function takes the plan."""
    plan = get_hf_tp_shard_plan(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of entries for parameters, which torch does not know
        try:
            parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        except (TypeError, ValueError):
            return False
    return True


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_with_torch_s_function_the_plan_is_right_or_refused(family: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_family_config(family)).eval()
        ids = torch.arange(8).view(1, 8)
        with torch.no_grad():
            expected = model(ids).logits
            is_taken = parallelize_with_torch(model)
            dist.barrier()
            assert is_taken or family == "mixtral", "modules alone are what it is for"
            if is_taken:
                torch.testing.assert_close(model(ids).logits, expected)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- import paths


def build_plan(model: nn.Module) -> Mapping[str, str]:
    return {"lm_head": "colwise_rep"}


@pytest.mark.guarantees("own-plan")
def test_an_import_path_names_a_dict_or_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("plans_of_a_user")
    monkeypatch.setitem(sys.modules, "plans_of_a_user", module)
    plan = {"lm_head": "colwise"}
    vars(module).update(PLAN=plan, build=build_plan, number=3, text="hf", Own=types.MappingProxyType(plan))
    assert import_plan("plans_of_a_user.PLAN") is plan
    assert import_plan("plans_of_a_user.build") is build_plan
    assert import_plan("plans_of_a_user.Own") == plan
    for given in (None, "hf", plan, build_plan):
        assert import_plan(given) is given
    cases: list[tuple[str, type[Exception], str]] = [
        ("plans_of_a_user.number", TypeError, r"tp_plan='plans_of_a_user\.number' is of type int; give the path"),
        ("plans_of_a_user.text", TypeError, "is of type str; give the path of a dict"),
        ("plans_of_a_user.missing", ValueError, r"tp_plan='plans_of_a_user\.missing' cannot be imported \(.*missing"),
        ("no_such_module_of_a_user.PLAN", ValueError, "tp_plan='no_such_module_of_a_user.PLAN' cannot be imported"),
        ("PLAN", ValueError, "'PLAN' is not a dotted import path"),
        ("HF", ValueError, "'HF' is not a dotted import path"),
        (".PLAN", ValueError, "is not a dotted import path"),
        ("plans.", ValueError, "is not a dotted import path"),
        ("", ValueError, "is not a dotted import path"),
    ]
    for path, error, message in cases:
        with pytest.raises(error, match=message):
            import_plan(path)
