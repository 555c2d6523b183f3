"""Compilation of a model layer by layer. Layers of the same kind share graphs, and state dict names do not change."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp2.compat.torch import (
    can_compile_checkpointed_collectives,
    compile_layers_of_many_kinds,
    get_graph_breaks,
    is_module_compiled,
)
from lightning_fsdp2.modules.structure import ModelStructure, get_class_name
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.layers.activation_checkpointing import is_checkpointed, recomputes_collectives
from lightning_fsdp2.parallel.layers.buffers import LayerBuffers
from lightning_fsdp2.parallel.layers.caches import CacheArguments, is_filled
from lightning_fsdp2.parallel.layers.float8_conversion import get_optional_conversion
from lightning_fsdp2.parallel.loss.cross_entropy import compile_losses
from lightning_fsdp2.parallel.tensor.fusion import CollectiveFusion
from lightning_fsdp2.parallel.tensor.parameters import get_slots
from lightning_fsdp2.ranks.layer_random import draws_random_numbers

logger = logging.getLogger(__name__)


def apply_compile(
    structure: ModelStructure,
    *,
    tensor_parallel: bool = False,
    fusion: CollectiveFusion | None = None,
    backend: str = "inductor",
) -> None:
    """Compile the layers and the token loss of a model in place, with ``torch.compile``.

    This function calls ``layer.compile()``, so torch compiles a layer when the layer first runs. The hooks of FSDP2
    stay outside the layer's graph. Layers that are already compiled stay as they are.

    As with activation checkpointing, layers get no cache for keys and values in forwards with gradients. Two kinds of
    calls run without compilation: calls without gradients that fill a cache (``generate``), and calls with a cache that
    is already filled.

    Args:
        structure: Structure of the model.
        tensor_parallel: Whether the layers are tensor parallel. If so, a layer's first call with gradients runs without
            compilation, and so does the first such call after the set of trained parameters has changed. In these
            calls, :class:`~lightning_fsdp2.parallel.tensor.verification.LayerVerification` follows the autograd graph.
        fusion: Fusion of the layers' collectives with matrix products. None if collectives are not fused.
        backend: Backend of ``torch.compile``.

    Raises:
        ValueError: If there are no layers, if tensor parallel layers have dropout, or if this version of torch cannot
            compile their checkpoints.
    """
    model, layers = structure.root, structure.layers
    if not layers:
        raise ValueError(
            f"enable_compile=True: {get_class_name(model)} has no list of layers to compile. Leave the flag out, and"
            " call `torch.compile` yourself."
        )
    if tensor_parallel and not can_compile_checkpointed_collectives() and any(map(recomputes_collectives, layers)):
        raise ValueError(
            "enable_compile=True after activation_checkpointing='full' with tp_size > 1: this version of torch cannot"
            " compile a layer in which activation checkpointing recomputes collectives. Activation checkpointing was"
            " applied in this form, because enable_compile was not set yet. Set both flags when you shard the model, or"
            " use activation_checkpointing='selective'."
        )
    random = next(filter(draws_random_numbers, layers), None)
    if tensor_parallel and random is not None:
        raise ValueError(
            f"enable_compile=True with tp_size > 1: {get_class_name(random)} has dropout or jitter, for which the ranks"
            " switch between random states, and torch.compile cannot trace these switches. Set dropout and jitter to 0,"
            " or set enable_compile=False."
        )
    compile_losses(model, backend)
    report, options = _Report(), _get_options(structure, fusion, backend)
    for layer in layers:
        if not is_module_compiled(layer):
            if type(layer).forward.__module__.startswith("torch.nn."):
                # wrap torch's own modules, because dynamo compiles their forwards only if code outside torch calls them
                wrap_method(layer, _call)
            layer.compile(backend=backend, options=options)
            wrap_method(layer, _CompiledLayer(layer, fusion, report, verifies_first_call=tensor_parallel), "__call__")


def _get_options(structure: ModelStructure, fusion: CollectiveFusion | None, backend: str) -> dict[str, Any] | None:
    """Return options for ``torch.compile``, or None if the layers need none."""
    options = {} if fusion is None else fusion.options
    conversion = get_optional_conversion(structure.root)
    if backend == "inductor" and conversion is not None and conversion.recipe == "rowwise":
        # Keep the roundings that a fusion leaves out. Without them, a recomputed activation can exceed the scale of its
        # row, and losses became NaN (https://github.com/pytorch/pytorch/issues/150859).
        options = {**options, "emulate_precision_casts": True}
    return options or None


def is_compiled(structure: ModelStructure) -> bool:
    """Return whether all layers of a model are compiled, either by :func:`apply_compile` or by ``layer.compile()``."""
    layers = structure.layers
    return bool(layers) and all(is_module_compiled(layer) for layer in layers)


def _call(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class _Report:
    """Warning that torch cannot compile a layer as a whole, which is logged at most once per model."""

    def __init__(self) -> None:
        self.is_made = False

    @contextmanager
    def watch(self, layer: nn.Module) -> Iterator[None]:
        before = get_graph_breaks()
        yield
        for reason in get_graph_breaks() - before:
            self.warn(layer, reason.strip().splitlines()[0])

    def warn(self, layer: nn.Module, reason: str) -> None:
        if self.is_made:
            return
        self.is_made = True
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "enable_compile=True: torch.compile cannot trace all of %s (%s). The whole layer or parts of it run"
                " without compilation. Set TORCH_LOGS=graph_breaks to see which parts.",
                get_class_name(layer),
                reason,
            )


class _CompiledLayer:
    """Wrapper of a compiled layer's call, which decides whether the call uses the compiled code."""

    def __init__(
        self, layer: nn.Module, fusion: CollectiveFusion | None, report: _Report, *, verifies_first_call: bool
    ) -> None:
        self.layer = layer
        self.caches = CacheArguments(layer)
        self.buffers = LayerBuffers(layer)
        self.fusion = fusion
        self.report = report
        self.verifies_first_call = verifies_first_call
        self._slots = get_slots(layer.modules())
        self._verified: set[tuple[bool, ...]] = set()

    def __call__(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the user compiles code that calls this layer
            return call(*args, **kwargs)
        if self.fusion is not None:
            self.fusion.report()
        if caches := self.caches.find(args, kwargs):
            # run without torch.compile: each layer fills its own entry of the cache, so layers could not share a graph
            if not torch.is_grad_enabled() or any(map(is_filled, caches)):
                if torch.is_grad_enabled():
                    self.report.warn(self.layer, "a filled cache, `past_key_values` or `cache`")
                with torch.compiler.set_stance("force_eager"):
                    return call(*args, **kwargs)
            args, kwargs = self.caches.drop(args, kwargs)
        with compile_layers_of_many_kinds():
            if not self.verifies_first_call or not torch.is_grad_enabled():
                return self._call_compiled(call, *args, **kwargs)
            trained = tuple(module._parameters[name].requires_grad for module, name in self._slots)  # type: ignore[union-attr]
            if trained in self._verified:
                return self._call_compiled(call, *args, **kwargs)
            with torch.compiler.set_stance("force_eager"):
                output = call(*args, **kwargs)
            self._verified.add(trained)
            return output

    def _call_compiled(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        repeats = torch.is_grad_enabled() and is_checkpointed(self.layer) and self.buffers.has_any()
        with (
            nullcontext() if self.report.is_made else self.report.watch(self.layer),
            self.buffers.refuse_changes() if repeats else nullcontext(),
        ):
            return call(*args, **kwargs)
