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

_GEMMA3: dict[str, Any] = {
    "text_config": {
        **_TEXT,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "vision_config": _TOWER,
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {**_GEMMA3, "vision_config": {**_TOWER, "vision_use_head": True}},
    "gemma3 (vision_use_head=False)": {**_GEMMA3, "vision_config": {**_TOWER, "vision_use_head": False}},
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
"""Configs by family; a second one of the same family has what differs behind its name."""

NOT_BUILT: dict[str, str] = {}
"""Families that are left out, and why."""

_IMAGE_TOKENS = {"llava": 16}
"""Placeholders of an image; of others 4."""

Inputs = dict[str, Tensor]


def _see_patches(tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Return flat patches of one image, as Qwen's towers take them: 4 by 4, of which 2 by 2 become a token."""
    return {
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }


def _see_image(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(1, 3, 56, 56, generator=generator)}


def _see_image_of_gemma(tokens: Tensor, generator: torch.Generator) -> Inputs:
    return {**_see_image(tokens, generator), "token_type_ids": (tokens == IMAGE).long()}


_INPUTS: dict[str, Callable[[Tensor, torch.Generator], Inputs]] = {
    "gemma3": _see_image_of_gemma,
    "qwen2_vl": _see_patches,
    "qwen2_5_vl": _see_patches,
    "qwen3_vl": _see_patches,
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
    """Return a sequence with an image in it: tokens of shape [1, LENGTH], and what the tower takes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, VOCABULARY, (1, LENGTH), generator=generator)
    family = get_family(name)
    count = _IMAGE_TOKENS.get(family, 4)
    tokens[0, 1], tokens[0, 2 : 2 + count], tokens[0, 2 + count] = START, IMAGE, END
    inputs = _INPUTS.get(family, _see_image)(tokens, generator)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(torch.arange(LENGTH) < 3 + count, -100),
        **{key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()},
    }


def get_vision_loss(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a batch's tokens, in the model's dtype."""
    labels = batch["labels"][:, 1:].flatten()
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
