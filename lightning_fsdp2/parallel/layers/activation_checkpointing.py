"""Activation checkpointing: layers keep only their inputs, and recompute intermediate results in backward.

A single method of each layer is wrapped, so parameter names and the module tree stay the same. This method is usually
``forward`` and not ``__call__``, because ``__call__`` runs FSDP2's hooks, which gather the layer's weights. The
recomputation must not run these hooks again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from lightning_fsdp2.compat.fsdp import begin_backward
from lightning_fsdp2.compat.torch import (
    can_compile_checkpointed_collectives,
    compile_layers_of_many_kinds,
    get_stance,
    tree_map_only,
)
from lightning_fsdp2.compat.transformers import assume_unpacked_sequences, assumes_unpacked_sequences
from lightning_fsdp2.config import ActivationCheckpointingScope, ScopeWord
from lightning_fsdp2.modules.experts import exchanges_tokens
from lightning_fsdp2.modules.kept_results import Repeatable, make_keeping_contexts
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
"""Words in module names that indicate to which part of a model a module belongs. A module without any of these words in
its name belongs to the language part."""


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
        mode: True or ``"full"`` keeps only the inputs of a layer. ``"selective"`` also keeps expensive results that
            backward needs: results of fused attention (any implementation except ``"eager"``), of collectives except
            all-gathers, and of every second matrix product. The kept results serve only one backward, so torch raises
            an error in a second backward through the same graph (``retain_graph=True``).
        scope: Parts of a multimodal model to checkpoint. Each layer is assigned to a part by its name.
        compiles_collectives: Whether the layers will be compiled (``layer.compile()``) and their forwards contain
            collectives. If torch cannot compile a checkpoint inside such a layer, a full checkpoint wraps the layer's
            whole call instead of its forward. torch never can if the layer exchanges tokens with other ranks;
            a selective checkpoint then makes the layer run uncompiled.

    Raises:
        ValueError: If no layer belongs to the scope, or if the model already checkpoints its layers itself.
    """
    for hf_model in (parts.module for parts in structure.models):
        if any(vars(module).get("gradient_checkpointing") for module in hf_model.modules()):
            raise ValueError(
                f"activation_checkpointing={mode!r}: {type(hf_model).__name__} already checkpoints its layers itself,"
                " so each layer would be computed three times; leave `gradient_checkpointing_enable()`, or"
                " `activation_checkpointing_enable()`, out."
            )
    selections: dict[Any, Selection] = {}
    for layer in _get_layers(structure, mode, scope):
        is_compilable = can_compile_checkpointed_collectives() and not exchanges_tokens(layer)
        is_outside = compiles_collectives and mode != "selective" and not is_compilable
        # leave `context_fn` out to get its default: torch.compile fails if the default is passed through a variable
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
    """Return whether compiling a layer would also compile the recomputation of its collectives.

    This is the case if a full (not selective) checkpoint wraps the layer's forward and not its whole call.
    """
    return any("context_fn" not in checkpoint.options for checkpoint in _get_checkpoints(layer))


def is_checkpointed(layer: nn.Module) -> bool:
    """Return whether activation checkpointing was applied to ``layer``."""
    return bool(_get_checkpoints(layer))


def _get_checkpoints(layer: nn.Module) -> list["_Checkpoint"]:
    return [value for value in vars(layer).values() if isinstance(value, _Checkpoint)]


class _Checkpoint:
    """Wrapper that checkpoints a layer's forward, or its whole call, if a backward will follow."""

    def __init__(self, layer: nn.Module, options: dict[str, Any], *, is_selective: bool) -> None:
        self.layer, self.options, self.is_selective = layer, options, is_selective
        self.caches = CacheArguments(layer)
        self.buffers = LayerBuffers(layer)
        self.exchanges_tokens = exchanges_tokens(layer)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._has_backward(*args, *kwargs.values()):
            return forward(*args, **kwargs)
        if any(map(is_filled, self.caches.find(args, kwargs))):
            raise ValueError(
                "activation_checkpointing with a filled cache (`past_key_values` or `cache`, prefix tuning): recomputed"
                " layers would append their keys and values twice. Use activation_checkpointing=False."
            )
        args, kwargs = self.caches.drop(args, kwargs)  # drop caches, because the recomputation would fill them again
        if self.is_selective:
            # Run the deferred all-reduce of a PendingSum now, not inside the checkpoint. The recomputation finds saved
            # results by their order, which would be wrong if an all-reduce ran only in the original forward.
            args, kwargs = tree_map_only(PendingSum, PendingSum.get_whole, (args, kwargs))
        # torch cannot compile a checkpoint with an exchange, and would run it without the contexts added below; if the
        # checkpoint wraps the layer's whole call, the layer inside is compiled nevertheless
        run = self._run_uncompiled if self.exchanges_tokens else self._run
        return run(forward, args, kwargs)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **self._get_options(), **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_uncompiled(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return self._run(forward, args, kwargs)

    def _get_options(self) -> dict[str, Any]:
        # compiled code needs none of the contexts added below, because its recomputation does not change buffers
        if torch.compiler.is_compiling():
            return self.options
        # gather first, so that the contexts added below do not observe the operations of gathering
        makers = [self._make_gathering_contexts] if self.inner_units else []
        keeping = partial(make_keeping_contexts, is_selective=self.is_selective)
        makers += [keeping] if self.exchanges_tokens else []
        makers += [self.buffers.make_contexts] if self.buffers.has_any() else []
        makers += [_make_unpacked_contexts] if assumes_unpacked_sequences() else []
        if not makers:
            return self.options
        makers.append(self.options.get("context_fn", _make_no_contexts))
        return {**self.options, "context_fn": lambda: map(_Nested, *(make() for make in makers))}

    @cached_property
    def inner_units(self) -> list[FSDPModule]:
        """FSDP2 units inside the layer, such as experts under expert parallelism. Read this only after sharding."""
        inner = (module for module in self.layer.modules() if module is not self.layer)
        return [module for module in inner if isinstance(module, FSDPModule)]

    def _make_gathering_contexts(self) -> Contexts:
        return nullcontext(), Repeatable(partial(_gather_for_backward, self.inner_units))

    def _has_backward(self, *inputs: Any) -> bool:
        """Return whether backward will reach this layer, because one of its inputs or parameters needs a gradient."""
        is_trained = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        return is_trained or any(parameter.requires_grad for parameter in self.layer.parameters())


def _make_no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


def _make_unpacked_contexts() -> Contexts:
    # the `with` block in which the forward runs has ended when backward recomputes the layer
    return nullcontext(), Repeatable(assume_unpacked_sequences)


@contextmanager
def _gather_for_backward(units: list[FSDPModule]) -> Iterator[None]:
    """Gather the weights of inner units before a layer is recomputed, and keep them until their backward.

    FSDP2 itself gathers a unit only when the gradient reaches the unit, which may be after the layer is recomputed. In
    that case, the recomputation itself would gather and free the weights, at another place than the original forward.
    """
    for unit in units:
        begin_backward(unit)
    yield


class _Nested(AbstractContextManager[None]):
    """Context that enters several contexts, and can be entered again for every backward through the same graph."""

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
    """Return a context for a layer's forward, and one for its recomputation.

    With these contexts, the recomputation uses the same settings of ``torch.compile`` as the forward.
    """
    return nullcontext(), Repeatable(partial(_repeat_compiled, get_stance()))


@contextmanager
def _repeat_compiled(stance: str) -> Iterator[None]:
    with compile_layers_of_many_kinds(), torch.compiler.set_stance(stance):
        yield


def _get_layers(structure: ModelStructure, mode: Any, scope: ActivationCheckpointingScope) -> list[nn.Module]:
    wanted = {scope} if isinstance(scope, str) else set(scope)
    # use names relative to the Hugging Face model: the attribute that holds the model may have any name
    tops = (structure.root, *(parts.module for parts in structure.models))
    names = {module: name for top in tops for name, module in top.named_modules()}
    parts = {layer: _get_part(names[layer]) for layer in structure.layers}
    layers = [layer for layer, part in parts.items() if part in wanted or "all" in wanted]
    if not layers:
        found = f"only has layers of {', '.join(sorted(set(parts.values())))}" if parts else "has no list of layers"
        raise ValueError(
            f"activation_checkpointing={mode!r} with activation_checkpointing_scope={scope!r} applies to no layer:"
            f" {type(structure.root).__name__} {found}. Choose another scope, or activation_checkpointing=False."
        )
    return layers


def _get_part(name: str) -> ScopeWord:
    """Return the part of a multimodal model, such as language or vision, to which a module belongs.

    The words in the module's name determine the part. If several components of the name contain words from ``_PARTS``,
    the last of these components decides.

    Args:
        name: Name of the module, relative to the model.
    """
    for component in reversed(name.lower().split(".")):
        for part, words in _PARTS.items():
            if words.intersection(component.split("_")):
                return part
    return "language"
