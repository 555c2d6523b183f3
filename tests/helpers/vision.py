"""One tiny model of vision-language families of transformers, and batches with images for them.

Images are random patches of as many pixels as a family's tower takes; no processor is needed.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

VOCABULARY, LENGTH = 128, 32
IMAGE, VIDEO, START, END = 5, 6, 7, 8
"""Token ids: the placeholder of a part of an image, that of a video, and what stands before and behind an image."""

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_CLIP = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32}
_SLIDING: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_QFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "encoder_hidden_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "dropout": 0.0,
}
_SAM: dict[str, Any] = {
    **_TOWER,
    "output_channels": 8,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 64,
    "initializer_range": 0.02,
}


def _turn(*sections: int, **more: Any) -> dict[str, Any]:
    """Return rotary parameters with parts for time, height and width."""
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more},
    }


_QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "num_heads": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TEXT = {**_TEXT, **_turn(2, 3, 3)}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_QWEN_WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
_WINDOWS: dict[str, Any] = {**_QWEN_TOWER, **_QWEN_WIDTHS, "fullatt_block_indexes": [1], "window_size": 56}
_DEEPSTACK: dict[str, Any] = {
    **_QWEN_TOWER,
    **_QWEN_WIDTHS,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_GLM_TOWER: dict[str, Any] = {**_QWEN_TOWER, **_QWEN_WIDTHS, "image_size": 56}
_GLM_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": 3,
    "video_end_token_id": 4,
}
_GLM_TEXT: dict[str, Any] = {**_TEXT, **_turn(1, 2, 1, partial_rotary_factor=0.5)}
_GEMMA3: dict[str, Any] = {
    "text_config": {**_TEXT, **_SLIDING, "head_dim": 16},
    "vision_config": _TOWER,
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
}

_GEMMA4_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "boi_token_id": START,
    "eoi_token_id": END,
    "audio_token_id": 9,
    "boa_token_id": 3,
    "eoa_token_index": 4,
}
_INKLING: dict[str, Any] = {
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "log_scaling_n_floor": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_KOSMOS_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "embed_dim": 64,
    "layers": 2,
    "ffn_dim": 128,
    "attention_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_EXPERTS: dict[str, Any] = {**_MOE, "num_experts": 4, "num_local_experts": 4, "shared_expert_intermediate_size": 32}
_LLAMA: dict[str, Any] = {**_TEXT, "model_type": "llama"}
_PIXTRAL: dict[str, Any] = {**_TOWER, "model_type": "pixtral", "head_dim": 8}
_LINEAR: dict[str, Any] = {
    "initializer_range": 0.2,  # at the usual 0.02, the gradients of `A_log` are sums of rounding at this width
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MINICPM: dict[str, Any] = {
    "text_config": {**_TEXT, **_LINEAR, "model_type": "qwen3_5_text"},
    "vision_config": _TOWER,
    "insert_layer_id": 0,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}
_MUSE: dict[str, Any] = {
    "text_config": {
        **_TEXT,
        **_SLIDING,
        "head_dim": 16,
        "layer_rope_theta": [10000.0, 0],
        "qk_scale_factor": 1.0,  # by default attention is sharp, and magnifies rounding
    },
    "vision_config": {
        **_TOWER,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
        "max_position_embeddings": 16,
        "layer_types": ["window_attention", "full_attention"],
    },
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "out_hidden_size": 128,
    "projector_hidden_size": 64,
}
_QWEN_EAR: dict[str, Any] = {
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "max_source_positions": 16,
    "n_window": 4,
    "output_dim": 64,
}
_QWEN3_TOWER: dict[str, Any] = {**_QWEN_TOWER, **_QWEN_WIDTHS, "num_position_embeddings": 16}
_QWEN3_LINEAR: dict[str, Any] = {**_TEXT, **_LINEAR, **_turn(2, 1, 1, partial_rotary_factor=0.5)}

FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {
        "text_config": {**_TEXT, "intermediate_size": 32, "moe_num_experts": 4, "moe_topk": 2},
        "vision_config": {**_TOWER, "model_type": "idefics3_vision"},
        "projector_patch_to_query_dict": {16: 4},
        "image_token_index": IMAGE,
    },
    "aya_vision": {
        "text_config": {**_TEXT, **_SLIDING, "model_type": "cohere2"},
        "vision_config": {**_SIGLIP, "vision_use_head": False},
        "image_token_index": IMAGE,
    },
    "blip": {
        "text_config": {**_TEXT, "encoder_hidden_size": 32, "projection_dim": 32, "sep_token_id": 2},
        "vision_config": {**_TOWER, "projection_dim": 32, "initializer_range": 0.02},
        "projection_dim": 32,
        "image_text_hidden_size": 32,
    },
    "blip-2": {
        "text_config": _OPT,
        "vision_config": {**_TOWER, "initializer_range": 0.02},
        "qformer_config": _QFORMER,
        "num_query_tokens": 4,
        "image_token_index": IMAGE,
        "image_text_hidden_size": 32,
    },
    "chameleon": {
        **_TEXT,
        "vq_config": {
            "embed_dim": 16,
            "num_embeddings": 8,
            "latent_channels": 16,
            "resolution": 56,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 2, 2],
            "num_res_blocks": 1,
        },
        "vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{chr(ord('A') + code)}Z": 100 + code for code in range(8)}},
    },
    "cohere2_vision": {
        "text_config": {**_TEXT, **_SLIDING, "model_type": "cohere2"},
        "vision_config": _SIGLIP,
        "image_token_id": IMAGE,
        "alignment_intermediate_size": 64,
    },
    "cohere_compass": {
        "text_config": {
            **_TEXT,
            **_SLIDING,
            "rope_parameters": {"sliding_attention": _turn(2, 3, 3)["rope_parameters"], "full_attention": None},
        },
        "vision_config": _DEEPSTACK,
        **_QWEN_TOKENS,
    },
    "cosmos3_edge": {
        "text_config": {**_QWEN_TEXT, "head_dim": 16},
        "vision_config": {**_TOWER, "num_patches": 16},
        "projector_hidden_size": 64,
        **_QWEN_TOKENS,
    },
    "cosmos3_omni": {
        "text_config": {**_QWEN_TEXT, "head_dim": 16},
        "vision_config": _DEEPSTACK,
        **_QWEN_TOKENS,
    },
    "deepseek_ocr2": {
        "text_config": {
            **_TEXT,
            **_MOE,
            "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {
            "sam_config": {**_SAM, "downsample_channels": [16, 32]},
            "encoder_config": {**_TEXT, "hidden_size": 32, "intermediate_size": 64},
        },
        "image_token_id": IMAGE,
    },
    "deepseek_vl": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _SIGLIP,
        "image_token_id": IMAGE,
    },
    "deepseek_vl_hybrid": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _SIGLIP,
        "high_res_vision_config": {**_SAM, "model_type": "sam_vision_model"},
        "image_token_id": IMAGE,
    },
    "dots3_note": {
        "text_config": {
            **_TEXT,
            **_MOE,
            **_LATENT,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "index_topk": 8,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "head_dim": 16,
            "sliding_window": 8,
            "shared_experts_intermediate_size": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
        },
        "vision_config": {
            **_TOWER,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": 9,
    },
    "emu3": {
        "text_config": {**_TEXT, "attention_dropout": 0.0},
        "vq_config": {
            "codebook_size": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 2, 2],
            "num_res_blocks": 1,
            "hidden_size": 64,
            "attn_resolutions": [],
        },
        "vocabulary_map": {
            "<image>": IMAGE,
            "<|extra_200|>": 99,
            **{f"<|visual token {code:06}|>": 100 + code for code in range(8)},
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            **_TEXT,
            **_turn(3, 3, 2),
            "moe_intermediate_size": [32, 32],
            "moe_k": 2,
            "moe_num_experts": 4,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {**_QWEN_TOWER, "hidden_size": 32, "intermediate_size": 64, "temporal_merge_size": 2},
        "image_token_id": IMAGE,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_token_id": VIDEO,
        "video_start_token_id": 3,
        "video_end_token_id": 4,
    },
    "exaone4_5": {
        "text_config": {**_TEXT, **_SLIDING, "model_type": "exaone4"},
        "vision_config": {**_WINDOWS, "num_key_value_heads": 2},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    },
    "florence2": {
        "text_config": {
            "model_type": "bart",
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 256,
            "dropout": 0.0,
        },
        "vision_config": {
            "depths": [1, 1],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 32],
            "num_heads": [4, 4],
            "num_groups": [4, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
            "projection_dim": 64,
        },
        "image_token_id": IMAGE,
    },
    "fuyu": {
        "text_config": {**_TEXT, "model_type": "persimmon"},
        "image_size": 56,
        "patch_size": 14,
        "image_token_id": IMAGE,
    },
    "gemma3": {**_GEMMA3, "vision_config": {**_TOWER, "vision_use_head": True}},
    "gemma3 (vision_use_head=False)": {**_GEMMA3, "vision_config": {**_TOWER, "vision_use_head": False}},
    "gemma4": {
        "text_config": {
            **_TEXT,
            **_SLIDING,
            "head_dim": 16,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
        "vision_config": {
            **_TOWER,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 16,
        },
        **_GEMMA4_TOKENS,
    },
    "gemma4_unified": {
        "text_config": {**_TEXT, **_SLIDING, "head_dim": 16, "global_head_dim": 16},
        "vision_config": {
            "patch_size": 7,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 16,
            "output_proj_dims": 32,
        },
        "audio_config": {"audio_embed_dim": 16},
        **_GEMMA4_TOKENS,
    },
    "git": {
        **_TEXT,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "vision_config": _TOWER,
    },
    "glm46v": {"text_config": _GLM_TEXT, "vision_config": _GLM_TOWER, **_GLM_TOKENS},
    "glm4v": {"text_config": _GLM_TEXT, "vision_config": _GLM_TOWER, **_GLM_TOKENS},
    "glm4v_moe": {
        "text_config": {**_GLM_TEXT, **_MOE, "first_k_dense_replace": 1},
        "vision_config": _GLM_TOWER,
        **_GLM_TOKENS,
    },
    "glm5_next": {
        "text_config": {
            **_TEXT,
            **_MOE,
            **_LATENT,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "indexer_types": ["full", "full"],
            "index_topk": 8,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_kpool": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "hc_mult": 2,
        },
        "vision_config": {**_GLM_TOWER, "projection_intermediate_size": 64},
        **_GLM_TOKENS,
    },
    "glm_ocr": {"text_config": {**_GLM_TEXT, **_turn(2, 4, 2)}, "vision_config": _GLM_TOWER, **_GLM_TOKENS},
    "glmga": {"text_config": _GLM_TEXT, "vision_config": _GLM_TOWER, **_GLM_TOKENS},
    "got_ocr2": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SAM, "image_size": 64, "patch_size": 8},
        "image_token_index": IMAGE,
    },
    "granite4_vision": {
        "text_config": _TEXT,
        "vision_config": {**_CLIP, "hidden_size": 64},
        "qformer_config": {**_QFORMER, "num_hidden_layers": 1, "cross_attention_frequency": 1},
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1, 1, 1, 1],
        "downsample_rate": "1/2",
        "projector_dropout": 0.0,
        "image_grid_pinpoints": [[56, 56]],
        "image_token_index": IMAGE,
    },
    "granite_docling": {
        "text_config": _TEXT,
        "vision_config": {
            **_TOWER,
            "out_hidden_size": 64,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0],
            "use_fine_route": False,
        },
        "image_token_id": IMAGE,
        "pad_token_id": 0,
    },
    "hunyuan_vl": {
        "text_config": {**_TEXT, **_turn(2, 2, 2, 2), "head_dim": 16},
        "vision_config": {**_TOWER, "max_image_size": 56, "out_hidden_size": 64, "text_hidden_size": 64},
        "image_token_id": IMAGE,
        "im_start_id": START,
        "im_end_id": END,
        "im_newline_id": 9,
    },
    "hyperclovax_vision_v2": {
        "text_config": _TEXT,
        "vision_config": _WINDOWS,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    },
    "idefics": {
        **_TEXT,
        "vision_config": {**_TOWER, "embed_dim": 32},
        "perceiver_config": {},
        "alpha_initializer": "ones",
        "freeze_text_layers": False,
        "freeze_vision_layers": False,
    },
    "idefics2": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": _TOWER,
        "perceiver_config": {
            "hidden_size": 64,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        "image_token_id": IMAGE,
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _TOWER,
        "image_token_id": IMAGE,
    },
    "inkling2": {
        "text_config": {
            **_TEXT,
            **_INKLING,
            "unpadded_vocab_size": VOCABULARY,
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "n_layers_per_attn_res_block": 2,
        },
        "vision_config": {**_TOWER, "posemb_grid_size": 4, "projection_hidden_dim": 64, "text_hidden_size": 64},
        "image_token_id": IMAGE,
    },
    "inkling_mm_model": {
        "text_config": {
            **_TEXT,
            **_INKLING,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse"],
            "logits_mup_width_multiplier": 1.0,
        },
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 4, "patch_size": 14, "text_hidden_size": 64},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": 64},
        "image_token_id": IMAGE,
        "audio_token_id": 9,
    },
    "instructblip": {
        "text_config": _OPT,
        "vision_config": {**_TOWER, "initializer_range": 0.02},
        "qformer_config": _QFORMER,
        "num_query_tokens": 4,
        "image_token_index": IMAGE,
    },
    "instructblipvideo": {
        "text_config": _OPT,
        "vision_config": {**_TOWER, "initializer_range": 0.02},
        "qformer_config": _QFORMER,
        "num_query_tokens": 2,
        "video_token_index": IMAGE,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
    },
    "janus": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "mlp_ratio": 2.0,
            "projection_dim": 64,
            "num_image_tokens": 16,
        },
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": 8,
            "latent_channels": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 4,
            "projection_dim": 64,
            "image_token_embed_dim": 64,
        },
        "image_token_id": IMAGE,
    },
    "kimi_k25": {
        "text_config": {**_TEXT, **_MOE, **_LATENT, "first_k_dense_replace": 1},
        "vision_config": {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 32,
        **_QWEN_TOKENS,
    },
    "kosmos-2": {
        "text_config": _KOSMOS_TEXT,
        "vision_config": _TOWER,
        "latent_query_num": 4,
    },
    "kosmos-2.5": {
        "text_config": _KOSMOS_TEXT,
        "vision_config": {**_TOWER, "patch_embed_hidden_size": 3 * 14 * 14, "head_dim": 8, "max_num_patches": 16},
        "latent_query_num": 4,
    },
    "lfm2_vl": {
        "text_config": {
            **_TEXT,
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
        "vision_config": {
            **_TOWER,
            "model_type": "siglip2_vision_model",
            "num_patches": 16,
            "vision_use_head": False,
        },
        "image_token_id": IMAGE,
        "projector_hidden_size": 64,
    },
    "lfm3_vl": {
        "text_config": {
            **_TEXT,
            **_SLIDING,
            "head_dim": 16,
            "model_type": "lfm3",
            "num_hidden_layers": 3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
        },
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        **_QWEN_TOKENS,
        "projector_hidden_size": 64,
    },
    "lighton_ocr": {
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16},
        "vision_config": _PIXTRAL,
        "image_token_id": IMAGE,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "attention_chunk_size": 8,
            "floor_scale": 4,
        },
        "vision_config": {
            **_TOWER,
            "intermediate_size": 128,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "llava": {
        "text_config": _LLAMA,
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "llava (olmo2)": {
        "text_config": {**_TEXT, "model_type": "olmo2"},
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "llava_next": {
        "text_config": _LLAMA,
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[56, 56]],
    },
    "llava_next_video": {
        "text_config": _LLAMA,
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[56, 56]],
    },
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SIGLIP, "vision_use_head": False},
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "image_grid_pinpoints": [[56, 56]],
    },
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": {**_MINICPM, "image_size": 112},
    "minicpmv4_7": {
        **_MINICPM,
        "image_size": 112,
        "image_start_id": START,
        "image_end_id": END,
        "slice_start_id": 3,
        "slice_end_id": 4,
        "newline_id": 9,
    },
    "minimax_m3_vl": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "head_dim": 16,
            "rotary_dim": 8,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        },
        "vision_config": _TOWER,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "projector_hidden_size": 64,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16},
        "vision_config": _PIXTRAL,
        "image_token_index": IMAGE,
    },
    "mistral_large4": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            **_LATENT,
            "head_dim": 8,
            "index_topk": 8,
            "index_head_dim": 16,
            "index_n_heads": 4,
        },
        "vision_config": _PIXTRAL,
        "image_token_index": IMAGE,
    },
    "mllama": {
        "text_config": {**_TEXT, "cross_attention_layers": [1]},
        "vision_config": {
            **_TOWER,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        "image_token_index": IMAGE,
    },
    "molmo2": {
        "text_config": {**_TEXT, "head_dim": 16, "additional_vocab_size": 0},
        "vision_config": {**_TOWER, "image_size": [56, 56], "num_key_value_heads": 4, "head_dim": 8},
        "adapter_config": {
            "vision_feature_layer": [-1, 0],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "text_hidden_size": 64,
        },
        "image_patch_id": IMAGE,
    },
    "muse_glimmer": _MUSE,
    "muse_spark": {
        **_MUSE,
        "text_config": {
            **_MUSE["text_config"],
            **_EXPERTS,
            "mlp_layer_types": ["dense", "sparse"],
            "moe_hidden_size": 32,
        },
        "audio_config": {
            "patch_sizes": [2, 2],
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 64,
        },
        "audio_token_id": 9,
    },
    "nemotron_h_omni": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "model_type": "nemotron_h",
            "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 4,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 32,
        },
        "vision_config": {**_TOWER, "model_type": "radio", "max_img_size": 56, "video_temporal_patch_size": 2},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_hidden_size": 32,
        "projector_hidden_size": 64,
    },
    "ovis2": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "hidden_stride": 2, "vocab_size": 64, "num_visual_indicator_tokens": 2},
        "image_token_id": IMAGE,
        "visual_indicator_token_ids": [START, END],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
    },
    "paddleocr_vl": {
        "text_config": {**_QWEN_TEXT, "head_dim": 16},
        "vision_config": _TOWER,
        **_QWEN_TOKENS,
    },
    "paligemma": {
        "text_config": {**_TEXT, "model_type": "gemma", "head_dim": 16},
        "vision_config": {**_SIGLIP, "vision_use_head": False},
        "image_token_index": IMAGE,
        "vocab_size": VOCABULARY,
        "projection_dim": 64,
        "hidden_size": 64,
    },
    "pix2struct": {
        "text_config": {
            "hidden_size": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "vocab_size": VOCABULARY,
        },
        "vision_config": {
            "hidden_size": 64,
            "patch_embed_hidden_size": 3 * 14 * 14,
            "d_ff": 64,
            "d_kv": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "seq_len": 17,
        },
    },
    "pp_chart2table": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SAM, "image_size": 128, "patch_size": 16},
        "image_token_index": IMAGE,
        "image_seq_length": 4,
    },
    "pp_formulanet": {
        "text_config": {
            "d_model": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 128,
            "dropout": 0.0,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 256,
        },
        "vision_config": {
            **_SAM,
            "image_size": 128,
            "patch_size": 16,
            "post_conv_in_channels": 8,
            "post_conv_mid_channels": 16,
            "post_conv_out_channels": 32,
            "decoder_hidden_size": 64,
        },
    },
    "qianfan_ocr": {
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16},
        "vision_config": {**_TOWER, "drop_path_rate": 0.0},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
    "qwen2_5_omni_thinker": {
        "text_config": _QWEN_TEXT,
        "vision_config": _WINDOWS,
        "audio_config": _QWEN_EAR,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "audio_token_index": 9,
    },
    "qwen2_5_vl": {"text_config": _QWEN_TEXT, "vision_config": _WINDOWS, **_QWEN_TOKENS},
    "qwen2_vl": {
        "text_config": _QWEN_TEXT,
        "vision_config": {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **_QWEN_TOKENS,
    },
    "qwen3_5": {"text_config": _QWEN3_LINEAR, "vision_config": _QWEN3_TOWER, **_QWEN_TOKENS},
    "qwen3_5_moe": {
        "text_config": {**_QWEN3_LINEAR, **_EXPERTS},
        "vision_config": _QWEN3_TOWER,
        **_QWEN_TOKENS,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {**_QWEN_TEXT, **_EXPERTS, "head_dim": 16, "mlp_only_layers": [0]},
        "vision_config": _DEEPSTACK,
        "audio_config": {**_QWEN_EAR, "downsample_hidden_size": 8},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": 9,
    },
    "qwen3_vl": {
        "text_config": {**_QWEN_TEXT, "head_dim": 16},
        "vision_config": _DEEPSTACK,
        **_QWEN_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {**_QWEN_TEXT, **_EXPERTS, "head_dim": 16, "mlp_only_layers": [0]},
        "vision_config": _DEEPSTACK,
        **_QWEN_TOKENS,
    },
    "qwen4_exp": {
        "text_config": {
            **_QWEN3_LINEAR,
            **_EXPERTS,
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
        },
        "vision_config": _QWEN3_TOWER,
        **_QWEN_TOKENS,
    },
    "shieldgemma2": {**_GEMMA3, "vision_config": {**_TOWER, "vision_use_head": False}},
    "smolvlm": {"text_config": _LLAMA, "vision_config": _TOWER, "image_token_id": IMAGE},
    "step3p7": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            **_SLIDING,
            "head_dim": 16,
            "num_sliding_attention_heads": 8,
            "mlp_layer_types": ["dense", "sparse"],
            "share_expert_dim": 32,
        },
        "vision_config": {**_TOWER, "image_size": 112, "mlp_ratio": 2.0, "max_position_embeddings": 64},
        "image_token_id": IMAGE,
    },
    "t5gemma2": {
        "encoder": {**_GEMMA3, "vision_config": {**_TOWER, "vision_use_head": False}},
        "decoder": {**_TEXT, **_SLIDING, "head_dim": 16},
        "image_token_index": IMAGE,
    },
    "udop": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "vocab_size": VOCABULARY,
        "max_2d_position_embeddings": 64,
        "image_size": 56,
        "patch_size": 14,
    },
    "unlimited_ocr": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "n_shared_experts": 1,
            "sliding_window": 8,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {
            "sam_config": {**_SAM, "image_size": 128, "patch_size": 16, "downsample_channels": [16, 32]},
            "encoder_config": {**_TOWER, "image_size": 28},
        },
        "image_token_id": IMAGE,
    },
    "video_llama_3": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": _TOWER,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    },
    "video_llava": {
        "text_config": _LLAMA,
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "vision_feature_layer": -1,
    },
    "vipllava": {
        "text_config": _LLAMA,
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "vision_feature_layers": [-1, -2],
    },
}
"""Configs by family; a second one of the same family has what differs behind its name."""

NOT_BUILT: dict[str, str] = {
    "diffusion_gemma": "It denoises blocks of tokens beside a cache, and has no loss of the next token.",
    "evolla": "It reads proteins, and no images.",
    "fast_vlm": "Its vision tower needs timm, which is not installed.",
    "gemma3n": "Its vision tower needs timm, which is not installed; gemma3n_text is in parity.md.",
    "mistral4": "It is a text model, which other families put behind a tower.",
    "perception_lm": "Its tower needs timm, which is not installed.",
    "pi0": "It returns movements of a robot, no logits.",
    "vision-encoder-decoder": "It is made of two other models, an encoder and a decoder.",
}
"""Families that are left out, and why."""

_IMAGE_TOKENS = {
    "chameleon": 49,
    "deepseek_ocr2": 145,
    "deepseek_vl": 16,
    "deepseek_vl_hybrid": 16,
    "emu3": 56,
    "florence2": 50,
    "fuyu": 16,
    "granite4_vision": 10,
    "hunyuan_vl": 8,
    "instructblipvideo": 8,
    "janus": 16,
    "llava": 16,
    "llava_next": 36,
    "llava_next_video": 36,
    "llava_onevision": 36,
    "mllama": 0,
    "paligemma": 16,
    "pix2struct": 0,
    "pp_formulanet": 0,
    "udop": 0,
    "unlimited_ocr": 7,
    "video_llava": 16,
    "vipllava": 16,
}
"""Placeholders of an image; of others 4."""

Inputs = dict[str, Tensor]


def _see_image(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(1, 3, 56, 56, generator=generator)}


def _see_patches(tokens: Tensor, generator: torch.Generator, times: int = 2) -> Inputs:
    """Return flat patches of one image, as Qwen's towers take them: 4 by 4, of which 2 by 2 become a token."""
    return {
        "pixel_values": torch.randn(16, 3 * times * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _see_typed_patches(tokens: Tensor, generator: torch.Generator, times: int = 2) -> Inputs:
    return {**_see_patches(tokens, generator, times), "mm_token_type_ids": (tokens == IMAGE).int()}


_see_typed_flat_patches = partial(_see_typed_patches, times=1)


def _see_image_of_gemma(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {**_see_image(tokens, generator), "token_type_ids": (tokens == IMAGE).long()}


def _see_patches_of_ernie(tokens: Tensor, generator: torch.Generator) -> Inputs:
    marked = (tokens == IMAGE) | (tokens == START) | (tokens == END)
    return {**_see_typed_flat_patches(tokens, generator), "moe_mm_token_type_ids": marked.int()}


def _see_image_of_florence(tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Return an image for the encoder, and what the decoder reads."""
    return {**_see_image(tokens, generator), "decoder_input_ids": tokens.roll(1)}


def _see_patches_of_fuyu(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(1, 16, 3 * 14 * 14, generator=generator)}


def _see_fine_image(tokens: Tensor, generator: torch.Generator) -> Inputs:
    image = _see_image(tokens, generator)
    return {**image, "high_res_pixel_values": torch.randn(1, 3, 56, 56, generator=generator)}


def _see_sized_image(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {**_see_image(tokens, generator), "image_sizes": torch.tensor([[56, 56]])}


def _see_patches_of_gemma4(tokens: Tensor, generator: torch.Generator, side: int = 4) -> Inputs:
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
    return {
        "pixel_values": torch.rand(1, side * side, 3 * 14 * 14, generator=generator),
        "image_position_ids": places[None],
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }


def _see_squares(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(16, 3, 14, 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _see_deep_squares(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(4, 2, 14, 14, 3, generator=generator)}


def _see_merged_squares(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(4, 28, 28, 3, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }


def _see_small_image(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(1, 3, 64, 64, generator=generator)}


def _see_tiles(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(1, 1, 3, 56, 56, generator=generator)}


def _see_sized_tiles(tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Return an image in two resolutions, of which the second is cut into tiles, here a single one."""
    return {
        "pixel_values": torch.randn(1, 2, 3, 56, 56, generator=generator),
        "image_sizes": torch.tensor([[56, 56]]),
    }


def _see_masked_tiles(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {**_see_tiles(tokens, generator), "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}


def _see_image_of_idefics(tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Return an image that the tokens behind it see."""
    mask = (torch.arange(tokens.size(1)) > 1).long()[None, :, None]
    return {**_see_tiles(tokens, generator), "image_attention_mask": mask}


def _see_with_question(tokens: Tensor, generator: torch.Generator, frames: int = 0) -> Inputs:
    """Return an image, or the frames of a video, and what a Q-Former is asked."""
    shape = (1, frames, 3, 56, 56) if frames else (1, 3, 56, 56)
    question = torch.randint(10, 96, (1, 6), generator=generator)
    return {
        "pixel_values": torch.randn(shape, generator=generator),
        "qformer_input_ids": question,
        "qformer_attention_mask": torch.ones_like(question),
    }


def _see_image_of_kosmos(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {**_see_image(tokens, generator), "image_embeds_position_mask": (tokens == IMAGE).int()}


def _see_patches_of_kosmos(tokens: Tensor, generator: torch.Generator) -> Inputs:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)) + 1
    patches = torch.randn(16, 3 * 14 * 14, generator=generator)
    return {
        "flattened_patches": torch.cat([places, patches], 1)[None],
        "image_embeds_position_mask": (tokens == IMAGE).int(),
    }


def _see_pixels(*size: int, **inputs: Any) -> Callable[[Tensor, torch.Generator], Inputs]:
    """Return a function that makes pixels of a size, and gives what else is the same for every image."""

    def see(tokens: Tensor, generator: torch.Generator) -> Inputs:
        pixels = torch.randn(*size, generator=generator)
        return {"pixel_values": pixels, **{name: torch.tensor(value) for name, value in inputs.items()}}

    return see


def _see_typed_pixels(*size: int, **inputs: Any) -> Callable[[Tensor, torch.Generator], Inputs]:
    """Do the same as :func:`_see_pixels`, and say which tokens are of an image."""
    see = _see_pixels(*size, **inputs)
    return lambda tokens, generator: {**see(tokens, generator), "mm_token_type_ids": (tokens == IMAGE).int()}


def _see_patches_for_decoder(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {"flattened_patches": _see_patches_of_kosmos(tokens, generator)["flattened_patches"]}


def _see_image_with_boxes(tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Return an image, and where on it the tokens stand: left, upper, right and lower edges."""
    corner, size = torch.rand(2, 1, tokens.size(1), 2, generator=generator)
    return {**_see_image_of_florence(tokens, generator), "bbox": torch.cat([corner, corner + size * (1 - corner)], -1)}


def _see_image_before_text(tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Return an image that is seen in both directions, as all up to it is, and the text behind it."""
    behind = torch.arange(tokens.size(1)) > int((tokens == IMAGE).nonzero()[-1, 1])
    return {**_see_image(tokens, generator), "token_type_ids": behind[None].long()}


_POOLING = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
"""Which of 4 by 4 patches become a token together."""

_INPUTS: dict[str, Callable[[Tensor, torch.Generator], Inputs]] = {
    "cohere_compass": _see_typed_patches,
    "cosmos3_edge": _see_typed_flat_patches,
    "cosmos3_omni": _see_typed_patches,
    "deepseek_vl_hybrid": _see_fine_image,
    "dots3_note": partial(_see_patches, times=1),
    "emu3": _see_sized_image,
    "ernie4_5_vl_moe": _see_patches_of_ernie,
    "exaone4_5": _see_patches,
    "florence2": _see_image_of_florence,
    "fuyu": _see_patches_of_fuyu,
    "gemma3": _see_image_of_gemma,
    "gemma4": _see_patches_of_gemma4,
    "gemma4_unified": partial(_see_patches_of_gemma4, side=2),
    "glm46v": _see_typed_patches,
    "glm4v": _see_typed_patches,
    "glm4v_moe": _see_typed_patches,
    "glm5_next": _see_typed_patches,
    "glm_ocr": _see_typed_patches,
    "glmga": _see_typed_patches,
    "got_ocr2": _see_small_image,
    "granite4_vision": _see_sized_tiles,
    "granite_docling": _see_masked_tiles,
    "hunyuan_vl": _see_typed_flat_patches,
    "hyperclovax_vision_v2": _see_patches,
    "idefics": _see_image_of_idefics,
    "idefics2": _see_tiles,
    "idefics3": _see_tiles,
    "inkling2": _see_merged_squares,
    "inkling_mm_model": _see_deep_squares,
    "instructblip": _see_with_question,
    "instructblipvideo": partial(_see_with_question, frames=4),
    "kimi_k25": _see_squares,
    "kosmos-2": _see_image_of_kosmos,
    "kosmos-2.5": _see_patches_of_kosmos,
    "lfm2_vl": _see_pixels(1, 16, 588, spatial_shapes=[[4, 4]], pixel_attention_mask=[[1] * 16]),
    "lfm3_vl": _see_patches,
    "lighton_ocr": _see_sized_image,
    "llava_next": _see_sized_tiles,
    "llava_next_video": _see_sized_tiles,
    "llava_onevision": _see_sized_tiles,
    "minicpm_ocr": _see_pixels(1, 3, 14, 14 * 16, target_sizes=[[4, 4]]),
    "minicpmv4_6": _see_typed_pixels(1, 3, 14, 14 * 64, target_sizes=[[8, 8]]),
    "minicpmv4_7": _see_typed_pixels(1, 3, 14, 14 * 64, target_sizes=[[8, 8]]),
    "minimax_m3_vl": _see_patches,
    "mistral3": _see_sized_image,
    "mistral_large4": _see_sized_image,
    "mllama": _see_pixels(1, 1, 4, 3, 56, 56, aspect_ratio_ids=[[1]], aspect_ratio_mask=[[[1, 0, 0, 0]]]),
    "molmo2": _see_typed_pixels(1, 16, 588, image_token_pooling=_POOLING, image_grids=[[2, 2, 0, 0]]),
    "muse_glimmer": _see_patches,
    "muse_spark": _see_patches,
    "nemotron_h_omni": _see_pixels(16, 588, image_grid_hw=[[4, 4]]),
    "paddleocr_vl": _see_typed_pixels(16, 3, 14, 14, image_grid_thw=[[1, 4, 4]]),
    "paligemma": _see_image_before_text,
    "pix2struct": _see_patches_for_decoder,
    "pp_chart2table": _see_pixels(1, 3, 128, 128),
    "pp_formulanet": _see_pixels(1, 3, 128, 128),
    "qwen2_5_omni_thinker": _see_patches,
    "qwen2_5_vl": _see_typed_patches,
    "qwen2_vl": _see_typed_patches,
    "qwen3_5": _see_typed_patches,
    "qwen3_5_moe": _see_typed_patches,
    "qwen3_omni_moe_thinker": _see_patches,
    "qwen3_vl": _see_typed_patches,
    "qwen3_vl_moe": _see_typed_patches,
    "qwen4_exp": _see_typed_patches,
    "shieldgemma2": _see_image_of_gemma,
    "smolvlm": _see_tiles,
    "step3p7": _see_pixels(1, 3, 112, 112),
    "t5gemma2": _see_image_of_florence,
    "udop": _see_image_with_boxes,
    "unlimited_ocr": _see_pixels(1, 3, 128, 128),
    "video_llama_3": _see_pixels(16, 588, image_grid_thw=[[1, 4, 4]], image_merge_sizes=[2]),
}
"""What a model takes beside tokens; of others one image, as it is."""


def get_family(name: str) -> str:
    """Return the ``model_type`` of an entry of :data:`FAMILIES`, which may be one of several of its family."""
    return name.partition(" ")[0]


def make_vision_config(name: str) -> Any:
    return AutoConfig.for_model(get_family(name), **deepcopy(FAMILIES[name]))


def make_vision_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the model, with weights of which every one matters."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForImageTextToText.from_config(make_vision_config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # a projector or an embedding that begins at zero, whose inputs have no gradients
                parameter.normal_(std=0.05)
    return model.to(dtype).train()


def make_image_batch(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return a sequence with an image in it: tokens of shape [1, LENGTH or more], and what the tower takes."""
    generator = torch.Generator().manual_seed(seed)
    family = get_family(name)
    count = _IMAGE_TOKENS.get(family, 4)
    length = max(LENGTH, count + 16 + count % 2)
    tokens = torch.randint(10, 96, (1, length), generator=generator)
    tokens[0, 1], tokens[0, 2 : 2 + count], tokens[0, 2 + count] = START, IMAGE, END
    inputs = _INPUTS.get(family, _see_image)(tokens, generator)
    return {
        "decoder_input_ids" if family == "pix2struct" else "input_ids": tokens,
        "labels": tokens.masked_fill(torch.arange(length) < 3 + count, -100),
        **{key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()},
    }


def get_vision_loss(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a batch's tokens, in the model's dtype."""
    labels = batch["labels"][:, 1:].flatten()
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
    logits = logits[:, -batch["labels"].size(1) : -1]  # some return those of the image's tokens before them
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels)
