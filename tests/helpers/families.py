"""One tiny model of every causal language model family of transformers that has a tensor parallel plan.

Sizes that a plan shards are divisible by 4. Nothing is random in a training step, and every kind of layer that a family
has is there once at least.
"""

from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_fsdp2.modules.experts import find_experts

_SHARED: dict[str, Any] = {
    "vocab_size": 101,  # odd, so that a vocabulary does not split evenly
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "use_sliding_window": True,
    "initializer_range": 0.2,  # at the usual 0.02, attention is uniform at this width, and its gradients vanish
    # mixtures of experts: a dense layer, then a sparse one, in the words of each family
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "mlp_only_layers": [0],
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "output_router_logits": False,
    # latent, linear and indexed attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    # what would make two runs differ
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "embd_pdrop": 0.0,
    "embed_dropout": 0.0,
    "embedding_dropout": 0.0,
    "hidden_dropout": 0.0,
    "input_jitter_noise": 0.0,
    "layerdrop": 0.0,
    "resid_dropout": 0.0,
    "resid_pdrop": 0.0,
    "residual_dropout": 0.0,
    "router_jitter_noise": 0.0,
}
"""Given to every family whose config has the field."""

_LINEAR_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING_FULL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_LATENT: dict[str, Any] = {"num_key_value_heads": 8}  # latent attention has as many key-value heads as heads
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 64}
_HALF_ROTARY: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}
# as some families have by default, at lengths that matter here
_LLAMA3_ROTARY: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
}
_YARN_ROTARY: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
}
_DOTS3_TEXT: dict[str, Any] = {
    **_LATENT,
    "layer_types": ["indexed_attention", "sliding_attention"],
    "head_dim": 16,
    "shared_experts_intermediate_size": 32,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_GEMMA3N_TEXT: dict[str, Any] = {
    **_SHARED_KEYS,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
_GEMMA4_UNIFIED_TEXT: dict[str, Any] = {
    **_SHARED_KEYS,
    "global_head_dim": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": True,
}
_GEMMA4_TEXT: dict[str, Any] = {
    **_GEMMA4_UNIFIED_TEXT,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "initializer_range": 0.4,  # attention without a scale is sharp, and magnifies rounding in most random models
}
_LLAMA4_TEXT: dict[str, Any] = {
    "intermediate_size_mlp": 64,
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "attention_chunk_size": 8,
    "floor_scale": 4,
}
_QWEN4_TEXT: dict[str, Any] = {
    **_LINEAR_FULL,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_HY_V4: dict[str, Any] = {"indexer_types": ["full", "shared"]}
_INKLING: dict[str, Any] = {
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "log_scaling_n_floor": 4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1, "num_shared_experts": 1, **_SLIDING_FULL},
    "apertus": _LLAMA3_ROTARY,
    "apertus1p5_text": _LLAMA3_ROTARY,
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": _LATENT,
    "axk2": {**_LATENT, "gated_norm_rank": 4},
    "bailing_hybrid": {**_LATENT, **_LINEAR_FULL, "num_mtp_layers": 0},
    "beam": _SLIDING_FULL,
    "bloom": {"n_layer": 2, "n_head": 8},
    "codegen": {**_GPT2, "rotary_dim": 4},
    "cohere": {},
    "cohere2": _SLIDING_FULL,
    "cohere2_moe": {**_SLIDING_FULL, "prefix_dense_intermediate_size": 64, "num_shared_experts": 1},
    "cohere_compass_text": {
        **_SLIDING_FULL,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 0, 1]},
            "full_attention": None,
        },
    },
    "cwm": {**_SLIDING_FULL, **_LLAMA3_ROTARY},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
        "o_groups": 4,
        "o_lora_rank": 8,
        "index_topk": 2,
    },
    "doge": {"keep_window_size": 8},  # with is_moe, its router mixes the tokens of a batch
    "dots1": {**_SLIDING_FULL, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3_TEXT,
        "vision_config": {"adapter_out_dim": 32},
        "audio_config": {"adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS3_TEXT,
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone4": _SLIDING_FULL,
    "exaone_moe": _SLIDING_FULL,
    "falcon": {"num_kv_heads": 4, "new_decoder_architecture": True, "ffn_hidden_size": 64},
    "flex_olmo": {},
    "flint": _SLIDING_FULL,
    "gemma": {},
    "gemma2": _SLIDING_FULL,
    "gemma3": {
        "text_config": _SLIDING_FULL,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 8,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
    },
    "gemma3_text": _SLIDING_FULL,
    "gemma3n_text": _GEMMA3N_TEXT,
    "gemma4": {
        "text_config": _GEMMA4_TEXT,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 16,
        },
    },
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified": {
        "text_config": _GEMMA4_UNIFIED_TEXT,
        "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
        "audio_config": {"audio_embed_dim": 16},
    },
    "gemma4_unified_text": _GEMMA4_UNIFIED_TEXT,
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": {**_LATENT, "indexer_types": ["full", "shared"]},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", **_SLIDING_FULL},
        "vision_config": {
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 16,
        },
    },
    "gpt-sw3": _GPT2,
    "gpt2": _GPT2,
    "gpt_neo": {"num_layers": 2, "num_heads": 8, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_neox": _HALF_ROTARY,
    "gpt_oss": {**_SLIDING_FULL, **_YARN_ROTARY},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granite": {},
    "granite_swa": {**_SLIDING_FULL, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoe": {},
    "granitemoe_swa": {**_SLIDING_FULL, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoehybrid": {**_LINEAR_FULL, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "granitemoeshared": {},
    "helium": {"head_dim": 4},  # its output projection is [hidden_size, hidden_size]
    "hrm_text": {},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "hy_v3": {},
    "hy_v4": _HY_V4,
    "hyperclovax": {},
    "inkling2_loop_text": {
        **_INKLING,
        "unpadded_vocab_size": 101,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
        "initializer_range": 0.1,  # layers that run twice magnify rounding
    },
    "inkling2_text": {
        **_INKLING,
        "unpadded_vocab_size": 101,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 2,
    },
    "inkling_text": {**_INKLING, "layer_types": ["hybrid_sliding", "hybrid"], "logits_mup_width_multiplier": 1.0},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "kimi_linear": {**_LATENT, **_LINEAR_FULL, "linear_num_heads": 8, "linear_head_dim": 8},
    "kolibri1": _SLIDING_FULL,
    "laguna": {**_SLIDING_FULL, "num_attention_heads_per_layer": [8, 4]},
    "lara_mini": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {},
    "llama4": {"text_config": _LLAMA4_TEXT},
    "llama4_text": _LLAMA4_TEXT,
    "longcat_flash": {
        **_LATENT,
        "num_layers": 1,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
    },
    "mellum": _SLIDING_FULL,
    "mimo_v2_flash": _SLIDING_FULL,
    "minicpm3": {**_LATENT, "dim_model_base": 32},
    "minimax": {**_LINEAR_FULL, "block_size": 8},
    "minimax_m2": {},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "dense_intermediate_size": 64,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": _SLIDING_FULL,
    "ministral3": {"rope_parameters": {**_YARN_ROTARY["rope_parameters"], "llama_4_scaling_beta": 0.1}},
    "mistral": {},
    "mixtral": {},
    "moss_transcribe_diarize": {
        "text_config": {"model_type": "qwen3", **_SLIDING_FULL},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
    },
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 4,
        "chunk_size": 8,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _SLIDING_FULL,
    "olmo_hybrid": _LINEAR_FULL,
    "olmoe": {},
    "opt": {"ffn_dim": 64, "init_std": 0.2},
    "phi": {},
    "phi3": {},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 8,
            "patch_size": 4,
            "crop_size": 8,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
            "input_size": 8,
        },
    },
    "phimoe": {},
    "qwen2": _SLIDING_FULL,
    "qwen2_moe": _SLIDING_FULL,
    "qwen3": _SLIDING_FULL,
    "qwen3_5": {"text_config": _LINEAR_FULL},
    "qwen3_5_moe": {"text_config": _LINEAR_FULL},
    "qwen3_5_moe_text": _LINEAR_FULL,
    "qwen3_5_text": _LINEAR_FULL,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR_FULL,
    "qwen4_exp": {"text_config": _QWEN4_TEXT},
    "qwen4_exp_text": _QWEN4_TEXT,
    "sarvam_mla": _LATENT,
    "sarvam_moe": {"use_qk_norm": True},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": {},
    "stablelm": {**_HALF_ROTARY, "qk_layernorm": True},
    "starcoder2": {},
    "vaultgemma": _SLIDING_FULL,
    "youtu": _LATENT,
}

MIXTURES_WITHOUT_PLAN: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid_sliding"]},
}
"""Mixtures of experts that have no tensor parallel plan."""

NOT_BUILT: dict[str, str] = {
    "gemma3n": "Its vision tower needs timm and PIL, which are not installed; gemma3n_text is the rest of it.",
    "gemma4_assistant": "It reads embeddings, keys and values of another model, and returns no loss.",
    "gemma4_unified_assistant": "It reads embeddings, keys and values of another model, and returns no loss.",
}
"""Families that have a plan and are left out, and why."""

VARIED = (
    "llama",  # column- and row-wise projections
    "qwen3",  # norms of each rank's heads
    "gemma2",  # norms around the regions, capped logits
    "gemma3_text",  # two rotary bases, sliding windows
    "gemma3n_text",  # four streams, statistics of all intermediate features
    "olmo2",  # norms over all heads
    "gpt2",  # Conv1D, packed q, k, v
    "phi3",  # packed q, k, v of unequal sizes
    "gpt_neox",  # q, k, v packed by head, parallel regions
    "bloom",  # alibi, residuals handed to the regions
    "falcon",  # one norm per region, key-value groups
    "opt",  # projections as children of the layer
    "gptj",
    "stablelm",  # norms of their own for each head
    "gpt_oss",  # biases of experts, attention sinks
    "glm4",  # packed gate and up that the plan gathers
    "llama4_text",  # transposed experts, flattened results
    "qwen3_moe",
    "qwen2_moe",  # shared expert behind a gate
    "cohere2",
    "mixtral",  # packed experts
    "deepseek_v3",  # latent attention
    "deepseek_v4",  # hyper-connections
    "longcat_flash",  # experts that return their input
    "qwen3_next",  # linear attention
    "jamba",  # state space layers
    "doge",  # a dynamic mask of each rank's heads
    "inkling_text",  # an embedding with a norm
)
"""Families that differ from each other in the styles that their plans use."""


def get_families() -> list[str]:
    """Those that the installed transformers knows."""
    return [model_type for model_type in FAMILIES if model_type in CONFIG_MAPPING]


def keep_known(*names: str) -> list[str]:
    """Leave out the names of cells (`family` or `family-mesh`) whose family an older transformers lacks.

    The self-check in tests/compat holds that the newest lacks none.
    """
    return [name for name in names if name.partition("-")[0] in CONFIG_MAPPING]


def get_all_families() -> list[str]:
    """Those, and the mixtures without a plan."""
    return [model_type for model_type in FAMILIES | MIXTURES_WITHOUT_PLAN if model_type in CONFIG_MAPPING]


def get_mixture_families() -> list[str]:
    """Those whose experts expert parallelism finds."""
    return sorted(filter(_has_packed_experts, get_all_families()))


def _has_packed_experts(model_type: str) -> bool:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_family_config(model_type))
    return bool(find_experts(model.modules()))


def make_family_config(model_type: str, **changes: Any) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    given = {**_add_shared(config_class, (FAMILIES | MIXTURES_WITHOUT_PLAN)[model_type]), **changes}
    if "text_config" in given:
        text = given["text_config"]
        text_class = (
            CONFIG_MAPPING[text["model_type"]] if "model_type" in text else config_class.sub_configs["text_config"]
        )
        given["text_config"] = _add_shared(text_class, text)
    return AutoConfig.for_model(model_type, **deepcopy(given))  # a config keeps, and changes, the lists it is given


def make_family_model(model_type: str, **changes: Any) -> nn.Module:
    model = AutoModelForCausalLM.from_config(make_family_config(model_type, **changes)).float()
    _roughen(model)
    return model


@torch.no_grad()
def _roughen(model: nn.Module) -> None:
    """Give noise to what starts constant: a bias of zeros or a norm of ones hides how often, and where, it applies."""
    for parameter in model.parameters():
        if parameter.numel() and torch.equal(parameter, parameter.flatten()[0].expand_as(parameter)):
            parameter.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token, zeros until a checkpoint is loaded
            buffer.copy_((torch.arange(len(buffer))[:, None] + torch.arange(buffer.shape[1])) % 4)


def _add_shared(config_class: type[PretrainedConfig], given: dict[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(config_class)}
    aliases = config_class.attribute_map or {}
    shared = {name if name in known else aliases.get(name, name): value for name, value in _SHARED.items()}
    return {**{name: value for name, value in shared.items() if name in known}, **given}
