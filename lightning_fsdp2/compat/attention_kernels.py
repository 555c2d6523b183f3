"""Fused attention kernels that also return the logarithm of the softmax's denominator (log-sum-exp).

The log-sum-exp is needed to merge results that were computed over different parts of the keys. In torch 2.11 to 2.15,
``torch.nn.functional.scaled_dot_product_attention`` calls the same kernels but does not return the log-sum-exp. The
kernels are private; torch's own ring attention calls them too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten: Any = torch.ops.aten

_ALIGNMENT = 8
"""Alignment of CUDA kernels: head dims and rows of masks must have a multiple of this number of elements."""

_LARGEST_FLASH_HEAD = 256

_NORMALIZER_ALIGNMENT = 32
"""Alignment of CUDA's memory-efficient kernel: the normalizer must have a multiple of this number of queries."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention output and its *normalizer*, the logarithm of the softmax's denominator.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, heads, keys, dim].
        value: [batch, heads, keys, value dim].
        is_causal: Whether the n-th query sees only the first n keys. There must be as many queries as keys.
        mask: [1 or batch, 1, queries, keys], bool: True where a query sees a key. Every query must see at least one
            key. Without a mask and without ``is_causal``, every query sees all keys.
        scale: Factor by which the scores are multiplied.

    Returns:
        The output, [batch, heads, queries, value dim], and the normalizer, [batch, heads, queries], float32.
    """
    size = value.size(-1)
    query, key, value = _pad_heads(query, key, value)
    bias = _make_bias(mask, query, key)
    if query.device.type == "cpu":
        output, normalizer = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif bias is None and has_flash(query):
        output, normalizer, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        output, normalizer, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, is_causal, scale=scale
        )
    return output[..., :size], normalizer[..., : query.size(2)]


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizer: Tensor,
    *,
    is_causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, given the ``gradient`` of the output.

    ``output`` and ``normalizer`` may come from a softmax over more keys than ``key`` contains. The gradient of the
    queries is then only the contribution of the given keys.
    """
    sizes = query.size(-1), key.size(-1), value.size(-1)
    query, key, value, output, gradient = _pad_heads(query, key, value, output, gradient)
    bias = _make_bias(mask, query, key)
    inputs = (gradient, query, key, value)
    if query.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, output, normalizer, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif bias is None and has_flash(query):
        # no random state, because there is no dropout; no cumulative lengths, because the batch is not packed
        no_random = torch.empty(0, dtype=torch.uint64, device=query.device)
        counts = (None, None, query.size(2), key.size(2))
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *inputs, output, normalizer.contiguous(), *counts, 0.0, is_causal, no_random, no_random, scale=scale
        )
    else:
        # this kernel ignores the strides of the output and assumes the memory layout [batch, queries, heads, dim]
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        padded = F.pad(normalizer, (0, -normalizer.size(-1) % _NORMALIZER_ALIGNMENT)).contiguous()
        no_random = torch.zeros((), dtype=torch.int64)
        *gradients, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *inputs, bias, output, padded, no_random, no_random, 0.0, [True, True, True, False], is_causal, scale=scale
        )
    return tuple(part[..., :size] for part, size in zip(gradients, sizes, strict=True))


def attend_segments_by_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    most: tuple[int, int],
    *,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention within each segment with FlashAttention's kernel for packed sequences.

    Args:
        query: [queries, heads, dim]. :func:`has_flash` must return True for this tensor.
        key: [keys, key-value heads, dim].
        value: [keys, key-value heads, value dim].
        ends: Cumulative segment lengths of the queries and of the keys. Both are [segments + 1], int32, and begin with
            a zero.
        most: Number of queries in the longest segment, and number of keys in the longest segment.
        window: Maximum number of keys that a query sees, ending at the query's own position. None for all keys up to
            that position. The last query and the last key of a segment are at the same position.
        scale: Factor by which the scores are multiplied.

    Returns:
        The output, [queries, heads, value dim], and its normalizer (as in :func:`attend`), [heads, queries], float32.
    """
    size = value.size(-1)
    inputs = _pad_heads(query, key, value)
    options = _get_window_options(window)
    output, normalizer, *_ = _aten._flash_attention_forward(
        *inputs, *ends, *most, 0.0, window is None, return_debug_mask=False, scale=scale, **options
    )
    return output[..., :size], normalizer


def attend_segments_by_flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizer: Tensor,
    ends: tuple[Tensor, Tensor],
    most: tuple[int, int],
    *,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values of :func:`attend_segments_by_flash`.

    ``output`` and ``normalizer`` may come from a softmax over more keys than ``key`` contains.
    """
    sizes = query.size(-1), key.size(-1), value.size(-1)
    query, key, value, output, gradient = _pad_heads(query, key, value, output, gradient)
    no_random = torch.empty(0, dtype=torch.uint64, device=query.device)  # there is no dropout
    saved = (gradient, query, key, value, output, normalizer.contiguous())
    options = _get_window_options(window)
    gradients = _aten._flash_attention_backward(
        *saved, *ends, *most, 0.0, window is None, no_random, no_random, scale=scale, **options
    )
    of_query, of_key, of_value = (part[..., :size] for part, size in zip(gradients, sizes, strict=True))
    return of_query, of_key, of_value


def _get_window_options(window: int | None) -> dict[str, int]:
    """Return the options that make FlashAttention apply a sliding window of ``window`` keys.

    Without a window, return no options; the caller then turns on the causal mask. FlashAttention aligns either mask so
    that the last query and the last key are at the same position.
    """
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def has_flash(query: Tensor) -> bool:
    """Return whether FlashAttention can compute unmasked attention for these queries on their device."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.size(-1) <= _LARGEST_FLASH_HEAD
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _pad_heads(*tensors: Tensor) -> list[Tensor]:
    """Pad the head dims of all tensors with zeros to the same size, which does not change the scores.

    On accelerators, also round this size up to the alignment that the kernels require.
    """
    alignment = 1 if tensors[0].device.type == "cpu" else _ALIGNMENT
    size = max(tensor.size(-1) for tensor in tensors)
    size += -size % alignment
    return [F.pad(tensor, (0, size - tensor.size(-1))) if tensor.size(-1) < size else tensor for tensor in tensors]


def _make_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Convert ``mask`` to a bias that the kernels add to the scores, in the dtype of the queries."""
    if mask is None:
        return None
    shape = (query.size(0), query.size(1), query.size(2), key.size(2))
    # pad the rows in memory, because the kernels require every row of the bias to begin at an aligned address
    memory = query.new_zeros(*mask.shape[:-1], shape[-1] + -shape[-1] % _ALIGNMENT)
    bias = memory[..., : shape[-1]].masked_fill_(~mask, -torch.inf)
    return bias if query.device.type == "cpu" else bias.expand(shape)
