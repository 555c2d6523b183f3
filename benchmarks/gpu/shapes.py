"""Configs of the models that the parts train."""

from typing import Any

from benchmarks.expert_parallel import QWEN3_30B_A3B as QWEN3_30B_A3B
from benchmarks.memory import LLAMA_3_8B

LLAMA_1_5B: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
}
"""Shape of Llama-3.2-1B, but with a head that is not tied to the embedding."""

LLAMA_3_70B: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
TINY: dict[str, Any] = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def make_mixture(fields: dict[str, Any], experts: int = 8) -> dict[str, Any]:
    """Make a mixture of small experts with the other sizes of a Llama. Each token uses two experts."""
    sizes = {"moe_intermediate_size": fields["intermediate_size"] // 4, "num_experts": experts}
    return {**fields, **sizes, "model_type": "qwen3_moe", "num_experts_per_tok": 2}


TINY_MIXTURE = make_mixture(TINY)
