"""Search for the parts of a model, such as its layers, embedding and head.

The parts are found by their structure, so the names of attributes, wrappers and subclasses do not matter.

A recipe parallelises a model in passes, such as tensor parallelism and sharding. It searches once, before the first
pass, and gives every pass the same :class:`ModelStructure`. Passes change parameters, methods and classes, but leave
the modules where they are. Code that runs after the recipe searches again, because the user may have removed or
replaced a module in the meantime.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp2.compat.transformers import get_dtype_exceptions


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelParts:
    """Parts of a Hugging Face model, or of another module that has a tensor parallel plan."""

    module: nn.Module

    embedding: nn.Embedding | None
    """The input embedding that a Hugging Face model declares."""

    head: nn.Module | None
    """The output head that a Hugging Face model declares."""

    final_norm: nn.Module | None
    """The final norm, which is a sibling of the last list of blocks."""

    layer_lists: list[list[nn.Module]]
    """See :func:`get_layer_lists`."""

    hf_models: list[nn.Module]
    """The model itself and all Hugging Face models inside it, such as its base model and its towers."""

    @cached_property
    def towers(self) -> frozenset[nn.Module]:
        """All modules of the towers: inner Hugging Face models, such as vision models, that are not the text model.

        Raises:
            ValueError: If the config has several text configs, as transformers' music models have.
        """
        return frozenset(_iterate_towers(self.module, self.hf_models))


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelStructure:
    """Parts of a root module, such as its Hugging Face models and its layers."""

    root: nn.Module

    models: list[ModelParts]
    """The outermost Hugging Face models; see :func:`get_hf_models`."""

    hf_models: list[nn.Module]
    """All Hugging Face models, including the ones inside others."""

    layer_lists: list[list[nn.Module]]
    """See :func:`get_layer_lists`. Layers outside any Hugging Face model are included."""

    layers: list[nn.Module]
    """All layers of all lists."""

    modules: list[nn.Module]
    """All modules except metrics and their submodules; see :func:`get_modules`."""


def find_structure(root: nn.Module) -> ModelStructure:
    """Find the parts of ``root`` without changing it."""
    layer_lists = get_layer_lists(root)
    return ModelStructure(
        root=root,
        models=[find_parts(model) for model in get_hf_models(root)],
        hf_models=find_hf_models(root),
        layer_lists=layer_lists,
        layers=[layer for layers in layer_lists for layer in layers],
        modules=get_modules(root),
    )


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts of one model."""
    hf_models, layer_lists = find_hf_models(model), get_layer_lists(model)
    return ModelParts(
        module=model,
        embedding=get_optional_embedding(model),
        head=get_optional_head(model),
        final_norm=_get_optional_final_norm(model, layer_lists),
        layer_lists=layer_lists,
        hf_models=hf_models,
    )


def is_hf_model(module: nn.Module) -> bool:
    """Return whether ``module`` is a Hugging Face ``PreTrainedModel``, without importing transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def get_float32_tensors(model: Any, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Find the parameters and buffers of a Hugging Face model that stay in float32 when its weights have ``dtype``.

    The model's class names them, such as the weights of routers. If it names a parameter of a module, the other
    parameters that the module holds directly stay in float32 too, because FSDP2 needs one dtype for all of them.

    Yields:
        The module that holds the tensor, the tensor's name in this module, and the tensor.
    """
    patterns = [pattern.replace("*", ".*") for pattern in get_dtype_exceptions(model, dtype)]
    for path, module in model.named_modules() if patterns else ():
        prefix = f"{path}." if path else ""
        for tensors in (module._parameters, module._buffers):
            given = {
                name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()
            }
            named = {name for name in given if any(re.search(pattern, prefix + name) for pattern in patterns)}
            chosen = given if named and tensors is module._parameters else named
            yield from ((module, name, given[name]) for name in chosen)


def is_lightning_module(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``LightningModule``, without importing lightning."""
    lightning = sys.modules.get("lightning.pytorch.core.module")
    return lightning is not None and isinstance(module, lightning.LightningModule)


def is_metric(module: nn.Module) -> bool:
    """Return whether ``module`` is a torchmetrics ``Metric``, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics.metric")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


def find_metrics(root: nn.Module) -> list[Any]:
    """Return every torchmetrics ``Metric`` in ``root`` (or ``root`` itself), without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics.metric")
    return [] if torchmetrics is None else [m for m in root.modules() if isinstance(m, torchmetrics.Metric)]


def find_peft_models(root: nn.Module) -> list[Any]:
    """Return every peft ``PeftModel`` in ``root`` (or ``root`` itself), without importing peft."""
    peft = sys.modules.get("peft.peft_model")
    return [] if peft is None else [module for module in root.modules() if isinstance(module, peft.PeftModel)]


def get_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard`` replaced it."""
    bases = type(module).__bases__
    return bases[1] if bases[0] is FSDPModule else type(module)


def get_class_name(module: nn.Module) -> str:
    """Return the name of the class that a module had before ``fully_shard`` replaced it."""
    return get_class(module).__name__


def get_entrances(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the methods in which a module may use its own parameters.

    For a LightningModule, these are the step methods and ``forward``; for any other module, only ``forward``.
    """
    if not is_lightning_module(module):
        return ("forward",)
    names = ("training_step", "validation_step", "test_step", "predict_step", "forward")
    return tuple(name for name in names if callable(getattr(module, name)))  # some steps may be None


def get_modules(root: nn.Module) -> list[nn.Module]:
    """Return ``root`` and all modules in it, except metrics and their submodules, in registration order.

    A network inside a metric (FID, BERTScore) is not trained and stays whole on every rank. FSDP2 could not shard a
    metric, because it looks up a module's state by the module's hash. A metric's hash changes with each update.
    """
    torchmetrics = sys.modules.get("torchmetrics.metric")
    modules: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in modules and not (torchmetrics and isinstance(module, torchmetrics.Metric)):
            modules[module] = None
            waiting.extend(reversed(list(module.children())))
    return list(modules)


@contextmanager
def without_metrics(root: nn.Module) -> Iterator[None]:
    """Remove the metrics from ``root`` for the duration of the block, so that they are not sharded.

    :func:`get_modules` explains why.
    """
    children = {module: dict(module._modules) for module in get_modules(root)}
    for module, held in children.items():
        for name, child in held.items():
            if child is not None and is_metric(child):
                del module._modules[name]
    try:
        yield
    finally:
        for module, held in children.items():
            module._modules.clear()
            module._modules.update(held)  # in the original order


def get_hf_models(root: nn.Module) -> list[nn.Module]:
    """Return the outermost Hugging Face models in ``root``, which may be ``root`` itself, in registration order.

    A model that is part of another is not outermost, even if it is also registered elsewhere
    (``self.backbone = self.lm.model``).
    """
    models = find_hf_models(root)
    inner = {module for model in models for module in model.modules() if module is not model}
    return [model for model in models if model not in inner]


def find_hf_models(root: nn.Module) -> list[nn.Module]:
    """Return all Hugging Face models in ``root``, including the ones inside others, in registration order."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return []
    return [module for module in get_modules(root) if isinstance(module, transformers.PreTrainedModel)]


def get_layer_lists(root: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of blocks in ``root`` that are sharded, compiled and checkpointed layer by layer.

    A list is a ``ModuleList`` or ``ModuleDict`` whose items own parameters, or a ``Sequential`` of composite modules of
    one class. A list may be at any depth, but not inside a block of another list. For example, a list of MoE experts
    is part of its block.

    A container inside a container is a separate list. A Hugging Face model inside a ``ModuleList`` is not a block, and
    neither is a module without a forward. Both are searched for lists of their own. A block that is registered twice
    is returned once.
    """
    with_models = _find_ancestors(root, find_hf_models(root))
    passed = set(get_modules(root))
    lists = [list(dict.fromkeys(blocks)) for blocks in _iterate_layer_lists(root, passed, with_models)]
    seen: set[nn.Module] = set()
    unique = []
    for blocks in lists:
        blocks = [block for block in blocks if block not in seen]
        seen.update(blocks)
        if blocks:
            unique.append(blocks)
    return unique


def find_layer_drop(root: nn.Module) -> tuple[str, float] | None:
    """Find a module in ``root`` that skips layers at random in training, which the speech models of transformers do.

    Some of these models read the rate from their config, but run all layers if FSDP2 shards them.

    Returns:
        The name of the module, or of its class if it is ``root``, and the rate. None if no module skips layers.
    """
    rates = {name: vars(module).get("layerdrop") for name, module in root.named_modules()}
    if all(rate is None for rate in rates.values()) and not isinstance(root, FSDPModule):
        rates = {name: getattr(model.config, "layerdrop", None) for name, model in _get_named_hf_models(root)}
    for name, rate in rates.items():
        if isinstance(rate, int | float) and rate > 0:
            return name or get_class_name(root), rate
    return None


def _get_named_hf_models(root: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in root.named_modules() if is_hf_model(module)]


def get_called_children(module: nn.Module) -> list[nn.Module]:
    """Return the children of ``module``, with each ``ModuleList`` or ``ModuleDict`` replaced by its items."""
    children: list[nn.Module] = []
    for child in module.children():
        children += get_called_children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return children


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` has a forward, during which its weights can be gathered."""
    if isinstance(module, torch.jit.ScriptModule):
        # TorchScript keeps the forward in C++, so comparing Python methods would not find it
        return hasattr(module, "forward")
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def get_optional_embedding(model: Any) -> nn.Embedding | None:
    """Return the input embedding that a Hugging Face model declares, or None."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def get_optional_head(model: Any) -> nn.Module | None:
    """Return the output head that a Hugging Face model declares, or None."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) and _owns_parameters(head) else None


def get_parameter_owners(root: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Map every parameter to (module, name) pairs: the modules that hold it directly, and its name in each."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in get_modules(root):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return owners


def get_parameter_names(root: nn.Module) -> dict[nn.Parameter, str]:
    """Map every parameter to its (first) fully qualified name in ``root``."""
    return {parameter: name for name, parameter in root.named_parameters()}


def _get_optional_final_norm(model: nn.Module, layer_lists: list[list[nn.Module]]) -> nn.Module | None:
    blocks = {layer for layers in layer_lists for layer in layers}
    for parent in reversed(list(model.modules())):
        children = list(parent.children())
        if not any(not blocks.isdisjoint(child.children()) and _is_container(child) for child in children):
            continue
        norms = [child for child in children if "norm" in type(child).__name__.lower() and _owns_parameters(child)]
        if norms:
            return norms[-1]
    return None


def _iterate_towers(model: Any, hf_models: list[Any]) -> Iterator[nn.Module]:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    innermost = {module: hf_model for hf_model in hf_models for module in hf_model.modules()}
    own = (config.model_type, config.get_text_config().model_type)
    yield from (module for module, hf_model in innermost.items() if hf_model.config.model_type not in own)


def _find_ancestors(root: nn.Module, modules: list[nn.Module]) -> set[nn.Module]:
    """Return ``modules`` and all modules in ``root`` that hold one of them, at any depth."""
    if not modules:
        return set()
    parents: dict[nn.Module, list[nn.Module]] = {}
    for module in get_modules(root):
        for child in module.children():
            parents.setdefault(child, []).append(module)
    found: set[nn.Module] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += parents.get(module, [])
    return found


def _iterate_layer_lists(
    module: nn.Module, modules: set[nn.Module], with_models: set[nn.Module]
) -> Iterator[list[nn.Module]]:
    """Yield the lists of blocks below ``module``.

    Args:
        module: Module whose children are searched.
        modules: All modules of the root except metrics.
        with_models: Hugging Face models, and modules that contain one.
    """
    for child in module.children():
        if not any(child.children()):
            continue
        if _is_container(child):
            yield from _iterate_container(child, modules, with_models)
        elif child in modules and not _is_adapter(child):
            yield from _iterate_layer_lists(child, modules, with_models)


def _iterate_container(
    container: nn.Module, modules: set[nn.Module], with_models: set[nn.Module]
) -> Iterator[list[nn.Module]]:
    children = [child for child in container.children() if child in modules]
    for child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _iterate_container(child, modules, with_models)
        elif child in with_models or not has_forward(child):
            yield from _iterate_layer_lists(child, modules, with_models)
    if blocks := [child for child in children if child not in with_models and _is_block(child)]:
        yield blocks


def _is_adapter(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer that peft put in place of an original module.

    Such a layer contains the original module, and dicts of adapters by name.
    """
    return hasattr(module, "base_layer") or isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)


def _is_block(module: nn.Module) -> bool:
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not is_container and has_forward(module) and _owns_parameters(module)


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    children = list(module.children())
    return (
        isinstance(module, nn.Sequential)
        and len(children) > 1
        and len({type(child) for child in children}) == 1
        and all(any(child.children()) for child in children)
    )


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
