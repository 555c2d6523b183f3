"""Find the parts of a model by its structure, wherever it hangs: under any attribute, wrapper, subclass or prefix."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def is_hf_model(module: nn.Module) -> bool:
    """Whether ``module`` is a Hugging Face ``PreTrainedModel``; transformers is not imported to find out."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def get_float32_buffers(model: Any, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Find the buffers that the authors of a Hugging Face model keep in float32 where its weights have ``dtype``.

    Yields:
        The module that holds one, its name there, and the buffer.
    """
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    for path, buffer in model.named_buffers():
        if buffer.is_floating_point() and any(re.search(pattern, path) for pattern in patterns):
            owner, _, name = path.rpartition(".")
            yield model.get_submodule(owner), name, buffer


def is_lightning_module(module: nn.Module) -> bool:
    """Whether ``module`` is a ``LightningModule``; lightning is not imported to find out."""
    lightning = sys.modules.get("lightning.pytorch.core.module")
    return lightning is not None and isinstance(module, lightning.LightningModule)


def is_metric(module: nn.Module) -> bool:
    """Whether ``module`` is a torchmetrics ``Metric``; torchmetrics is not imported to find out."""
    torchmetrics = sys.modules.get("torchmetrics.metric")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


def is_peft_model(module: nn.Module) -> bool:
    """Whether ``module`` is peft's ``PeftModel`` around another model; peft is not imported to find out."""
    peft = sys.modules.get("peft.peft_model")
    return peft is not None and isinstance(module, peft.PeftModel)


def get_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module was made of, also after ``fully_shard`` has put one of its own before it."""
    bases = type(module).__bases__
    return bases[1] if bases[0] is FSDPModule else type(module)


def get_class_name(module: nn.Module) -> str:
    """Return the name of the class that a module was made of."""
    return get_class(module).__name__


def get_entrances(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the methods in which a module computes with what it holds itself."""
    if not is_lightning_module(module):
        return ("forward",)
    names = ("training_step", "validation_step", "test_step", "predict_step", "forward")
    return tuple(name for name in names if callable(getattr(module, name)))  # a step that is None is none


def get_modules(root: nn.Module) -> list[nn.Module]:
    """Return ``root`` and all modules in it, but for metrics and what they hold, in registration order.

    A network inside a metric (FID, BERTScore) is not trained and stays whole on every rank. FSDP2 could not shard it:
    it finds its state of a module by the module's hash, and a metric's hash changes with what it has counted.
    """
    modules: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if not is_metric(module) and module not in modules:
            modules[module] = None
            for child in module.children():
                visit(child)

    visit(root)
    return list(modules)


@contextmanager
def without_metrics(root: nn.Module) -> Iterator[None]:
    """Take the metrics out of ``root`` for a block that shards what it finds; see :func:`get_modules`."""
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
            module._modules.update(held)  # in the order of before


def get_hf_models(root: nn.Module) -> list[nn.Module]:
    """Return the outermost Hugging Face models in ``root``, which may be ``root`` itself, in registration order.

    One that is part of another is not outermost, even if it hangs elsewhere too (``self.backbone = self.lm.model``).
    """
    models = list(_iterate_hf_models(root))
    inner = {module for model in models for module in model.modules() if module is not model}
    return [model for model in dict.fromkeys(models) if model not in inner]


def _iterate_hf_models(module: nn.Module) -> Iterator[nn.Module]:
    if is_hf_model(module):
        yield module
    elif not is_metric(module):
        for child in module.children():
            yield from _iterate_hf_models(child)


def get_layer_lists(root: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of blocks in ``root`` that are sharded, compiled and checkpointed layer by layer.

    A list is a ``ModuleList`` or ``ModuleDict`` whose items own parameters, at any depth, but not inside a block of
    another list: the experts of a mixture are part of their block. Containers inside a container are lists of their
    own, as are whole Hugging Face models inside a ``ModuleList``; modules without a forward only hold others. A
    ``Sequential`` of equal, composite modules counts as a list too. A block that is registered twice is returned once.
    """
    lists = [list(dict.fromkeys(blocks)) for blocks in _iterate_layer_lists(root)]
    seen: set[nn.Module] = set()
    unique = []
    for blocks in lists:
        blocks = [block for block in blocks if block not in seen]
        seen.update(blocks)
        if blocks:
            unique.append(blocks)
    return unique


def iterate_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that the forward of ``module`` calls: its children, and the items of containers among them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from iterate_children(child)
        else:
            yield child


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called, so that its weights can be gathered for it."""
    if isinstance(module, torch.jit.ScriptModule):
        return hasattr(module, "forward")  # in C++; its class has a descriptor that cannot be read
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def get_embedding_and_head(model: nn.Module) -> tuple[nn.Embedding | None, nn.Module | None]:
    """Return the input embedding and the output head that a Hugging Face model declares, where it has them."""
    return _get_embedding(model), _get_head(model)


def get_optional_final_norm(model: nn.Module) -> nn.Module | None:
    """Return the norm that stands beside the last list of blocks in ``model``, or None."""
    for parent in reversed(list(model.modules())):
        children = list(parent.children())
        if not any(_is_container(child) and _blocks_of(child) for child in children):
            continue
        norms = [child for child in children if "norm" in type(child).__name__.lower() and _owns_parameters(child)]
        if norms:
            return norms[-1]
    return None


def is_of_tower(module: nn.Module, model: Any) -> bool:
    """Whether ``module`` belongs to a model inside of ``model`` that has another config: of one that sees, or hears."""
    config: Any = getattr(model, "config", None)
    inner: list[Any] = [part for part in model.modules() if is_hf_model(part) and module in part.modules()]
    if not hasattr(config, "get_text_config") or not inner:
        return False
    return inner[-1].config.model_type not in (config.model_type, config.get_text_config().model_type)


def get_parameter_owners(root: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Map every parameter to the modules that hold it directly, with its attribute name: two or more where tied."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in get_modules(root):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return owners


def get_parameter_names(root: nn.Module) -> dict[nn.Parameter, str]:
    """Map every parameter to its (first) fully qualified name in ``root``."""
    return {parameter: name for name, parameter in root.named_parameters()}


def _iterate_layer_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        if _is_container(child):
            yield from _iterate_container(child)
        elif not is_metric(child) and not _is_adapter(child):
            yield from _iterate_layer_lists(child)


def _iterate_container(container: nn.Module) -> Iterator[list[nn.Module]]:
    for child in container.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _iterate_container(child)
        elif not is_metric(child) and (get_hf_models(child) or not has_forward(child)):
            yield from _iterate_layer_lists(child)
    if blocks := _blocks_of(container):
        yield blocks


def _is_adapter(module: nn.Module) -> bool:
    """Whether peft has put ``module`` in place of another, which it keeps with its adapters in dicts by their names."""
    return hasattr(module, "base_layer") or isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)


def _blocks_of(container: nn.Module) -> list[nn.Module]:
    return [child for child in container.children() if _is_block(child)]


def _is_block(module: nn.Module) -> bool:
    is_nested = isinstance(module, nn.ModuleList | nn.ModuleDict) or is_metric(module) or get_hf_models(module)
    return not is_nested and has_forward(module) and _owns_parameters(module)


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


def _get_embedding(model: Any) -> nn.Embedding | None:
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def _get_head(model: Any) -> nn.Module | None:
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) and _owns_parameters(head) else None
