"""FLOP counts of torch operations, including operations that torch's own counter does not know."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from lightning_fsdp2.parallel.context import segment_attention  # noqa: F401  makes its operations known


def get_optional_flop_formula(operation: Any) -> Callable[..., int] | None:
    """Return the function that counts the FLOPs of a torch operation; None for an operation without FLOPs.

    ``torch.utils.flop_counter`` does not cover the CPU's fused attention, or the grouped matrix products of a mixture
    of experts (torch 2.11 to 2.15). For causal attention, only half of the FLOPs are counted, since kernels skip the
    masked half.
    """
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_attention_backward,
        torch.ops.aten._grouped_mm: _count_grouped_products,
        torch.ops.lightning_fsdp2.segment_attention: _count_segments,
        torch.ops.lightning_fsdp2.segment_attention_backward: _count_segments_backward,
    }
    packet = operation.overloadpacket
    return formulas.get(packet) or flop_counter.flop_registry.get(packet)


def _count_grouped_products(first: Tensor, second: Tensor, *args: Any, out_val: Tensor, **options: Any) -> int:
    """Count the FLOPs of grouped matrix products, such as those of experts.

    Each row of ``first`` is multiplied by the matrix of its group. If both tensors are matrices, the groups divide the
    inner dim instead.
    """
    if first.ndim == second.ndim == 2:
        return 2 * first.size(0) * first.size(1) * second.size(1)
    return 2 * out_val.numel() * first.size(-1)


def _count_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> int:
    count = flop_counter.sdpa_flop_count(query.shape, _get_shape(key, query), _get_shape(value, query))
    return count // (2 if is_causal else 1)


def _count_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normalizer: Tensor,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> int:
    shapes = _get_shape(key, query), _get_shape(value, query)
    return flop_counter.sdpa_backward_flop_count(gradient.shape, query.shape, *shapes) // (2 if is_causal else 1)


def _count_segments(query: Tensor, key: Tensor, value: Tensor, *segments: Any, **options: Any) -> int:
    """Count the FLOPs of ``segment_attention``, in which queries attend only to keys of the same segment.

    These are the products of queries and keys, and of attention weights and values. The last argument in ``segments``
    is the number of query-key pairs.
    """
    return 2 * segments[-1] * query.size(1) * (query.size(-1) + value.size(-1))


def _count_segments_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *segments: Any, **options: Any
) -> int:
    """Count the FLOPs of the backward of ``segment_attention``.

    Forward computes two matrix products: queries with keys, and attention weights with values. Backward computes five:
    it repeats the product of queries with keys, and each of forward's two products needs two more for its gradients.
    """
    return 2 * segments[-1] * query.size(1) * (3 * query.size(-1) + 2 * value.size(-1))


def _get_shape(tensor: Tensor, query: Tensor) -> tuple[int, ...]:
    """Return the shape that keys or values would have with one head per query head.

    The counter of torch 2.11 requires this shape.
    """
    return (*query.shape[:2], *tensor.shape[2:])
