"""Parts of a model are found by its structure, in odd trees too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import GPT2, LLAMA, Block, PlainTransformer, add_adapters, make_causal_lm
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    MusicgenConfig,
    MusicgenForConditionalGeneration,
    Qwen2VLConfig,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from lightning_fsdp2.modules.structure import (
    find_layer_drop,
    find_parts,
    find_structure,
    get_hf_models,
    get_layer_lists,
    get_parameter_names,
    get_parameter_owners,
    has_forward,
    is_hf_model,
    is_lightning_module,
)


class Shelf(nn.Module):
    """Holds these children, whom others call."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Tree(Shelf):
    """A module with these children."""

    def forward(self) -> None: ...


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def llama() -> nn.Module:
    return make_causal_lm({**LLAMA, "num_hidden_layers": 2})


def names_of(root: nn.Module, modules: list[Any]) -> list[Any]:
    names = {module: name or "root" for name, module in root.named_modules()}
    return [names_of(root, module) if isinstance(module, list) else names[module] for module in modules]


def make_shared_block() -> nn.Module:
    block = linear()
    return Tree(first=nn.ModuleList([block, block, linear()]), second=nn.ModuleList([block, linear()]))


def make_shared_backbone() -> nn.Module:
    actor, critic = llama(), llama()
    critic.model = actor.model
    return Tree(actor=actor, critic=critic)


LLAMA_LAYERS = ["model.layers.0", "model.layers.1"]

TREES: dict[str, tuple[Callable[[], nn.Module], list[list[str]]]] = {
    "leaf": (linear, []),
    "no-list": (lambda: Tree(a=linear(), b=mlp()), []),
    "empty-list": (lambda: Tree(blocks=nn.ModuleList()), []),
    "list-without-parameters": (lambda: Tree(blocks=nn.ModuleList([nn.ReLU(), nn.Dropout()])), []),
    "list-with-some-parameters": (
        lambda: Tree(blocks=nn.ModuleList([nn.ReLU(), linear(), nn.Identity(), mlp()])),
        [["blocks.1", "blocks.3"]],
    ),
    "one-block": (lambda: Tree(blocks=nn.ModuleList([mlp()])), [["blocks.0"]]),
    "deep-under-wrappers": (
        lambda: Tree(a=Tree(b=Tree(blocks=nn.ModuleList([mlp(), mlp()])))),
        [["a.b.blocks.0", "a.b.blocks.1"]],
    ),
    "two-lists": (
        lambda: Tree(encoder=Tree(block=nn.ModuleList([mlp()])), decoder=Tree(block=nn.ModuleList([mlp()]))),
        [["encoder.block.0"], ["decoder.block.0"]],
    ),
    "experts-belong-to-their-block": (
        lambda: Tree(blocks=nn.ModuleList(Tree(experts=nn.ModuleList([mlp(), mlp()])) for _ in range(2))),
        [["blocks.0", "blocks.1"]],
    ),
    "stages-with-blocks": (
        lambda: Tree(stages=nn.ModuleList(Tree(blocks=nn.ModuleList([mlp()]), down=linear()) for _ in range(2))),
        [["stages.0", "stages.1"]],
    ),
    "shelves-of-blocks": (
        lambda: Tree(stages=nn.ModuleList(Shelf(blocks=nn.ModuleList([mlp()]), down=linear()) for _ in range(2))),
        [["stages.0.blocks.0"], ["stages.1.blocks.0"]],
    ),
    "dict": (lambda: Tree(blocks=nn.ModuleDict({"x": mlp(), "y": mlp()})), [["blocks.x", "blocks.y"]]),
    "dicts-in-a-list": (
        lambda: Tree(blocks=nn.ModuleList(nn.ModuleDict({"x": mlp(), "y": mlp()}) for _ in range(2))),
        [["blocks.0.x", "blocks.0.y"], ["blocks.1.x", "blocks.1.y"]],
    ),
    "list-in-a-list": (
        lambda: Tree(blocks=nn.ModuleList([nn.ModuleList([mlp(), mlp()]), mlp()])),
        [["blocks.0.0", "blocks.0.1"], ["blocks.1"]],
    ),
    "a-list-itself": (lambda: nn.ModuleList([mlp(), mlp()]), []),
    "sequential-of-blocks": (lambda: Tree(blocks=nn.Sequential(Block(4), Block(4))), [["blocks.0", "blocks.1"]]),
    "sequential-of-leaves": (lambda: Tree(blocks=nn.Sequential(linear(), linear())), []),
    "sequential-of-unlike-parts": (lambda: Tree(blocks=nn.Sequential(Block(4), mlp())), []),
    "sequential-of-one": (lambda: Tree(blocks=nn.Sequential(Block(4))), []),
    "list-inside-of-a-sequential": (
        lambda: Tree(net=nn.Sequential(linear(), Tree(blocks=nn.ModuleList([mlp()])))),
        [["net.1.blocks.0"]],
    ),
    "a-block-registered-twice": (make_shared_block, [["first.0", "first.2"], ["second.1"]]),
    "hf-models-in-a-list": (
        lambda: Tree(models=nn.ModuleList([llama(), llama()])),
        [[f"models.{i}.{layer}" for layer in LLAMA_LAYERS] for i in range(2)],
    ),
    "hf-model-in-a-dict-beside-a-head": (
        lambda: Tree(parts=nn.ModuleDict({"lm": llama(), "head": linear()})),
        [[f"parts.lm.{layer}" for layer in LLAMA_LAYERS], ["parts.head"]],
    ),
    "hf-models-with-one-backbone": (make_shared_backbone, [[f"actor.{layer}" for layer in LLAMA_LAYERS]]),
}


@pytest.mark.parametrize("name", TREES)
def test_get_layer_lists(name: str) -> None:
    make, expected = TREES[name]
    root = make()
    assert names_of(root, get_layer_lists(root)) == expected


def test_adapters_are_no_layers() -> None:
    model = make_causal_lm(LLAMA)
    layers = list(model.model.layers)
    add_adapters(model, target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
    assert get_layer_lists(model) == [layers]


def test_hf_models_are_the_outermost_ones_each_once() -> None:
    model = llama()
    root = Tree(a=Tree(inner=model), again=model, b=nn.ModuleList([linear(), llama()]))
    assert names_of(root, get_hf_models(root)) == ["a.inner", "b.1"]
    assert get_hf_models(model) == [model]
    backbone_first, model_first = Tree(backbone=model.model, lm=model), Tree(lm=model, backbone=model.model)
    assert get_hf_models(backbone_first) == get_hf_models(model_first) == [model]
    assert get_hf_models(PlainTransformer()) == []


def test_kinds_of_modules() -> None:
    class UserLlama(LlamaForCausalLM):
        pass

    user_llama = UserLlama(LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"}))
    assert is_hf_model(user_llama)
    assert is_hf_model(user_llama.model)
    assert not is_hf_model(user_llama.lm_head)
    assert is_lightning_module(pl.LightningModule())
    assert not is_lightning_module(user_llama)


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertModel(BertConfig(vocab_size=11, **sizes))


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return ViTModel(ViTConfig(image_size=4, patch_size=2, **sizes))


ENDS: dict[str, tuple[Callable[[], nn.Module], tuple[str | None, str | None, str | None]]] = {
    "llama": (llama, ("model.embed_tokens", "lm_head", "model.norm")),
    "llama-base": (lambda: llama().model, ("embed_tokens", None, "norm")),
    "gpt2": (partial(make_causal_lm, GPT2), ("transformer.wte", "lm_head", "transformer.ln_f")),
    "bert": (make_bert, ("embeddings.word_embeddings", None, None)),
    "vit": (make_vit, (None, None, "layernorm")),
    "plain": (PlainTransformer, (None, None, "norm")),
    "no-parts": (mlp, (None, None, None)),
}


@pytest.mark.parametrize("name", ENDS)
def test_embedding_head_and_final_norm(name: str) -> None:
    make, expected = ENDS[name]
    model = make()
    names = {module: name for name, module in model.named_modules()}
    parts = find_parts(model)
    found = (parts.embedding, parts.head, parts.final_norm)
    assert tuple(None if part is None else names[part] for part in found) == expected


def test_parameters_and_their_owners() -> None:
    model = PlainTransformer(tied=True)
    owners, names = get_parameter_owners(model), get_parameter_names(model)
    weight = model.embedding.weight
    assert owners[weight] == [(model.embedding, "weight"), (model.head, "weight")]
    assert names[weight] == "embedding.weight"
    assert owners[model.norm.bias] == [(model.norm, "bias")]
    assert owners.keys() == names.keys() == set(model.parameters())


def test_scripted_modules_have_a_forward() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    assert has_forward(scripted)
    assert has_forward(nn.Linear(2, 2))
    assert not has_forward(nn.ModuleList())


def test_the_structure_of_a_module_with_several_models() -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = llama()
            self.student = make_vit()
            self.backbone = self.teacher.model

    module = Module()
    structure = find_structure(module)
    assert [parts.module for parts in structure.models] == [module.teacher, module.student]
    assert structure.hf_models == [module.teacher, module.teacher.model, module.student]
    assert structure.layer_lists == get_layer_lists(module)
    assert structure.layers == [layer for layers in structure.layer_lists for layer in layers]
    assert [parts.layer_lists for parts in structure.models] == [
        get_layer_lists(module.teacher),
        get_layer_lists(module.student),
    ]
    assert structure.modules == list(module.modules())


def test_a_tower_has_another_config() -> None:
    text = {**LLAMA, "model_type": "qwen2_vl_text"}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    model = AutoModelForImageTextToText.from_config(Qwen2VLConfig(text_config=text, vision_config=vision))
    assert find_parts(model).towers == set(model.model.visual.modules())


def test_a_model_with_several_text_configs_has_a_structure() -> None:
    """Transformers cannot say which of them is meant; only a tensor parallel plan needs to know."""
    small = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32, "vocab_size": 32}
    config = MusicgenConfig(
        text_encoder={"model_type": "t5", **small, "d_kv": 8},
        audio_encoder={"model_type": "encodec", "num_filters": 2, "hidden_size": 8, "codebook_size": 16},
        decoder={
            "vocab_size": 16,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "num_codebooks": 2,
        },
    )
    with torch.device("meta"):
        model = MusicgenForConditionalGeneration(config)
    [parts] = find_structure(model).models
    assert parts.layer_lists
    with pytest.raises(ValueError, match="text config"):
        _ = parts.towers


def test_the_final_norm_stands_beside_the_layers_not_in_one() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.norm = nn.LayerNorm(2)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.norm(hidden)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Mixture(), Mixture()])
            self.final_norm = nn.LayerNorm(2)

    model = Model()
    assert find_parts(model).final_norm is model.final_norm


def make_speech_model(rate: float) -> nn.Module:
    """A model whose encoder reads the rate from its config."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    convolutions = {"conv_dim": [8], "conv_stride": [5], "conv_kernel": [10], "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2Model(Wav2Vec2Config(**sizes, **convolutions, **positions, layerdrop=rate))


def with_rate(module: nn.Module, rate: Any) -> nn.Module:
    module.layerdrop = rate
    return module


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: Shelf(first=with_rate(nn.Linear(1, 1), 0), second=with_rate(nn.Linear(1, 1), 0.2)), ("second", 0.2)),
        (lambda: with_rate(nn.Linear(1, 1), 1), ("Linear", 1)),
        (lambda: Shelf(model=make_speech_model(0.1)), ("model", 0.1)),
        (lambda: make_speech_model(0.3), ("Wav2Vec2Model", 0.3)),
        (lambda: Shelf(model=make_speech_model(0.0)), None),
        (lambda: Shelf(first=with_rate(nn.Linear(1, 1), nn.Dropout()), model=make_causal_lm(LLAMA)), None),
        (lambda: with_rate(make_causal_lm(GPT2), 0.0), None),
    ],
    ids=["a module", "the root", "a config", "the config of the root", "a rate of 0", "another meaning", "no rate"],
)
def test_modules_that_skip_layers_at_random_are_found(build: Callable[[], nn.Module], found: Any) -> None:
    assert find_layer_drop(build()) == found
