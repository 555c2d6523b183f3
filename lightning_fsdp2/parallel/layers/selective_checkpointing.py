"""Selective activation checkpointing: layers keep results that are expensive to compute and that backward needs.

These are the results of fused attention, of collectives except all-gathers, and of every second matrix product. Keeping
every second matrix product, as torchtitan does, is a compromise between memory and recomputation. All-gathers are
recomputed, because their results are as large as a whole sequence.

The recomputation stops at the last tensor that autograd saves for backward. Results that a layer computes after this
tensor need not be recomputed, so they are not kept.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_fsdp2.compat.torch import flex_attention_operation, get_operation, get_saved_tensors_hooks
from lightning_fsdp2.compat.torchao import FLOAT8_PRODUCT
from lightning_fsdp2.parallel.context.segment_attention import segment_attention

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Context of a forward, and context of its recomputation."""

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
"""Substring by which the operators of flash attention are recognised. It occurs in the namespaces of flash attention
packages, and of the kernels that transformers loads from the Hub."""

_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.linear.default, FLOAT8_PRODUCT}

_GROUPED_PRODUCT = _ATEN._grouped_mm.default
"""Matrix product of MoE experts. If the experts have biases, the result is not kept, because transformers adds biases
in place and a kept result must not change."""


class Selection:
    """Selection of the results that layers keep for backward. Layers of the same kind (:func:`get_kind`) share one.

    The first forward of any of these layers keeps all results listed at the top of this file. It also counts the
    expensive operations that run before autograd saves the last tensor. Later forwards keep no results of operations
    that run after this tensor is saved.

    Args:
        layer: Any layer of this kind.
    """

    def __init__(self, layer: nn.Module) -> None:
        has_biased_experts = any(getattr(module, "has_bias", False) for module in layer.modules())
        self._products = _PRODUCTS if has_biased_experts else {*_PRODUCTS, _GROUPED_PRODUCT}
        self._read: int | None = None
        """Number of expensive operations that a layer runs before autograd saves the last tensor. None until they are
        counted."""

    def make_contexts(self) -> Contexts:
        """Return a context for a layer's forward, and one for its recomputation.

        The recomputation reuses the results that the forward has kept.
        """
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
        # do not count operations in compiled code, which keeps only the results that its backward needs anyway
        if limit is None and not torch.compiler.is_compiling():
            forward = self._watch(forward, counts)
        return forward, repetition

    @contextmanager
    def _watch(self, forward: AbstractContextManager[Any], counts: Counter[bool]) -> Iterator[None]:
        """Count the expensive operations that a forward runs before autograd saves the last tensor."""
        pack, unpack = get_saved_tensors_hooks()  # set by torch's checkpoint; the new hooks below call them
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
    """Return the kind of a layer: a key that is equal for layers with the same module types and trained parameters."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple(parameter.requires_grad for parameter in layer.parameters())


def _is_attention_or_collective(operation: Any) -> bool:
    return operation in _ATTENTION_AND_COLLECTIVES or _FLASH_ATTENTION in getattr(operation, "namespace", "")
