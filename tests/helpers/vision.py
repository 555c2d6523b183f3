"""Tiny models that see images, and batches with images for them.

Images are random patches of as many pixels as a family's tower takes; no processor is needed.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from helpers.vision_families import END, FAMILIES, IMAGE, LENGTH, START

_IMAGE_TOKENS = {
    "apertus1p5": 16,
    "chameleon": 49,
    "deepseek_ocr2": 145,
    "deepseek_vl": 16,
    "deepseek_vl_hybrid": 16,
    "emu3": 56,
    "florence2": 50,
    "fuyu": 16,
    "granite4_vision": 10,
    "hunyuan_vl": 8,
    "hy_v4_vl": 6,
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
    """Return an image that the tokens after it see."""
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
    """Return an image that is seen in both directions, as all up to it is, and the text after it."""
    is_after = torch.arange(tokens.size(1)) > int((tokens == IMAGE).nonzero()[-1, 1])
    return {**_see_image(tokens, generator), "token_type_ids": is_after[None].long()}


_POOLING = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
"""Which of 4 by 4 patches become a token together."""

_INPUTS: dict[str, Callable[[Tensor, torch.Generator], Inputs]] = {
    "apertus1p5": _see_pixels(1, 3, 16, 16, image_sizes=[[16, 16]]),
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
    "hy_v4_vl": _see_typed_flat_patches,
    "hyperclovax_vision_v2": _see_patches,
    "idefics": _see_image_of_idefics,
    "idefics2": _see_tiles,
    "idefics3": _see_tiles,
    "inkling2": _see_merged_squares,
    "inkling2_loop": _see_merged_squares,
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
