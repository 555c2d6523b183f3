"""Whether the tokens of a language model see later ones, which are the labels that it learns to predict."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

_SMALL: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "out_hidden_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "width", "hidden_dim", "emb_dim", "encoder_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "d_inner"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "ffn_hidden_dim"), 128),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp", "shared_intermediate_size"), 128),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
}
"""What a field of a config is cut to, if it is larger; the names are those of transformers' architectures."""

_NARROW = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")

_LENGTH, _CHANGED = 12, 8
_TOLERANCE = 1e-4


@cache
def _probe(text: str, model_type: str) -> None: ...
