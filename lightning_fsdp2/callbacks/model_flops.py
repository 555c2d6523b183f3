"""Floating-point operations (FLOPs): how many a model needs per token, and how many a device does per second."""

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from lightning_fsdp2.modules.structure import ModelParts, find_structure
from lightning_fsdp2.modules.stubs import with_skeletons
from lightning_fsdp2.parallel.layers.float8_conversion import get_optional_conversion

_PEAKS = {
    "gb200": (2500, 1250, 80),
    "mi300x": (1307.4, 653.7, 163.4),
    "b200": (2250, 1125, 75),
    "gh200": (989.4, 494.7, 66.9),
    "h200 nvl": (835.5, 417.7, 60),
    "h200": (989.4, 494.7, 66.9),
    "h100 nvl": (835.5, 417.7, 60),
    "h100 pcie": (756, 378, 51.2),
    "h100 hbm3": (989.4, 494.7, 66.9),
    "h800 pcie": (756, 378, 51.2),
    "h800": (989.4, 494.7, 66.9),
    "h20": (148, 74, 44),
    "a100": (312, 156, 19.5),
    "a800": (312, 156, 19.5),
    "a40": (149.7, 74.8, 37.4),
    "a30": (165, 82, 10.3),
    "a10": (125, 62.5, 31.2),
    "l40s": (362, 183, 91.6),
    "l40": (181, 90.5, 90.5),
    "l4": (121, 60, 30.3),
    "a6000": (154.8, 77.4, 38.7),
    "6000 ada": (364.2, 182.1, 91.1),
    "5090": (209.5, 104.8, 104.8),
    "4090": (165.2, 82.6, 82.6),
    "3090": (71, 35.6, 35.6),
}
"""Peak speeds of devices, by words in their CUDA names. The first entry that matches is used.

Each entry has three numbers, in 10^12 operations per second and without sparsity. They are the peaks for bfloat16 or
float16 with float32 accumulation, for TensorFloat-32, and for float32 outside of the tensor cores.

The numbers are from public tables based on the data sheets of NVIDIA and AMD. Most data sheets of NVIDIA print the
numbers with sparsity, which are twice as high. Lightning's table has some of those higher numbers, mistakes an L40S for
an L4, and leaves out the tensor cores of GeForce.
"""

_WITHOUT_FLOAT8 = {"a100", "a800", "a40", "a30", "a10", "a6000", "3090"}
"""Devices above without units for float8. On the others, its peak (with float32 accumulation) is twice bfloat16's."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *_FLOAT8)

_OTHER_DEVICES = {"mig", "laptop", "ti", "super", "d"}
"""Words that mark slices or variants of the devices above. Their peaks differ."""

_WINDOWS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer types of transformers with softmax attention, each with the config's option for its attention window."""


def get_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return a device's peak speed without sparsity, in floating-point operations per second.

    Raises:
        ValueError: When the peak is not known.
    """
    return get_peak_flops_of(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, dtype)


def get_peak_flops_of(name: str, dtype: torch.dtype) -> float:
    """Return the peak speed of a device, given its CUDA name; see :func:`get_peak_flops`.

    Raises:
        ValueError: When the peak is not known.
    """
    words = set(re.split(r"[\s-]", name.lower()))
    part = next((part for part in _PEAKS if words.issuperset(part.split())), None)
    has_dtype = dtype in _DTYPES and not (dtype in _FLOAT8 and part in _WITHOUT_FLOAT8)
    if part is None or words & _OTHER_DEVICES or not has_dtype:
        raise ValueError(f"the peak speed of {name!r} in {str(dtype).removeprefix('torch.')} is not known")
    half, tensor_float, single = _PEAKS[part]
    if dtype in _FLOAT8:
        return 2 * half * 1e12
    if dtype != torch.float32:
        return half * 1e12
    return (single if torch.get_float32_matmul_precision() == "highest" else tensor_float) * 1e12


def get_peak_flops_of_model(
    module: nn.Module, flops_per_token: float, dtype: torch.dtype, get_peak: Callable[[torch.dtype], float]
) -> float:
    """Return the speed of a model whose operations all run at the device's peak for their dtype, in FLOPs per second.

    For a model with layers in float8, the result lies between the peaks for ``dtype`` and for float8.

    Args:
        module: See :func:`get_flops_per_token`.
        flops_per_token: Result of :func:`get_flops_per_token`.
        dtype: Compute dtype of all operations that are not in float8.
        get_peak: Function that returns the device's peak speed for a dtype.

    Raises:
        ValueError: When a peak is not known, or ``flops_per_token`` is less than the model takes in float8.
    """
    conversions = [get_optional_conversion(inner) for inner in module.modules()]
    in_float8 = sum(conversion.flops_per_token for conversion in conversions if conversion is not None)
    peak = get_peak(dtype)
    if in_float8 == 0:
        return peak
    if in_float8 > flops_per_token:
        raise ValueError(
            f"the linear layers take {in_float8:.3g} operations per token in float8, more than the"
            f" {flops_per_token:.3g} of all operations"
        )
    seconds = (flops_per_token - in_float8) / peak + in_float8 / get_peak(torch.float8_e4m3fn)
    return flops_per_token / seconds


def get_flops_per_token(module: nn.Module, sequence_length: int) -> float:
    """Return the number of floating-point operations that one token takes in forward and backward.

    The result is 6 N + 6 T · (sum over layers of H (d_key + d_value)). This generalises the formula in appendix B of
    the PaLM paper (https://arxiv.org/abs/2204.02311), which is 6 N + 12 L H Q T for L layers whose keys and values have
    the same size Q.

    * N is the number of parameters that a token is multiplied by. The input embedding does not count, unless it is also
      the head. In a mixture-of-experts layer that routes each token to k experts, only k experts count. A frozen weight
      counts as two thirds, since it gets no gradient.
    * T is the sequence length, or the layer's attention window if that is shorter.
    * H is the number of attention heads, and d_key and d_value are the sizes of a key and a value.

    Masks are ignored: causal attention and attention within documents count as full attention. The result is meant for
    model FLOPs utilisation (MFU), so recomputation by activation checkpointing does not count.

    Args:
        module: Module that holds one Hugging Face language model; sharded parameters count in full, and so do those of
            other pipeline stages.
        sequence_length: T. Under context parallelism, this is the length of the whole sequence.

    Raises:
        ValueError: When the operations of this model cannot be counted; the message says why.
    """
    with with_skeletons(module):  # also the layers of other pipeline stages
        models = find_structure(module).models
        if len(models) != 1:
            raise ValueError(f"{type(module).__name__} holds {len(models)} Hugging Face models, not one")
        config = cast(Any, models[0].module).config
        text = config.get_text_config()
        if text is not config:
            raise ValueError(f"{type(config).__name__} has parts other than text")
        return _count_products(models[0], text) + 6 * _count_attention(text, sequence_length)


def _count_products(parts: ModelParts, config: Any) -> float:
    """Return the operations per token in matrix products: 6 for each trained parameter, 4 for each frozen one."""
    model = parts.module
    if parts.embedding is None or parts.head is None:
        raise ValueError(f"{type(model).__name__} is not a language model with an input embedding and a head")
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {id(getattr(parts.head, "weight", None))}  # tied
    matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in tables]
    number, share = _get_experts(config)
    experts = [p for p in matrices if number > 1 and p.ndim == 3 and p.size(0) == number]
    if number > 1 and not experts:
        raise ValueError(f"the {number} experts of {type(config).__name__} were not found among the model's parameters")
    in_experts = {id(parameter) for parameter in experts}
    return sum((6 if p.requires_grad else 4) * p.numel() * (share if id(p) in in_experts else 1) for p in matrices)


def _get_experts(config: Any) -> tuple[int, float]:
    """Return the number of experts in a layer, and the fraction of them that each token is routed to."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if number := getattr(config, name, None):
            return number, config.num_experts_per_tok / number
    return 1, 1.0


def _count_attention(config: Any, sequence_length: int) -> float:
    """Return the sum over layers of T · H (d_key + d_value); see :func:`get_flops_per_token`."""
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    default = "sliding_attention" if slides else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    if unknown := set(kinds) - _WINDOWS.keys():
        raise ValueError(
            f"{type(config).__name__} has layers of type {', '.join(sorted(unknown))}, whose operations are not known"
        )
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = (getattr(config, "qk_head_dim", None) or size) + (getattr(config, "v_head_dim", None) or size)
    windows = [getattr(config, _WINDOWS[kind] or "", None) or sequence_length for kind in kinds]
    return float(sum(heads * width * min(window, sequence_length) for window in windows))
