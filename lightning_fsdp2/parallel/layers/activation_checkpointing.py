"""Activation checkpointing: layers keep their inputs, and recompute what backward needs.

A method of a layer is wrapped, not the layer, so parameter names and the module tree stay as they are. The method is
``forward``, since the hooks of FSDP2, which gather the layer's weights for backward, must not run a second time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp2.compat.torch import (
    can_compile_checkpointed_collectives,
    compile_layers_of_many_kinds,
    get_stance,
    tree_map_only,
)
from lightning_fsdp2.compat.transformers import assumes_unpacked_sequences, make_unpacked_contexts
from lightning_fsdp2.config import ActivationCheckpointingScope, ScopeWord
from lightning_fsdp2.modules.structure import ModelStructure
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.layers.buffers import LayerBuffers
from lightning_fsdp2.parallel.layers.caches import CacheArguments, is_filled
from lightning_fsdp2.parallel.layers.selective_checkpointing import Contexts, Selection, get_kind
from lightning_fsdp2.ranks.pending_sum import PendingSum

_PARTS: dict[ScopeWord, set[str]] = {
    "language": {"language", "text"},
    "multimodal": {"projector", "connector", "resampler", "merger", "qformer", "aligner", "modal", "multimodal"},
    "audio": {"audio", "speech", "sound"},
    "vision": {"vision", "visual", "image", "vit", "video"},
}
"""Words in module names, by the part of a model that they indicate. A module without any of them is language."""


def apply_activation_checkpointing(
    structure: ModelStructure,
    mode: Literal[True, "full", "selective"],
    *,
    scope: ActivationCheckpointingScope = "all",
    compiles_collectives: bool = False,
) -> None:
    """Make the layers of a model recompute their forward in backward (https://arxiv.org/abs/1604.06174).

    Args:
        structure: Structure of the model, which is changed in place.
        mode: True or ``"full"`` keeps only the inputs of a layer. ``"selective"`` also keeps results that are expensive
            and read by backward: those of fused attention (any except ``"eager"``), of collectives except all-gathers,
            and of every second matrix product, in the order in which they are computed. The kept results serve one
            backward: torch refuses a second backward through the same graph (``retain_graph=True``).
        scope: Parts of a multimodal model to checkpoint, identified by the names of its modules.
        compiles_collectives: Whether the layers will be compiled (``layer.compile()``) and communicate. If torch cannot
            include the checkpoint in the compiled code, a layer's whole call is recomputed, not only its forward.

    Raises:
        ValueError: If there is no layer in the scope, or the model already checkpoints its layers itself.
    """
    for hf_model in (parts.module for parts in structure.models):
        if any(vars(module).get("gradient_checkpointing") for module in hf_model.modules()):
            raise ValueError(
                f"activation_checkpointing={mode!r}: {type(hf_model).__name__} checkpoints its layers itself and would"
                " compute them three times; leave `gradient_checkpointing_enable()` out."
            )
    is_outside = compiles_collectives and mode != "selective" and not can_compile_checkpointed_collectives()
    selections: dict[Any, Selection] = {}
    for layer in _get_layers(structure, mode, scope):
        # torch.compile does not take the default `context_fn` from a variable, so the default is not passed
        options: dict[str, Any] = {}
        if mode == "selective":
            kind = get_kind(layer)
            selections[kind] = selections.get(kind) or Selection(layer)
            options["context_fn"] = partial(Selection.make_contexts, selections[kind])  # dynamo refuses bound methods
        elif is_outside:
            options["context_fn"] = _make_stances
        run = _Checkpoint(layer, options, is_selective=mode == "selective")
        wrap_method(layer, run, "__call__" if is_outside else "forward")


def recomputes_collectives(layer: nn.Module) -> bool:
    """Return whether a tensor parallel ``layer`` has its forward, not its call, checkpointed with its collectives."""
    return any("context_fn" not in checkpoint.options for checkpoint in _get_checkpoints(layer))


def is_checkpointed(layer: nn.Module) -> bool:
    """Return whether the forward of ``layer`` is recomputed in backward."""
    return bool(_get_checkpoints(layer))


def _get_checkpoints(layer: nn.Module) -> list["_Checkpoint"]:
    return [value for value in vars(layer).values() if isinstance(value, _Checkpoint)]


class _Checkpoint:
    """The forward of a layer, checkpointed if there will be a backward."""

    def __init__(self, layer: nn.Module, options: dict[str, Any], *, is_selective: bool) -> None:
        self.layer, self.options, self.is_selective = layer, options, is_selective
        self.caches = CacheArguments(layer)
        self.buffers = LayerBuffers(layer)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._has_backward(*args, *kwargs.values()):
            return forward(*args, **kwargs)
        if any(map(is_filled, self.caches.find(args, kwargs))):
            raise ValueError(
                "activation_checkpointing with keys and values from before (`past_key_values`, prefix tuning): layers"
                " that are computed again would append to them twice. Use activation_checkpointing=False."
            )
        args, kwargs = self.caches.drop(args, kwargs)  # recomputation would fill caches a second time
        if self.is_selective:
            # kept results are found by their order, and recomputation would not add up a PendingSum again: do so first
            args, kwargs = tree_map_only(PendingSum, PendingSum.get_whole, (args, kwargs))
        return checkpoint(forward, *args, use_reentrant=False, **self._get_options(), **kwargs)

    def _get_options(self) -> dict[str, Any]:
        # compiled code changes buffers only in its forward
        if torch.compiler.is_compiling():
            return self.options
        makers = [self.buffers.make_contexts] if self.buffers.has_any() else []
        makers += [make_unpacked_contexts] if assumes_unpacked_sequences() else []
        if not makers:
            return self.options
        makers.append(self.options.get("context_fn", _make_no_contexts))
        return {**self.options, "context_fn": lambda: map(_Nested, *(make() for make in makers))}

    def _has_backward(self, *inputs: Any) -> bool:
        """Return whether this layer, or anything before it, is trained: a frozen model has nothing to recompute."""
        is_trained = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        return is_trained or any(parameter.requires_grad for parameter in self.layer.parameters())


def _make_no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


class _Nested(AbstractContextManager[None]):
    """Nested contexts. They are entered again for every backward through the same graph."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


def _make_stances() -> Contexts:
    """Return contexts in which recomputation compiles only what forward compiled, with the same settings."""
    return nullcontext(), _repeat_compiled(get_stance())


@contextmanager
def _repeat_compiled(stance: str) -> Iterator[None]:
    with compile_layers_of_many_kinds(), torch.compiler.set_stance(stance):
        yield


def _get_layers(structure: ModelStructure, mode: Any, scope: ActivationCheckpointingScope) -> list[nn.Module]:
    wanted = {scope} if isinstance(scope, str) else set(scope)
    # names start below the model: the attribute that holds it says nothing about its parts
    tops = (structure.root, *(parts.module for parts in structure.models))
    names = {module: name for top in tops for name, module in top.named_modules()}
    parts = {layer: _get_part(names[layer]) for layer in structure.layers}
    layers = [layer for layer, part in parts.items() if part in wanted or "all" in wanted]
    if not layers:
        found = f"has layers of {', '.join(sorted(set(parts.values())))} only" if parts else "has no list of layers"
        raise ValueError(
            f"activation_checkpointing={mode!r} with activation_checkpointing_scope={scope!r} applies to nothing:"
            f" {type(structure.root).__name__} {found}. Choose another scope, or activation_checkpointing=False."
        )
    return layers


def _get_part(name: str) -> ScopeWord:
    """Return the part of a model that the module ``name`` belongs to; the innermost word counts."""
    for component in reversed(name.lower().split(".")):
        for part, words in _PARTS.items():
            if words.intersection(component.split("_")):
                return part
    return "language"
