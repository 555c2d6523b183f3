"""One tiny model of vision-language families of transformers, and batches with images for them.

Images are random patches of as many pixels as a family's tower takes; no processor is needed.
"""

from collections.abc import Callable
from copy import deepcopy
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
_QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "num_heads": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TEXT = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_QWEN_WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**_TOWER, "vision_use_head": True},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "qwen2_vl": {
        "text_config": _QWEN_TEXT,
        "vision_config": {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": _QWEN_TEXT,
        "vision_config": {**_QWEN_TOWER, **_QWEN_WIDTHS, "fullatt_block_indexes": [1], "window_size": 56},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**_QWEN_TEXT, "head_dim": 16},
        "vision_config": {
            **_QWEN_TOWER,
            **_QWEN_WIDTHS,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_QWEN_TOKENS,
    },
}

_IMAGE_TOKENS = {"llava": 16}
"""Placeholders of an image; of others 4."""


def make_vision_model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the model, with weights of which every one matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **deepcopy(FAMILIES[family]))
    model: nn.Module = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # a projector or an embedding that begins at zero, whose inputs have no gradients
                parameter.normal_(std=0.05)
    return model.to(dtype).train()


def make_image_batch(family: str, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a sequence with an image in it: tokens of shape [1, LENGTH], and what the tower takes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, VOCABULARY, (1, LENGTH), generator=generator)
    count = _IMAGE_TOKENS.get(family, 4)
    tokens[0, 1], tokens[0, 2 : 2 + count], tokens[0, 2 + count] = START, IMAGE, END
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) < 3 + count, -100)}
    if family.startswith("qwen"):
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        batch |= {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (tokens == IMAGE).int()}
    else:
        pixels = torch.randn(1, 3, 56, 56, generator=generator)
    if family == "gemma3":
        batch["token_type_ids"] = (tokens == IMAGE).long()
    return {**batch, "pixel_values": pixels.to(dtype)}


def get_vision_loss(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a batch's tokens, in the model's dtype."""
    labels = batch["labels"][:, 1:].flatten()
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
