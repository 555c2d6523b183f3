"""Kinds of models that people shard, each with the units it must become, and how to train it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.models import GPT2, LLAMA, VOCABULARY, Block, PlainTransformer, add_adapters, make_causal_lm
from lightning_fsdp2 import create_device_mesh
from lightning_fsdp2.parallel.data.fully_shard import reshard
from lightning_fsdp2.parallelizer import (
    fsdp2_strategy_parallelize,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def make_tokens(rank: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(rank))


def token_loss(model: nn.Module, rank: int) -> Tensor:
    output = model(make_tokens(rank))
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), make_tokens(rank)[:, 1:].flatten())


# ---------------------------------------------------------------------- models


class UserLlama(LlamaForCausalLM):
    """A user's subclass with a head of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.model(input_ids, use_cache=False).last_hidden_state
        return self.lm_head(hidden) + self.value(hidden)


class Wrapper(nn.Module):
    """Hides a model under another prefix and beside another part."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = nn.Module()
        self.engine.net = make_causal_lm(LLAMA)
        self.value = nn.Linear(VOCABULARY, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.engine.net(input_ids, use_cache=False).logits
        return logits + self.value(logits)


class OneModel(pl.LightningModule):
    """A LightningModule with a model, a Linear and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_causal_lm(LLAMA)
        self.adapter = nn.Linear(VOCABULARY, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.adapter(self.model(input_ids, use_cache=False).logits) * self.scale


class Distillation(pl.LightningModule):
    """A frozen teacher and a student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = make_causal_lm(LLAMA).requires_grad_(False)
        self.student = make_causal_lm({**LLAMA, "num_hidden_layers": 2})

    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(input_ids, use_cache=False).logits
        return self.student(input_ids, use_cache=False).logits + target


class Stack(nn.Module):
    """Runs blocks one after the other between an embedding and a head."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = blocks
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            for part in block.values() if isinstance(block, nn.ModuleDict) else [block]:
                hidden = part(hidden)
        return self.head(hidden)


class ExpertBlock(nn.Module):
    """A mixture of experts; every token uses all of them."""

    def __init__(self, gate_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3, dtype=gate_dtype)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.gate(hidden.to(self.gate.weight.dtype)).softmax(-1).to(hidden.dtype)
        return hidden + sum(expert(hidden) * weights[..., i, None] for i, expert in enumerate(self.experts))


class Mixer(nn.Module):
    """A state space mixer in small: a decay in float64 of its own, beside projections in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(32, 32)
        self.log_decay = nn.Parameter(torch.linspace(0.5, 1.5, 32, dtype=torch.float64))
        self.norm = nn.LayerNorm(32, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.norm(self.into(hidden).double() * self.log_decay).float()


class MixerLayer(nn.Module):
    """Holds a mixer beside a norm, and more weights in float32 than the mixer has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mixer = Mixer()
        self.mlp = nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(self.mixer(self.norm(hidden)))


class Convolved(nn.Module):
    """Reads a convolution in float64 without a call, as layers do that hand its weights to a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(32, 32)
        self.convolution = nn.Conv1d(32, 32, 3, padding=1, groups=32, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.convolution.weight, self.convolution.bias
        channels = self.into(hidden).double().transpose(1, 2)
        mixed = nn.functional.conv1d(channels, weight, bias, padding=1, groups=32)
        return hidden + mixed.transpose(1, 2).float()


class OddBlock(nn.Module):
    """Has weights that are not contiguous, a frozen weight in float8, and a buffer whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter((0.2 * torch.randn(32, 16)).t())
        self.frozen = nn.Parameter(torch.randn(16, 32).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.ones(1).expand(32))

    def forward(self, hidden: Tensor) -> Tensor:
        images = self.convolution(hidden.unflatten(-1, (2, -1)).transpose(1, 2))
        hidden = hidden + images.transpose(1, 2).flatten(-2)
        return hidden + hidden @ self.transposed.t() @ self.frozen.to(hidden.dtype) * self.scale


def make_llama_with_a_final_norm_in_float64() -> nn.Module:
    model = make_causal_lm(LLAMA)
    model.model.norm.double()
    model.lm_head.register_forward_pre_hook(lambda head, args: (args[0].float(),))
    return model


def make_adapted_llama() -> nn.Module:
    return add_adapters(make_causal_lm(LLAMA), target_modules=["q_proj"])


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    return T5ForConditionalGeneration(config).train()


def t5_loss(model: nn.Module, rank: int) -> Tensor:
    return model(input_ids=make_tokens(rank), labels=make_tokens(rank + 7)).loss


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(max_position_embeddings=32, num_labels=5, **SIZES)).train()


def bert_loss(model: nn.Module, rank: int) -> Tensor:
    return model(input_ids=make_tokens(rank), labels=torch.tensor([rank, 4])).loss


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, **SIZES)).train()


def vit_loss(model: nn.Module, rank: int) -> Tensor:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    return model(pixel_values=images, labels=torch.tensor([rank, 4])).loss


def make_user_llama() -> nn.Module:
    return UserLlama(LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"}))


def make_partly_frozen_llama() -> nn.Module:
    model = make_causal_lm(LLAMA)
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    return model


def make_moe(gate_dtype: torch.dtype = torch.float32) -> nn.Module:
    return Stack(nn.ModuleList(ExpertBlock(gate_dtype) for _ in range(2)))


def make_dict_stack() -> nn.Module:
    return Stack(nn.ModuleList(nn.ModuleDict({"a": Block(32), "b": Block(32)}) for _ in range(2)))


@dataclass
class Model:
    """A kind of model, the units it must become, and how to train it."""

    make: Callable[[], nn.Module]
    units: str
    """One unit per line: its modules, and the settings that are not the default; see :func:`describe`."""

    loss: Callable[[nn.Module, int], Tensor] = token_loss


LLAMA_UNITS = """
    {}model.layers.0
    {}model.layers.1
    {}model.layers.2 kept
    {}model.embed_tokens forward-only
    {}model.norm + {}lm_head kept
"""

MODELS = {
    "llama": Model(partial(make_causal_lm, LLAMA), LLAMA_UNITS.replace("{}", "") + "root kept output"),
    "llama-tied": Model(
        partial(make_causal_lm, {**LLAMA, "tie_word_embeddings": True}),
        """
        model.layers.0
        model.layers.1
        model.layers.2 kept
        model.embed_tokens + model.norm + lm_head kept
        root kept output
        """,
    ),
    "llama-partly-frozen": Model(make_partly_frozen_llama, LLAMA_UNITS.replace("{}", "") + "root kept output"),
    "llama-subclass": Model(make_user_llama, LLAMA_UNITS.replace("{}", "") + "root kept output"),
    "llama-under-a-prefix": Model(
        Wrapper,
        LLAMA_UNITS.replace("{}", "engine.net.") + "engine.net kept\n value\n root kept output",
    ),
    "gpt2": Model(
        partial(make_causal_lm, GPT2),
        """
        transformer.h.0
        transformer.h.1 kept
        transformer.wte + transformer.ln_f + lm_head kept
        root kept output
        """,
    ),
    "t5": Model(
        make_t5,
        """
        encoder.block.0
        encoder.block.1 kept
        decoder.block.0
        decoder.block.1 kept
        root kept output
        """,
        t5_loss,
    ),
    "bert": Model(
        make_bert,
        """
        bert.encoder.layer.0
        bert.encoder.layer.1 kept
        bert.embeddings.word_embeddings forward-only
        root kept output
        """,
        bert_loss,
    ),
    "vit": Model(make_vit, "vit.layers.0\n vit.layers.1 kept\n root kept output", vit_loss),
    "lightning-module": Model(
        OneModel,
        LLAMA_UNITS.replace("{}", "model.") + "model kept output\n adapter output\n root kept container",
    ),
    "teacher-and-student": Model(
        Distillation,
        """
        teacher.model.layers.0
        teacher.model.layers.1
        teacher.model.layers.2
        student.model.layers.0
        student.model.layers.1 kept
        teacher.model.embed_tokens forward-only
        teacher.model.norm + teacher.lm_head
        student.model.embed_tokens forward-only
        student.model.norm + student.lm_head kept
        teacher output
        student kept output
        root kept container
        """,
    ),
    "peft": Model(
        make_adapted_llama,
        LLAMA_UNITS.replace("{}", "base_model.model.") + "base_model.model kept\n root kept output",
    ),
    "plain": Model(
        PlainTransformer,
        "blocks.0\n blocks.1\n blocks.2 kept\n embedding\n norm\n head\n root kept output",
    ),
    "plain-tied": Model(
        partial(PlainTransformer, tied=True),
        "blocks.0\n blocks.1\n blocks.2 kept\n embedding + head\n norm\n root kept output",
    ),
    "experts-in-blocks": Model(make_moe, "blocks.0\n blocks.1 kept\n embedding\n head\n root kept output"),
    "dicts-in-a-list": Model(
        make_dict_stack,
        "blocks.0.a\n blocks.0.b kept\n blocks.1.a\n blocks.1.b kept\n embedding\n head\n root kept output",
    ),
    "two-dtypes": Model(
        partial(make_moe, torch.float64),
        "blocks.0.gate\n blocks.0\n blocks.1.gate kept\n blocks.1 kept\n embedding\n head\n root kept output",
    ),
    "blocks-of-another-dtype-than-their-modules": Model(
        lambda: Stack(nn.ModuleList(Mixer() for _ in range(2))),
        "blocks.0.into\n blocks.0\n blocks.1.into kept\n blocks.1 kept\n embedding\n head\n root kept output",
    ),
    "mixers-of-another-dtype-than-their-modules": Model(
        lambda: Stack(nn.ModuleList(MixerLayer() for _ in range(2))),
        """
        blocks.0.mixer.into
        blocks.0.mixer
        blocks.0
        blocks.1.mixer.into kept
        blocks.1.mixer kept
        blocks.1 kept
        embedding
        head
        root kept output
        """,
    ),
    "convolutions-that-are-not-called": Model(
        lambda: Stack(nn.ModuleList(Convolved() for _ in range(2))),
        """
        blocks.0.convolution
        blocks.0
        blocks.1.convolution kept
        blocks.1 kept
        embedding
        head
        root kept output
        """,
    ),
    "odd-tensors": Model(
        lambda: Stack(nn.ModuleList(OddBlock() for _ in range(2))),
        "blocks.0\n blocks.1 kept\n embedding\n head\n root kept output",
    ),
    "llama-final-norm-in-float64": Model(
        make_llama_with_a_final_norm_in_float64,
        LLAMA_UNITS.replace("{}", "").replace("norm + lm_head", "norm kept\n lm_head") + "root kept output",
    ),
}


def parallelize(model: nn.Module, **options: Any) -> nn.Module:
    return fsdp2_strategy_parallelize(
        model, create_device_mesh(device_type="cpu"), mp_policy=MixedPrecisionPolicy(), **options
    )


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Compare with the tolerances of DESIGN, "What correct means"; every rank must call it."""
    reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    actual = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max().item()
        assert error <= 1e-5 * gradient.abs().max().item() + 1e-7 * largest, f"{name}: off by {error}"
