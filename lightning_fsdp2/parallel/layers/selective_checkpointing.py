"""Selective activation checkpointing: a layer keeps results that are expensive to compute and read by backward.

Fused attention, matrix products, and the collectives that reduce or exchange are expensive. Every second matrix product
is kept, as in torchtitan, for half the memory and half the work. All-gathers are repeated, since their results are as
large as a whole sequence. The tensors that autograd saves show what backward reads: nothing that a layer computes after
its last saved tensor is recomputed, so there is no use in keeping it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_fsdp2.compat.torch import flex_attention_operation, get_operation, get_saved_tensors_hooks
from lightning_fsdp2.parallel.context.segment_attention import segment_attention

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a forward and of its recomputation."""

_ATEN: Any = torch.ops.aten
_COLLECTIVES: Any = torch.ops._c10d_functional

_ATTENTION_AND_COLLECTIVES = {
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    _ATEN._flash_attention_forward.default,
    _ATEN._efficient_attention_forward.default,
    get_operation(segment_attention),
    _COLLECTIVES.all_reduce.default,
    _COLLECTIVES.all_to_all_single.default,
    _COLLECTIVES.reduce_scatter_tensor.default,
    flex_attention_operation,
}

_FLASH_ATTENTION = "flash_attn"
"""Part of the operator namespaces of flash attention packages and of kernels that transformers loads from the Hub."""

_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.linear.default}

_GROUPED_PRODUCT = _ATEN._grouped_mm.default
"""Another product. It is not kept if transformers adds expert biases in place, since a kept result must not change."""


class Selection:
    """The choice of results that layers of one kind keep.

    The first forward of a layer of this kind keeps all expensive results, and finds out which of them backward reads.
    Later forwards keep only those.

    Args:
        layer: One of the layers.
    """

    def __init__(self, layer: nn.Module) -> None:
        has_biased_experts = any(getattr(module, "has_bias", False) for module in layer.modules())
        self._products = _PRODUCTS if has_biased_experts else {*_PRODUCTS, _GROUPED_PRODUCT}
        self._read: int | None = None
        """Number of expensive operations in a layer before its last saved tensor; None before they are counted."""

    def make_contexts(self) -> Contexts:
        """Return contexts for the forward of a layer and for its recomputation, which make the same choices."""
        limit = self._read
        counts: Counter[bool] = Counter()
        products: Counter[bool] = Counter()

        def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_product = operation in self._products
            if not is_product and not _is_attention_or_collective(operation):
                return CheckpointPolicy.PREFER_RECOMPUTE
            again = context.is_recompute
            counts[again] += 1
            products[again] += is_product
            is_left_out = is_product and products[again] % 2 == 0
            if is_left_out or (limit is not None and counts[again] > limit):
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        forward, repetition = create_selective_checkpoint_contexts(choose)
        # compiled code keeps nothing that its backward does not read
        if limit is None and not torch.compiler.is_compiling():
            forward = self._watch(forward, counts)
        return forward, repetition

    @contextmanager
    def _watch(self, forward: AbstractContextManager[Any], counts: Counter[bool]) -> Iterator[None]:
        """Count the expensive operations that come before the last tensor that autograd saves."""
        pack, unpack = get_saved_tensors_hooks()  # the hooks of the checkpoint
        read = 0

        def note(tensor: Tensor) -> Any:
            nonlocal read
            read = counts[False]
            return pack(tensor)

        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, unpack))
            stack.enter_context(forward)
            yield
        self._read = read


def get_kind(layer: nn.Module) -> Any:
    """Return a key shared by all layers that compute the same: their modules, and which parameters are trained."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple(parameter.requires_grad for parameter in layer.parameters())


def _is_attention_or_collective(operation: Any) -> bool:
    return operation in _ATTENTION_AND_COLLECTIVES or _FLASH_ATTENTION in getattr(operation, "namespace", "")
