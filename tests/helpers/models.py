"""Tiny models and batches of every kind the tests train."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from helpers.oracle import make_config

VOCABULARY = 101

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def make_causal_lm(config: dict[str, Any]) -> nn.Module:
    return AutoModelForCausalLM.from_config(make_config(config), attn_implementation="sdpa").train()


def add_adapters(model: Any, **options: Any) -> nn.Module:
    """Freeze ``model`` and give it low-rank adapters, with peft; none of them starts at zero."""
    return get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **options)).train()


def make_token_batches(count: int, *, size: int = 2, length: int = 12, ragged: bool = True) -> list[dict[str, Tensor]]:
    """Random tokens; ragged: every batch has another number of labels, and every fifth has none."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index in range(count):
        input_ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
        labels = input_ids.clone()
        if ragged:
            kept = 0 if index % 5 == 3 else 3 + index % (length - 3)
            labels[:, kept:] = -100
        batches.append({"input_ids": input_ids, "labels": labels})
    return batches


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.mlp(hidden)


class PlainTransformer(nn.Module):
    """A transformer of plain torch modules; ``tied`` shares embedding and head."""

    def __init__(self, *, tied: bool = False, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch["input_ids"])[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()), 1
