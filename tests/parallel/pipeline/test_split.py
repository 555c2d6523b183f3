"""Stages, run one after the other, compute the logits and gradients of the whole model, or the model is refused."""

import itertools
import random
from typing import Any

import pytest
import torch
from helpers.families import get_families, keep_known, make_family_config, make_family_model
from helpers.models import LLAMA, add_adapters, make_causal_lm
from helpers.stages import (
    Root,
    ToyLayer,
    ToyModel,
    add_gradients,
    assert_equal_gradients,
    run_stages,
    split_model,
)
from helpers.vision import make_image_batch, make_vision_config, make_vision_model
from helpers.vision_parity import get_vision_families
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, T5Config

from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.modules.stubs import Stub, is_head_elsewhere
from lightning_fsdp2.parallel.data.units import build_unit_plan
from lightning_fsdp2.parallel.pipeline.balance import balance
from lightning_fsdp2.parallel.pipeline.split import Split, build_split

REFUSED = {
    "gemma3n_text": "the argument `per_layer_input`",
    "gemma4": "the argument `per_layer_input`",
    "gemma4_text": "the argument `per_layer_input`",
    "gemma4_unified": "layers.0 writes to the argument `shared_kv_states`",
    "gemma4_unified_text": "layers.0 writes to the argument `shared_kv_states`",
    "glm_moe_dsa": "returns, besides its hidden states, a value that the next layer gets",
    "hrm_text": "runs 6 times",
    "hy_v4": "returns, besides its hidden states, a value that the next layer gets",
    "inkling2_loop_text": "runs 2 times",
    "inkling2_text": "the argument `block_states`",
    "longcat_flash": "has 1 layers",  # here
}
"""Families that are refused, with the reasons."""

SAMPLE = keep_known("llama", "qwen3", "gpt2", "gemma3_text", "mixtral", "gemma3", "hrm_text", "inkling2_text")


def make_tokens(size: int = 4) -> Tensor:
    return torch.randint(3, 100, (size, 10), generator=torch.Generator().manual_seed(1))


def build(root: nn.Module, *, rank: int = 0, ranks: int = 2, **options: Any) -> Split:
    return build_split(find_structure(root), ranks=ranks, rank=rank, **options)


def assert_equal_to_whole(model: nn.Module, **options: Any) -> list[Split]:
    """Compare gradients, logits and names of all stages with those of the whole model."""
    model.train()
    splits, tokens = split_model(model, **options), make_tokens()
    run = run_stages(splits, input_ids=tokens)
    run.backward(run.logits.float().square().mean())
    Root(model)(input_ids=tokens).logits.float().square().mean().backward()
    assert_equal_gradients(add_gradients(splits), model)
    with torch.no_grad():
        expected = Root(model.eval())(input_ids=tokens).logits
        for split in splits:
            split.root.eval()
        actual = run_stages(splits, input_ids=tokens).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert_names_of_whole(splits, Root(model))
    return splits


def assert_names_of_whole(splits: list[Split], root: nn.Module) -> None:
    parameters, state = dict(root.named_parameters()), root.state_dict()
    for rank, split in enumerate(splits):
        stages = split.stages
        assert get_optional_stages(split.root) is stages
        assert [*stages.parameters] == [*parameters]
        of_model = get_optional_stages(split.model)
        assert of_model is not None
        model = next(module for module in root.modules() if type(module) is type(split.model))  # within adapters
        assert [*of_model.parameters] == [*dict(model.named_parameters())]
        assert [*stages.state] == [*state]
        assert all(tensor.shape == parameters[name].shape for name, tensor in stages.parameters.items())
        assert {*dict(split.root.named_parameters())} == {name for name in parameters if stages.is_own(name)}
        assert split.root.state_dict().keys() <= {name for name in state if stages.is_own(name)}
        assert stages.rank == rank
    counted = [name for split in splits for name in parameters if split.stages.is_counted(name)]
    assert sorted(counted) == sorted(parameters)


def check_family(family: str) -> None:
    torch.manual_seed(0)
    model = make_family_model(family)
    if family in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family]):
            build(Root(model))
    else:
        assert_equal_to_whole(model)


@pytest.mark.guarantees("no-stage-class")
@pytest.mark.parametrize("family", SAMPLE)
def test_stages_equal_the_whole_model(family: str) -> None:
    check_family(family)


@pytest.mark.release  # `make parity` trains them all on stages
@pytest.mark.parametrize("family", get_families())
def test_stages_of_every_family_equal_the_whole_model(family: str) -> None:
    check_family(family)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("ranks", "stages_per_rank"), [(2, 2), (3, 1), (2, 3)])
def test_many_stages_equal_the_whole_model(family: str, ranks: int, stages_per_rank: int) -> None:
    torch.manual_seed(0)
    config = make_family_config(family)
    config.num_hidden_layers = 6
    model = AutoModelForCausalLM.from_config(config)
    splits = assert_equal_to_whole(model, ranks=ranks, stages_per_rank=stages_per_rank)
    assert [split.own_stages for split in splits] == [
        (*range(r, ranks * stages_per_rank, ranks),) for r in range(ranks)
    ]


def test_adapters_follow_their_modules() -> None:
    torch.manual_seed(0)
    model = add_adapters(make_causal_lm(LLAMA), target_modules="all-linear", modules_to_save=["lm_head"])
    splits = assert_equal_to_whole(model)
    last = dict(splits[1].root.named_parameters())
    assert any("lm_head.modules_to_save" in name for name in last)
    assert any("lm_head.original_module" in name for name in last)
    assert any(".layers.2." in name and "lora_A" in name for name in last)
    assert not any(".layers.0." in name for name in last)


def test_a_model_of_custom_parts_equals_its_stages() -> None:
    """A weight of the model itself that is used between layers is on all stages; its gradient is their sum."""

    class Gated(ToyLayer):
        def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
            return (super().forward(hidden), None)

    def run(model: ToyModel, hidden: Tensor) -> Tensor:
        hidden = hidden * model.scale
        for layer in model.layers:
            (hidden, _) = layer(hidden=hidden)
        return hidden * model.scale

    torch.manual_seed(0)
    [first, last] = assert_equal_to_whole(ToyModel(run, Gated))
    assert first.tied == last.tied == {"model.scale": (0, 1)}


# ---------------------------------------------------------------------- images

NEEDS_IMAGES = "could not be traced"
REFUSED_WITH_IMAGES = {
    "blip": NEEDS_IMAGES,
    "blip-2": NEEDS_IMAGES,
    "florence2": "encoder-decoder",
    "gemma4": "the argument `per_layer_input`",
    "hy_v4_vl": "returns, besides its hidden states, a value that the next layer gets",
    "idefics": NEEDS_IMAGES,
    "inkling2_loop": "runs 2 times",
    "inkling2": "the argument `block_states`",
    "instructblip": NEEDS_IMAGES,
    "instructblipvideo": NEEDS_IMAGES,
    "kosmos-2": NEEDS_IMAGES,
    "mistral_large4": "returns, besides its hidden states, a value that the next layer gets",
    "mllama": "runs 0 times",
    "pix2struct": "encoder-decoder",
    "pp_formulanet": "encoder-decoder",
    "t5gemma2": "encoder-decoder",
    "udop": "encoder-decoder",
}
"""Families that see images and are refused, with the reasons."""

READS_WEIGHTS = {"hunyuan_vl"}
"""Families whose code reads the dtype of a tower from its weights, which a stage without the tower lacks."""


def check_family_with_images(family: str) -> None:
    model = make_vision_model(family)
    if family in REFUSED_WITH_IMAGES:
        with pytest.raises(ValueError, match=REFUSED_WITH_IMAGES[family]):
            build(Root(model))
    else:
        batch = make_image_batch(family, 0)
        del batch["labels"]
        run = run_stages(splits := split_model(model), **batch)
        run.backward(run.logits.square().mean())
        logits = Root(model)(**batch).logits
        logits.square().mean().backward()
        torch.testing.assert_close(run.logits, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
        assert_equal_gradients(add_gradients(splits), model)


@pytest.mark.parametrize("family", keep_known("qwen2_5_vl", "granite4_vision"))
def test_stages_see_the_images_of_the_whole_model(family: str) -> None:
    """The tower of the first reads sizes of images; the second adds features of images between its layers."""
    check_family_with_images(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*get_vision_families()} - READS_WEIGHTS))
def test_stages_of_every_family_see_the_images_of_the_whole_model(family: str) -> None:
    check_family_with_images(family)


def test_features_of_images_in_layers_of_later_stages_are_an_error() -> None:
    config = make_vision_config("qwen3_vl")
    config.text_config.num_hidden_layers = 4
    config.vision_config.deepstack_visual_indexes = [0, 1]
    torch.manual_seed(0)
    model, batch = AutoModelForImageTextToText.from_config(config), make_image_batch("qwen3_vl", 0)
    run_stages(split_model(model, layers_per_stage=[2, 2]), **batch)
    with pytest.raises(ValueError, match=r"between its layers 1 and 2.* at least 2 layers in pp_layers_per_stage"):
        run_stages(split_model(model, layers_per_stage=[1, 3]), **batch)


# ---------------------------------------------------------------------- what is where


def test_a_tied_embedding_is_on_the_first_and_the_last_rank() -> None:
    config = make_family_config("gpt2")
    config.num_hidden_layers = 3
    splits = split_model(AutoModelForCausalLM.from_config(config), ranks=3)
    assert all(split.tied == {"model.transformer.wte.weight": (0, 2)} for split in splits)
    held = [{name for name in dict(split.root.named_parameters()) if ".h." not in name} for split in splits]
    assert held == [
        {"model.transformer.wte.weight", "model.transformer.wpe.weight"},
        set(),
        {"model.transformer.wte.weight", "model.transformer.ln_f.weight", "model.transformer.ln_f.bias"},
    ]
    assert [is_head_elsewhere(split.model) for split in splits] == [True, True, False]


def test_modules_outside_the_model_are_on_all_ranks() -> None:
    class Rewarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = make_causal_lm(LLAMA)
            self.backbone = self.lm.model  # a second slot
            self.value = nn.Linear(32, 1)

    roots = [Rewarded() for _ in range(2)]
    for rank, root in enumerate(roots):
        build(root, rank=rank).drop()
    stages = get_optional_stages(roots[0])
    assert stages is not None
    assert stages.tied == {"value.weight": (0, 1), "value.bias": (0, 1)}
    assert isinstance(roots[0].backbone.norm, Stub)
    assert isinstance(roots[1].backbone.embed_tokens, Stub)
    assert roots[1].lm.model is roots[1].backbone


def test_a_tower_is_on_the_first_rank() -> None:
    first, last = split_model(make_family_model("got_ocr2"))
    towers = {name for name in first.stages.parameters if "vision" in name}
    assert towers
    assert towers <= dict(first.root.named_parameters()).keys()
    assert towers.isdisjoint(dict(last.root.named_parameters()))
    assert isinstance(last.model.model.vision_tower, Stub)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_passes_see_the_modules_of_their_stage(family: str) -> None:
    """All modules of a unit run on its rank; FSDP2 waits for each of them."""
    parts, units = [], []
    for split in split_model(make_family_model(family)):
        structure = find_structure(split.root)
        names = {module: name.rpartition(".")[2] for name, module in split.root.named_modules()}
        [model] = structure.models
        ends = (model.embedding, model.final_norm, model.head)
        parts.append(([names[layer] for layer in structure.layers], [names[end] for end in ends if end is not None]))
        plan = build_unit_plan(structure, None)
        units.append([[names[module] for module in unit.modules] for unit in plan.units][:2])
    if family == "llama":
        assert parts == [(["0"], ["embed_tokens"]), (["1"], ["norm", "lm_head"])]
        assert units == [[["0"], ["embed_tokens"]], [["1"], ["norm", "lm_head"]]]
    else:
        assert parts == [(["0"], ["wte"]), (["1"], ["wte", "ln_f", "lm_head"])]
        assert units == [[["0"], ["wte"]], [["1"], ["wte", "ln_f", "lm_head"]]]


def test_only_drop_changes_a_module_for_good() -> None:
    root = Root(make_causal_lm({**LLAMA, "num_hidden_layers": 4}))
    before = dict(root.named_modules())
    split = build(root, stages_per_rank=2)
    assert dict(root.named_modules()) == before
    assert get_optional_stages(root) is None
    split.drop()
    dropped = dict(root.named_modules())
    layers = root.model.model.layers
    assert [isinstance(layer, Stub) for layer in layers] == [False, True, False, True]
    for stage, absent in ((0, [False, True, True, True]), (2, [True, True, False, True])):
        with split.run_stage(stage, torch.zeros(1, 1, 32)):
            assert [isinstance(layer, Stub) for layer in layers] == absent
            assert isinstance(root.model.model.embed_tokens, Stub) == (stage > 0)
        with pytest.raises(KeyError), split.run_stage(stage, None):
            raise KeyError
        assert dict(root.named_modules()) == dropped


# ---------------------------------------------------------------------- sizes


def list_divisions(total: int, stages: int) -> list[list[int]]:
    cuts = itertools.combinations(range(1, total), stages - 1)
    return [[b - a for a, b in itertools.pairwise((0, *cut, total))] for cut in cuts]


def get_costs(costs: list[float], counts: list[int], before: float, after: float) -> list[float]:
    ends = list(itertools.accumulate(counts))
    result = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    result[0] += before
    result[-1] += after
    return result


@pytest.mark.guarantees("cheapest-stages")
@pytest.mark.parametrize("seed", range(20))
def test_the_most_expensive_stage_is_as_cheap_as_possible(seed: int) -> None:
    generator = random.Random(seed)
    costs = [generator.randint(1, 9) for _ in range(generator.randint(4, 9))]
    stages, before, after = generator.randint(1, 4), generator.randint(0, 9), generator.randint(0, 9)
    found = get_costs(costs, balance(costs, stages, before=before, after=after), before, after)
    every = [get_costs(costs, counts, before, after) for counts in list_divisions(len(costs), stages)]
    best = min((max(option), sum(cost**2 for cost in option)) for option in every)
    assert (max(found), sum(cost**2 for cost in found)) == best


@pytest.mark.guarantees("cheapest-stages")
def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    def count(vocabulary: int) -> list[int]:
        with torch.device("meta"):
            model = make_causal_lm({**LLAMA, "num_hidden_layers": 8, "vocab_size": vocabulary})
        return [len(layers) for layers in build(Root(model)).ranges]

    # a layer multiplies with 9216 weights, the head with 32 per word
    assert count(64) == [4, 4]
    assert count(2 * 9216 // 32) == [5, 3]


def test_layers_per_stage_are_as_given() -> None:
    root = Root(make_causal_lm(LLAMA))
    assert build(root, layers_per_stage=[1, 2]).ranges == [range(1), range(1, 3)]
    assert build(root, layers_per_stage=[2, 1]).ranges == [range(2), range(2, 3)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layers_per_stage": [1, 1]}, r"pp_layers_per_stage=\[1, 1\] adds up to 2, but LlamaForCausalLM has 3 layers"),
        ({"layers_per_stage": [3, 0]}, "give positive numbers that add up to 3"),
        ({"layers_per_stage": [1, 1, 1]}, r"has 3 entries, but pp_size=2 needs 2 stages"),
        ({"layers_per_stage": [3], "stages_per_rank": 2}, r"pp_size=2 \* pp_stages_per_rank=2 needs 4 stages"),
        ({"ranks": 4}, "pp_size=4 needs 4 stages of at least one layer each, but LlamaForCausalLM has 3 layers"),
        ({"ranks": 2, "stages_per_rank": 2}, "use at most 3 stages"),
    ],
)
def test_stages_that_do_not_fit_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build(Root(make_causal_lm(LLAMA)), **options)


def test_models_that_have_no_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 2 \(LlamaForCausalLM, LlamaForCausalLM\); use pp_size=1"):
        build(nn.ModuleDict({"student": make_causal_lm(LLAMA), "teacher": make_causal_lm(LLAMA)}))
    with pytest.raises(ValueError, match=r"Linear has 0 \(none\)"):
        build(nn.Linear(1, 1))
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(T5Config(num_layers=2))
    with pytest.raises(ValueError, match="encoder-decoder"):
        build(Root(model))


def test_a_model_that_skips_layers_at_random_is_refused() -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_attention_heads": 2, "word_embed_proj_dim": 32, "vocab_size": 64}
    config = AutoConfig.for_model("opt", num_hidden_layers=4, layerdrop=0.5, **sizes)
    with pytest.raises(ValueError, match=r"OPTForCausalLM .*: it skips layers at random in training \(layerdrop=0.5\)"):
        build(Root(AutoModelForCausalLM.from_config(config)))
    config.layerdrop = 0.0
    assert len(build(Root(AutoModelForCausalLM.from_config(config))).ranges) == 2


def test_layers_of_different_stages_that_share_a_weight_are_refused() -> None:
    model = ToyModel()
    model.layers[3].projection.weight = model.layers[0].projection.weight
    with pytest.raises(ValueError, match=r"layers.0 and layers.3 share a weight, but belong to different stages"):
        build(Root(model))
    model.layers[3].projection.weight = nn.Parameter(torch.zeros(8, 8))
    model.layers[1].projection.weight = model.layers[0].projection.weight
    assert len(build(Root(model)).ranges) == 2
