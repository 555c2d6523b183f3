"""Compilation layer by layer: small graphs that all layers of a kind share, and no new name in any state dict."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_fsdp2._torch_compat import compile_layers_of_many_kinds
from lightning_fsdp2.parallel.async_tensor_parallel import CollectiveFusion
from lightning_fsdp2.parallel.structure import get_entrances, get_hf_models, get_layer_lists
from lightning_fsdp2.parallel.tp_parameters import get_slots, wrap_method
from lightning_fsdp2.parallel.tp_random import draws_random_numbers


def apply_compile(
    model: nn.Module,
    *,
    tensor_parallel: bool = False,
    fusion: CollectiveFusion | None = None,
    backend: str = "inductor",
) -> None:
    """Compile the layers of ``model`` with ``torch.compile``, in place: ``layer.compile()``.

    A layer is compiled when it first runs; what FSDP2 does around it stays outside of its graph.

    Args:
        model: Its layers are the blocks of its lists, wherever they hang.
        tensor_parallel: Whether the layers are tensor parallel. The first forward with gradients then runs without
            compilation, so that :class:`~lightning_fsdp2.parallel.tp_verification.LayerVerification` can follow its
            autograd graph.
        fusion: Of the layers' collectives with their matrix products, by inductor.
        backend: Of ``torch.compile``.

    Raises:
        ValueError: When there are no layers, or tensor parallel ones have dropout.
    """
    layers = [layer for layers in get_layer_lists(model) for layer in layers]
    if not layers:
        raise ValueError(
            f"enable_compile=True: {type(model).__name__} has no list of layers to compile; leave it out, and call"
            " `torch.compile` yourself on what should be compiled."
        )
    random = next(filter(draws_random_numbers, layers), None)
    if tensor_parallel and random is not None:
        raise ValueError(
            f"enable_compile=True with tp_size > 1: {type(random).__name__} has dropout or jitter, for which the ranks"
            " take turns with random states that torch.compile cannot trace. Set these to 0, or enable_compile=False."
        )
    for layer in layers:
        layer.compile(backend=backend, options=fusion.options if fusion is not None else None)
    for target in get_hf_models(model) or [model]:
        for name in get_entrances(target):
            wrap_method(target, _CompiledLayers(target, fusion, verifies_first_forward=tensor_parallel), name)


def is_compiled(model: nn.Module) -> bool:
    """Whether layers of ``model`` were compiled by :func:`apply_compile` or by ``layer.compile()``."""
    return any(layer._compiled_call_impl is not None for layers in get_layer_lists(model) for layer in layers)


class _CompiledLayers:
    """Runs the forward of a model whose layers are compiled, with what they need of torch."""

    def __init__(self, model: nn.Module, fusion: CollectiveFusion | None, *, verifies_first_forward: bool) -> None:
        self.fusion = fusion
        self.verifies_first_forward = verifies_first_forward
        self._slots = get_slots(model.modules())
        self._verified: set[tuple[bool, ...]] = set()

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.fusion is not None:
            self.fusion.report()
        with ExitStack() as stack:
            stack.enter_context(compile_layers_of_many_kinds())
            if self._is_first_forward():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return forward(*args, **kwargs)

    def _is_first_forward(self) -> bool:
        """Whether this is the first forward with gradients of the parameters that are trained now."""
        if not self.verifies_first_forward or not torch.is_grad_enabled():
            return False
        trained = tuple(module._parameters[name].requires_grad for module, name in self._slots)  # type: ignore[union-attr]
        is_first = trained not in self._verified
        self._verified.add(trained)
        return is_first
