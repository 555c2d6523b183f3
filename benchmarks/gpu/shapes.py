"""Configs of the models that the parts train."""

from typing import Any

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
